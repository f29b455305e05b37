"""What ranks of a test bed are told: a model, how its gradients travel, what is computed again. Plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from capture.traces.records import Topology

__all__ = ["BLOCKS", "MIB", "Setup"]

MIB = 1 << 20
BLOCKS = {"transformer": ("1", "2", "3", "4"), "cnn": ("0", "1", "2", "3", "4", "5")}
"""Modules of each model (models.py) that may be computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """bucket_bytes: of gradients that travel together; buckets: their names instead. part_bytes: sent at once of one.

    servers: how many ranks are servers too. recompute: blocks of the model whose activations are not kept but computed
    again. plan: the text of a tuner's plan, which decides all of these. synchronise: whether gradients travel at all.
    steps are recorded, the warm ones before are not.
    """

    model: str = "transformer"
    topology: Topology = Topology.RING
    bucket_bytes: float = 4 * MIB
    buckets: tuple[tuple[str, ...], ...] = ()
    part_bytes: float = float("inf")
    servers: int = 1
    recompute: tuple[str, ...] = ()
    plan: str = ""
    synchronise: bool = True
    steps: int = 12
    warm: int = 4

    @property
    def blocks(self) -> tuple[str, ...]:
        """Those that the model repeats."""
        return BLOCKS[self.model]

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self) | {"topology": self.topology.value})

    @classmethod
    def of(cls, text: str) -> Setup:
        """From `text`."""
        fields = json.loads(text)
        told = {"topology": Topology(fields["topology"]), "recompute": tuple(fields["recompute"]),
                "buckets": tuple(map(tuple, fields["buckets"]))}  # fmt: skip
        return cls(**fields | told)
