"""Every op of a graph with what it does: FLOPs, bytes read and written, parameters, and its price where one is asked.

Amounts are those of one run of the op; `times` says how often the model runs its block. Sums nothing: hierarchy.py
does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from estimator.cost.price import price
from estimator.cost.work import work, written_bytes
from estimator.graph import Block, BlockKind, OpGraph
from estimator.op import Array, Op, OpKind, Phase, Traffic
from estimator.part import Part, part_of
from estimator.precision import PrecisionRecipe, Role, apart
from hardware.chip import ChipSpec

__all__ = ["AMOUNTS", "Entry", "amounts", "inventory", "scope_of", "without_gradient"]

PHASES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.WEIGHT_GRAD)
AMOUNTS = ("flops", "read_bytes", "written_bytes", "link_bytes", "parameters", "seconds")
DERIVED = re.compile(r"\.(weight_grad|grad\d*)$")  # what differentiation adds to the name of an op
TrafficSeconds = Callable[[Op], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One op of one block. `seconds` is NaN where nothing was priced; `bound` is what they are of.

    `scope`: the path from the model to the op, as `layers`, `moe`, `attention`, `q_proj`. `compute_s`, `memory_s`: its
    arithmetic and its traffic alone. `utilisation`: of its seconds, what they would take at the chip's peaks. `source`
    said so, with that `confidence`.
    """

    scope: tuple[str, ...]
    times: int
    op: Op
    block: Block
    part: Part
    flops: float
    read_bytes: float
    written_bytes: float
    link_bytes: float
    parameters: float
    seconds: float = math.nan
    bound: str = ""
    source: str = ""
    confidence: str = ""
    compute_s: float = math.nan
    memory_s: float = math.nan
    utilisation: float = math.nan

    @property
    def intensity(self) -> float:
        """FLOPs per byte through HBM; NaN where there are no bytes."""
        moved = self.read_bytes + self.written_bytes
        return self.flops / moved if moved else math.nan

    def amount(self, name: str) -> float:
        """One of AMOUNTS, of all runs."""
        value: float = getattr(self, name)
        return value * self.times


def inventory(
    graph: OpGraph, recipe: PrecisionRecipe, chip: ChipSpec | None = None, traffic: TrafficSeconds | None = None
) -> tuple[Entry, ...]:  # fmt: skip
    """Entries in the order of the model, phase by phase; priced on `chip`, and traffic by `traffic`, where given."""
    entries: list[Entry] = []
    shared: set[str] = set()  # weights of ends, which two of them may share (tied embeddings)
    for kind in graph.kinds:
        block, times = graph.blocks[kind], graph.sequence.count(kind)
        counted = set[str]() if kind.is_layer or kind is BlockKind.MTP else shared
        for phase in PHASES:
            for op in block.of_phase(phase):
                weights = [w for w in op.weights if phase is Phase.FORWARD and w.name not in counted]
                counted.update(w.name for w in weights)
                parameters = sum(_number(w.elements) for w in weights)
                entries.append(_entry(op, block, times, parameters, recipe, chip, traffic))
    return tuple(entries)


def without_gradient(name: str) -> str:
    """The name of the op whose gradient an op of that name is; the same of others.

    >>> without_gradient("mlp.up_proj.weight_grad"), without_gradient("mlp.up_proj")
    ('mlp.up_proj', 'mlp.up_proj')
    """
    return DERIVED.sub("", name)


def scope_of(kind: BlockKind, name: str) -> tuple[str, ...]:
    """Where an op of that name stands; its gradients stand with it.

    >>> scope_of(BlockKind.MOE, "attention.q_proj.grad")
    ('layers', 'moe', 'attention', 'q_proj')
    """
    inside = without_gradient(name).split(".")
    if kind.is_layer:
        return ("layers", kind.value, *inside)
    return (kind.value, *(inside[1:] if inside[0] == kind.value and len(inside) > 1 else inside))


def amounts(op: Op, block: Block, recipe: PrecisionRecipe) -> Mapping[str, Array]:
    """FLOPs and bytes of an op; of a recipe with sensitive layers, the mean over layers."""
    if op.kind is OpKind.COLLECTIVE:
        sent = 0.0 if op.collective is Traffic.COPY else op.payload
        return {"flops": 0.0, "read_bytes": 0.0, "written_bytes": 0.0, "link_bytes": sent}
    if recipe.sensitive and op.role is Role.LINEAR_INPUT:
        narrow, wide = (amounts(op, block, r) for r in apart(recipe))
        return {name: (1.0 - recipe.sensitive) * narrow[name] + recipe.sensitive * wide[name] for name in narrow}
    done, written = work(op, block, recipe), written_bytes(op, block, recipe)
    return {"flops": done.flops, "read_bytes": done.nbytes - written, "written_bytes": written, "link_bytes": 0.0}


def _entry(
    op: Op, block: Block, times: int, parameters: float, recipe: PrecisionRecipe, chip: ChipSpec | None,
    traffic: TrafficSeconds | None,
) -> Entry:  # fmt: skip
    done: dict[str, Any] = {name: _number(value) for name, value in amounts(op, block, recipe).items()}
    priced = _price(op, block, recipe, chip, traffic)
    return Entry(
        scope=scope_of(block.kind, op.name), times=times, op=op, block=block, part=part_of(op), **done,
        parameters=parameters, **priced,
    )  # fmt: skip


def _price(
    op: Op, block: Block, recipe: PrecisionRecipe, chip: ChipSpec | None, traffic: TrafficSeconds | None
) -> dict[str, Any]:  # fmt: skip
    if op.kind is OpKind.COLLECTIVE:
        return {} if traffic is None else {"seconds": _number(traffic(op)), "bound": "link", "source": "link"}
    if chip is None:
        return {}
    p = price(op, block, chip, recipe)
    seconds, compute_s, memory_s = _number(p.seconds), _number(p.compute_s), _number(p.memory_s)
    peak = chip.peak(p.work.dtype) if p.work.matrix else chip.vector_flops_per_s[p.work.dtype]
    least = max(_number(p.work.flops) / peak, _number(p.work.nbytes) / chip.hbm_bytes_per_s)
    return {
        "seconds": seconds, "bound": "compute" if compute_s >= memory_s else "memory", "source": p.source,
        "confidence": p.confidence.value, "compute_s": compute_s, "memory_s": memory_s,
        "utilisation": least / seconds if seconds else math.nan,
    }  # fmt: skip


def _number(value: Array) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
