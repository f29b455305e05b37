"""What `search validate --cross-validate` fits: a few named factors, each of one physical cause.

A parameter multiplies one cause of time wherever it is at work: on a kind of silicon, in a format, on a kind of link.
None knows a row, a model or where a row comes from. A factor of 1.0 is what measured operators and assumptions say.
The catalogue ships the factors that all chips share as a fit to all rows has them (`SHIPPED`); a cross-validation takes
them out first (`unfitted`), so that no fold has seen its own rows. `spread` says how far a factor may be from 1.0, as
the standard deviation of its logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from estimator.precision import recipe
from hardware.chip import ChipSpec
from hardware.dtype import DType
from hardware.system import SystemSpec, Tier
from search.configuration import Configuration

__all__ = ["PARAMETERS", "SHIPPED", "Parameter", "SystemFactor", "unfitted"]


Change = Callable[[SystemSpec, float], SystemSpec]


class Parameter(Protocol):
    """One factor and what it acts on."""

    @property
    def name(self) -> str:
        """What it multiplies, for people."""

    @property
    def cause(self) -> str:
        """Whose seconds it multiplies: parameters of one cause multiply the same."""

    @property
    def spread(self) -> float:
        """Standard deviation of its logarithm before any step was measured."""

    def touches(self, config: Configuration) -> bool:
        """Whether it may act there; where it cannot, nothing is priced again."""

    def scaled(self, config: Configuration, factor: float) -> Configuration:
        """The configuration with the cause multiplied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFactor:
    """A parameter that acts on systems: on all whose chip is of the `silicon`, where that is given."""

    name: str
    cause: str
    spread: float
    change: Change
    silicon: str = ""
    formats: frozenset[DType] = frozenset()  # of linear layers
    on: Callable[[SystemSpec], bool] = lambda _system: True

    def touches(self, config: Configuration) -> bool:
        """Whether chip and recipe are the ones that it is of."""
        mine = not self.silicon or silicon_of(config.system.chip) == self.silicon
        formed = not self.formats or recipe(config.strategy.precision).gemm in self.formats
        return mine and formed and self.on(config.system)

    def scaled(self, config: Configuration, factor: float) -> Configuration:
        """The configuration on the changed system."""
        return replace(config, system=self.change(config.system, factor))


SILICON: Mapping[str, str] = {
    "a100-80g-pcie": "A100 PCIe", "a100": "A100", "h100": "Hopper", "h200": "Hopper", "h800": "Hopper", "h20": "Hopper",
    "b200": "B200", "gb200": "GB200", "b300": "B300", "gb300": "B300",
}  # fmt: skip
"""Chips that share a die and its clocks, by the longest beginning of their name. A PCIe card has three quarters of the
power of the same die on a board."""


def silicon_of(chip: ChipSpec) -> str:
    """The silicon of a chip, by its name in the catalogue; its own name where it shares it with none.

    >>> from hardware.catalog import chip
    >>> silicon_of(chip("a100-40g-sxm")), silicon_of(chip("a100-80g-pcie")), silicon_of(chip("tpu-v5p"))
    ('A100', 'A100 PCIe', 'tpu-v5p')
    """
    known = [start for start in SILICON if chip.name.startswith(start)]
    return SILICON[max(known, key=len)] if known else chip.name


def _on_chip(system: SystemSpec, **changes: object) -> SystemSpec:
    return replace(system, chip=replace(system.chip, **changes))  # type: ignore[arg-type]


def _gemm(system: SystemSpec, factor: float) -> SystemSpec:
    return _on_chip(system, gemm_slowdown=system.chip.gemm_slowdown * factor)


def _narrow_gemm(system: SystemSpec, factor: float) -> SystemSpec:
    """Only products of eight bits and less."""
    chip = system.chip
    slower = {d: min(e / factor, 1.0) if d in NARROW else e for d, e in chip.gemm_efficiency.items()}
    return _on_chip(system, gemm_efficiency=slower)


def _attention(system: SystemSpec, factor: float) -> SystemSpec:
    """No head dim reaches more than the peak."""
    chip = system.chip
    most = 1.0 / max(1.0, *chip.attention_head_dims.values()) if chip.attention_head_dims else 1.0
    return _on_chip(system, attention_efficiency=min(chip.attention_efficiency / factor, most))


def _memory(system: SystemSpec, factor: float) -> SystemSpec:
    return _on_chip(system, hbm_bytes_per_s=system.chip.hbm_bytes_per_s / factor)


def _launch(system: SystemSpec, factor: float) -> SystemSpec:
    return _on_chip(system, launch_s=system.chip.launch_s * factor)


def _host(system: SystemSpec, factor: float) -> SystemSpec:
    """What frameworks launch layer by layer."""
    known = system.software
    if known is None:
        return system
    slower = replace(known, dense_layer_s=known.dense_layer_s * factor, routed_layer_s=known.routed_layer_s * factor)
    return replace(system, software=slower)


def _launches_layers(system: SystemSpec) -> bool:
    known = system.software
    return known is not None and max(known.dense_layer_s, known.routed_layer_s) > 0.0


def _has_older_attention(system: SystemSpec) -> bool:
    known = system.software
    return known is not None and known.attention_of(system.chip.name) is not None


def _links(kinds: frozenset[str]) -> Change:
    """Traffic over the tiers of these kinds."""

    def change(system: SystemSpec, factor: float) -> SystemSpec:
        return replace(
            system, tiers=tuple(_slower(tier, factor) if tier.name in kinds else tier for tier in system.tiers)
        )

    return change


def _slower(tier: Tier, factor: float) -> Tier:
    link = tier.link
    return replace(
        tier,
        link=replace(
            link,
            bytes_per_s=link.bytes_per_s / factor,
            latency_s=link.latency_s * factor,
            setup_s=link.setup_s * factor,
        ),
    )


NARROW = frozenset({DType.FP8, DType.MXFP8, DType.NVFP4})
EIGHT_BITS = frozenset({DType.FP8, DType.MXFP8})
FOUR_BITS = frozenset({DType.NVFP4})
NVLINK = frozenset({"nvlink", "bridge"})
HOST = frozenset({"pcie"})
NETWORK = frozenset({"ib", "roce", "rdma", "omnipath", "eth"})


def _shared(name: str, change: Change, spread: float, formats: frozenset[DType] = frozenset()) -> SystemFactor:
    return SystemFactor(name=name, cause=name, spread=spread, change=change, formats=formats)


def _by_silicon(name: str, change: Change, *, shared: float, own: float) -> list[SystemFactor]:
    """One for all chips, and one for each kind of silicon around it: an unknown chip is taken for the mean of all."""
    each = [
        SystemFactor(name=f"{name} of {silicon}", cause=name, spread=own, change=change, silicon=silicon)
        for silicon in dict.fromkeys(SILICON.values())
    ]
    return [_shared(name, change, shared), *each]


# How far chips of one kind may differ from what operators alone say (clocks under load, kernels of a training step
# instead of a benchmark's): assumptions, wide against the few percent by which repeats of a step differ.
CHIP_SPREAD = 0.10
SHARED_SPREAD = 0.20

PARAMETERS: tuple[Parameter, ...] = (
    *_by_silicon("matrix products", _gemm, shared=SHARED_SPREAD, own=CHIP_SPREAD),
    _shared("products of 8 bits", _narrow_gemm, SHARED_SPREAD, formats=EIGHT_BITS),
    _shared("products of 4 bits", _narrow_gemm, SHARED_SPREAD, formats=FOUR_BITS),
    *_by_silicon("attention", _attention, shared=2 * SHARED_SPREAD, own=SHARED_SPREAD),
    SystemFactor(
        name="attention older than the chip",
        cause="attention",
        spread=SHARED_SPREAD,
        change=_attention,
        on=_has_older_attention,
    ),
    SystemFactor(
        name="host time of layers",
        cause="host time of layers",
        spread=2 * SHARED_SPREAD,
        change=_host,
        on=_launches_layers,
    ),
    _shared("memory traffic", _memory, SHARED_SPREAD),
    _shared("kernel launches", _launch, 2 * SHARED_SPREAD),
    _shared("traffic over NVLink", _links(NVLINK), SHARED_SPREAD),
    _shared("traffic over PCIe", _links(HOST), 2 * SHARED_SPREAD),
    _shared("traffic over the network", _links(NETWORK), 2 * SHARED_SPREAD),
)

SHIPPED: Mapping[str, float] = {
    "memory traffic": 1.3 / 1.8,  # MEMORY_TRAFFIC of estimator/cost/price.py
    "host time of layers": 1.42,  # hardware/catalog/software.yaml
    "traffic over PCIe": 1.475,  # hardware/catalog/links.yaml, as the next
    "traffic over the network": 1.32,
}
"""Factors of a fit to all rows that stand in constants of the package, beside `step_gemm` and `step_attention`."""


def unfitted(config: Configuration) -> Configuration:
    """The configuration as operators and assumptions have it, before any step was looked at."""
    config = replace(config, system=_on_chip(config.system, step_gemm={}, step_attention=1.0))
    for parameter in PARAMETERS:
        if parameter.name in SHIPPED and parameter.touches(config):
            config = parameter.scaled(config, 1.0 / SHIPPED[parameter.name])
    return config
