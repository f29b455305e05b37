"""What chips ask of a strategy: predicates for the table in rules.py, and what it names of a system."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from estimator.precision import recipe
from estimator.strategy import CudaGraph, Offload, Strategy
from hardware.dtype import DType
from hardware.system import SystemSpec

__all__ = ["compiled", "formats", "host_known", "launches", "multiplies", "offered"]


def formats(s: Strategy) -> tuple[DType, ...]:
    """What a recipe multiplies, each once."""
    r = recipe(s.precision)
    return tuple(dict.fromkeys((r.gemm, r.attention)))


def offered(system: SystemSpec) -> str:
    """What the matrix engines of a system multiply, by chip."""
    by_chip = {part.chip.name: part.chip.matrix_flops_per_s for part in system.parts}
    return " and ".join(f"{name} has {', '.join(d.value for d in known)}" for name, known in by_chip.items())


def multiplies(s: Strategy, system: SystemSpec) -> bool:
    """Whether the matrix engine of every chip has the formats of the recipe."""
    return all(part.chip.offers(dtype) for part in system.parts for dtype in formats(s))


def compiled(system: SystemSpec) -> str:
    """Chips whose steps are compiled programs, in which no kernel is launched by itself."""
    return " and ".join(dict.fromkeys(part.chip.name for part in system.parts if part.chip.launch_s == 0))


def launches(s: Strategy, system: SystemSpec) -> bool:
    """Whether there are launches wherever some are to be captured."""
    return s.cuda_graph is CudaGraph.NONE or not compiled(system)


def host_known(sizes: dict[str, np.ndarray], system: SystemSpec) -> np.ndarray:
    """Whether all is kept on the chip, or the host and the way to it are known."""
    shares = [sizes[f"offload_{part.name}"] for part in fields(Offload)]
    chip = system.chip
    known = min(chip.host_bytes_per_s, chip.host_memory_bytes, chip.host_memory_bytes_per_s) > 0
    return np.asarray(np.logical_and.reduce([share == 0 for share in shares]) | known)
