"""States what software makes of a chip: host work of a layer, attention kernels older than the chip. Prices nothing.

A generation is what frameworks of some years have in common, never one run of one of them. Without one, a system has
what the chip's own entry says: kernels of its time, and a host that does nothing but launch them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from hardware._errors import reject, reject_unknown
from hardware._library import read, source_text

__all__ = ["SoftwareSpec", "software", "software_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareSpec:
    """A generation of frameworks.

    Attributes:
        dense_layer_s: host seconds to launch forward and backward of one layer without experts, outside CUDA graphs.
        routed_layer_s: of one with experts.
        attention_share: by chip, achieved share of the half-precision peak of forward and backward of flash attention
            (as ChipSpec.attention_efficiency), where its kernels are older than the chip. A chip's name begins with the
            key.
        async_tensor_parallel: whether backward of a column-parallel layer reduces its input's gradient while the
            weight's is computed, and, under sequence parallelism, gathers its input again while the input's is.
        sources: where each comes from, with its date.
    """

    name: str
    dense_layer_s: float = 0.0
    routed_layer_s: float = 0.0
    attention_share: Mapping[str, float] = field(default_factory=dict, hash=False)
    async_tensor_parallel: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("dense_layer_s", "routed_layer_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                reject(f"software {self.name}: {name} must be at least 0 and finite", value, "give seconds")
        for chip, share in self.attention_share.items():
            if not 0 < share <= 1:
                reject(
                    f"software {self.name}: attention_share[{chip}] must be in (0, 1]", share, "give achieved / peak"
                )

    def attention_of(self, chip_name: str) -> float | None:
        """`attention_share` of a chip; None where its own kernels run."""
        return next((share for start, share in self.attention_share.items() if chip_name.startswith(start)), None)


def software_names() -> tuple[str, ...]:
    """The names of known generations, in catalogue order."""
    return tuple(read("software")["generations"])


@cache
def software(name: str) -> SoftwareSpec:
    """The generation of that name; ValueError with the nearest known name otherwise."""
    book = read("software")
    if name not in book["generations"]:
        reject_unknown("software", name, book["generations"])
    entry, fields, sources = book["generations"][name], {}, {}
    for key, block in entry.items():
        fields[key] = block["value"]
        sources[key] = source_text("software", block["source"])
    return SoftwareSpec(name=name, sources=sources, **fields)
