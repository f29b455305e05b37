"""A launch file in our words: what `search import` finds and `search export` is given. Knows no framework.

Strategies are plain values by axis (`tp`, `overlap_dp`, `offload_states` ...), as a space's YAML writes them, flat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from results.launchers.settings import Value

__all__ = ["Given", "Imported", "Job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the command line adds to a file: GPUs, launch arguments, variables of the environment, the model's sizes."""

    num_chips: int | None = None
    launch_arguments: str | None = None  # beside a file that has none
    defined: Mapping[str, str] = field(default_factory=dict)
    num_layers: int | None = None  # of the model that the command line names
    layers_of: Mapping[str, int] = field(default_factory=dict)  # of every shipped model


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A launch file as read. What it does not say is None and stands under `missing` with what would say it."""

    framework: str
    model: str | dict[str, Value] | None
    num_chips: int | None
    seq: int | None
    global_batch: int | None
    strategy: dict[str, Value]
    unknown: tuple[str, ...] = ()  # no argument of that name, by the pinned list
    unmodelled: tuple[str, ...] = ()  # known, may change time or memory, and without a counterpart here
    ignored: tuple[str, ...] = ()  # known, and can change neither
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A configuration to be written: every axis has a value.

    `layers`: transformer layers per chunk in model order, with the string that Megatron takes for them. `model_name`:
    of a shipped model, else empty. `chips_per_node`: what one host launches.
    """

    name: str
    model: Mapping[str, Value]
    model_name: str
    num_chips: int
    chips_per_node: int
    seq: int
    global_batch: int
    routing_skew: float
    strategy: Mapping[str, Value]
    layers: tuple[int, ...]
    is_even: bool  # whether `layers` is what any framework does unasked
    layout: str

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.num_chips // (self.size("tp") * self.size("cp") * self.size("pp"))

    @property
    def num_nodes(self) -> int:
        """Hosts."""
        return -(-self.num_chips // self.chips_per_node)

    def size(self, axis: str) -> int:
        """A whole number of the strategy."""
        value = self.strategy[axis]
        assert isinstance(value, int)
        return value
