"""The oracle of the search: every point of a small space through `evaluate`, one by one, in plain Python.

Shares with the search only the readers of a space and `evaluate` itself. What an option without effect is, what
constraints mean and what dominates is written down here once more, as a reader would say it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from estimator.layers import Mixer, Mlp
from estimator.layout import even_layers
from estimator.rules import Case, check
from estimator.step import evaluate
from estimator.strategy import (
    Chunks,
    ContextParallel,
    Module,
    RankOrder,
    Recompute,
    RecomputeKind,
    Schedule,
    Strategy,
)
from hardware.system import SystemSpec
from search.axes import AXES, strategy_of
from search.balanced import with_space_layout
from search.space import Space, parse_space

SHORT = {"llama": "llama3_8b", "mixtral": "mixtral_8x7b", "deepseek": "deepseek_v3", "qwen": "qwen3_235b_a22b",
    "hybrid": "nemotron_3_nano", "windows": "gpt_oss_20b", "compressed": "deepseek_v4_flash",
}  # fmt: skip


def space_of(
    strategy: str, *, model: str = "llama", chips: str = "16", cluster: str = "dgx_h100", seq: int = 4096,
    batch: int = 32, more: str = "", system: str = "", skew: float = 0.0,
) -> Space:  # fmt: skip
    """A space from the text of its strategy (flow YAML) and of whatever else it needs."""
    where = system or f"{{cluster: {cluster}, num_chips: {chips}}}"
    head = f"name: small\nmodel: {SHORT[model]}\nsystem: {where}\n"
    work = f"workload: {{seq: {seq}, global_batch: {batch}, routing_skew: {skew}}}\n"
    return parse_space(f"{head}{work}strategy: {{{strategy}}}\n{more}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One legal candidate: its canonical id, everything that may stand for it, and what `evaluate` says."""

    id: int
    ids: frozenset[int]
    values: dict[str, float]
    strategy: Strategy
    fits: bool


def raw_points(space: Space) -> Iterator[tuple[int, SystemSpec, dict[str, Any]]]:
    """(id, system, values of the axes) of every point, in canonical order."""
    names = [axis.name for axis in AXES]
    points = itertools.product(space.systems, *(space.axes[name] for name in names))
    for number, (system, *values) in enumerate(points):
        yield number, system, dict(zip(names, values, strict=True))


def modules_of(space: Space) -> set[Module]:
    """Recompute modules that have a meaning on this model."""
    model = space.model
    layers = model.layer_specs
    out = {Module.LAYERNORM} | ({Module.CORE_ATTENTION} if any(a.mixer is Mixer.ATTENTION for a in layers) else set())
    out |= {Module.MLA_UP_PROJ} if model.mla else set()
    out |= {Module.MOE, Module.MOE_ACTIVATION} if model.moe else set()
    out |= {Module.MLP, Module.MLP_ACTIVATION} if any(layer.mlp is Mlp.DENSE for layer in layers) else set()
    out |= {Module.MLP_ACTIVATION} if model.moe and model.moe.num_shared_experts else set()
    return out


def plain_strategy(space: Space, system: SystemSpec, values: dict[str, Any]) -> Strategy | None:
    """What a point means with every option without effect off; None where the point says what cannot be said."""
    tp, cp, pp, ep, etp = (values[n] for n in ("tp", "cp", "pp", "ep", "etp"))
    if system.num_chips % (tp * cp * pp):
        return None
    dp = system.num_chips // (tp * cp * pp)
    values = dict(values)
    recompute = values["recompute"]
    if recompute.kind is RecomputeKind.SELECTIVE:
        left = set(recompute.modules & modules_of(space))
        moe, layers = space.model.moe, space.model.layer_specs
        if Module.MOE in left:
            left.discard(Module.MOE_ACTIVATION)
        in_dense = any(layer.mlp is Mlp.DENSE for layer in layers) and Module.MLP not in left
        in_shared = moe is not None and moe.num_shared_experts > 0 and Module.MOE not in left
        if not in_dense and not in_shared:
            left.discard(Module.MLP_ACTIVATION)
        values["recompute"] = Recompute(kind=RecomputeKind.SELECTIVE, modules=frozenset(left)) if left else Recompute()
    if values["recompute_per_chunk"] is not None:
        if recompute.kind is not RecomputeKind.BLOCK:
            return None
        values["recompute_layers"] = 0
    elif recompute.kind is not RecomputeKind.BLOCK:
        values["recompute_layers"] = 0
    elif values["recompute_layers"] == 0:
        return None
    twice = values["schedule"] is Schedule.DUALPIPE  # two ranks hold the same weights whatever dp is
    alone = dp * cp == 1 and (tp * cp * dp) // (ep * etp) <= 1 and not twice
    replicas = values["dp_replicate"]
    if dp % replicas or (tp * cp * dp) // (ep * etp) % replicas:
        return None
    if alone:
        values |= {"zero_stage": 0, "overlap_dp": 0}
    if values["zero_stage"] == 0:
        values["dp_replicate"] = 1
    if values["zero_stage"] < 3:
        values |= {"reshard_after_forward": 1, "prefetch_blocks": 1}
    if not values["overlap_dp"]:
        values["prefetch_blocks"] = 1
    values |= {f"overlap_{n}": 0 for n, size in (("tp", tp), ("ep", ep), ("pp", pp)) if size == 1}
    if not values["overlap_dp"] or values["zero_stage"] == 3:
        values |= {"bucket_bytes": 0, "expert_bucket_bytes": None}
    if space.model.moe is None:
        values["expert_bucket_bytes"] = None
    if space.model.moe is None or ep == 1:
        values["redundant_experts"] = 0
    if not values["overlap_tp"]:
        values["tp_chunks"] = Chunks()
    if cp == 1 or values["context_parallel"] is not ContextParallel.RING:
        values["overlap_cp"] = 1
    return strategy_of(values)


def key_of(space: Space, system: SystemSpec, s: Strategy) -> tuple[Any, ...]:
    """Equal for points that are one candidate."""
    layout = s.layout or even_layers(space.model.num_layers, s.pp * s.vpp)
    depth = max(layout)
    recompute: Any = s.recompute
    layers = s.recompute_layers
    if s.recompute.kind is RecomputeKind.BLOCK and s.recompute_per_chunk is None and layers >= depth:
        # A block that covers every chunk is full recompute, except that it leaves multi-token prediction alone.
        recompute, layers = ("all layers", 0) if space.model.num_mtp_layers else (Recompute.parse("full"), 0)
    split = s.sequence_parallel if s.tp > 1 else False
    kind = s.context_parallel if s.cp > 1 else ContextParallel.RING
    order = s.rank_order if s.pp > 1 and system.num_chips > s.tp * s.cp * s.pp else RankOrder.TP_CP_DP_PP
    rest = replace(s, recompute=Recompute(), recompute_layers=0, sequence_parallel=split, context_parallel=kind)
    group = s.interleave_group if s.schedule is Schedule.INTERLEAVED and s.interleave_group != s.pp else 0
    rest = replace(rest, rank_order=order, layout=layout, interleave_group=group)
    moe = space.model.moe
    beside = s.shared_expert_overlap and s.ep > 1 and moe is not None and moe.num_shared_experts > 0
    rest = replace(rest, shared_expert_overlap=beside)
    return system, rest, recompute, layers


def is_legal(space: Space, system: SystemSpec, s: Strategy) -> bool:
    """Whether the rules let a strategy through, whatever it costs."""
    return not check(Case.of(space.model, s, system, space.workload))[0]


Members = list[tuple[int, Strategy]]
_known: dict[str, list[tuple[SystemSpec, Members]]] = {}


def legal(space: Space) -> list[tuple[SystemSpec, Members]]:
    """The points of every legal candidate, the one that stands for it first. Kept: two files of tests ask."""
    name = replace(space, constraints=()).resolved_yaml()
    if name not in _known:
        classes: dict[Any, Members] = {}
        for number, system, values in raw_points(space):
            s = plain_strategy(space, system, values)
            if s is not None and is_legal(space, system, s):
                s = with_space_layout(space, system, s)  # held to brute force in tests/estimator/test_balance.py
                classes.setdefault(key_of(space, system, s), []).append((number, s))
        for members in classes.values():
            members.sort(key=lambda m: (m[1].recompute.kind is RecomputeKind.BLOCK, m[1].recompute_layers, m[0]))
        _known[name] = [(system, members) for (system, *_), members in classes.items()]
    return _known[name]


def candidates(space: Space, *, thorough: bool = False) -> list[Candidate]:
    """Every legal candidate, evaluated; `thorough` evaluates each point that stands for it and wants the same bits."""
    out = []
    for system, members in legal(space):
        first = members[0]
        told = [evaluate(space.model, s, system, space.workload) for _, s in (members if thorough else [first])]
        values = {name: float(np.asarray(v)) for name, v in told[0].columns.items()}
        for other in told[1:]:
            assert other.columns == told[0].columns, (members, "are one candidate, but differ")
        ids = frozenset(number for number, _ in members)
        fits = bool(told[0].feasible)
        out.append(Candidate(first[0], ids, {**values, "num_gpus": system.num_chips}, first[1], fits))
    return out


def allowed(space: Space, c: Candidate) -> bool:
    """Whether all constraints hold, by Python's own evaluation of their text."""
    s, chips = c.strategy, c.values["num_gpus"]
    dp = chips / (s.tp * s.cp * s.pp)
    names: dict[str, Any] = {**c.values, **s.sizes(), "dp": dp, "sequence_parallel": s.sequence_parallel,
                             "num_micro_batches": space.workload.global_batch / dp / s.micro_batch}  # fmt: skip
    names |= {"schedule": s.schedule.value, "recompute": str(s.recompute), "precision": s.precision,
              "context_parallel": s.context_parallel.value, "optimizer": s.optimizer.value}  # fmt: skip
    return all(eval(x.expression.text, {"min": min, "max": max, "abs": abs}, names) for x in space.constraints)


def front(space: Space, among: list[Candidate]) -> dict[int, tuple[float, ...]]:
    """Objectives by id of what nothing feasible and allowed dominates; of equals the lowest id."""
    signs = [1.0 if o.minimise else -1.0 for o in space.objectives]
    best: dict[tuple[float, ...], int] = {}
    for c in among:
        if c.fits and allowed(space, c):
            point = tuple(sign * c.values[o.column] for sign, o in zip(signs, space.objectives, strict=True))
            best[point] = min(best.get(point, c.id), c.id)
    points = np.array(list(best), dtype=float).reshape(len(best), len(signs))
    out = {}
    for point, number in best.items():
        beats = (points <= point).all(axis=1) & (points < point).any(axis=1)
        if not beats.any():
            out[number] = tuple(sign * x for sign, x in zip(signs, point, strict=True))
    return out


__all__ = ["Candidate", "allowed", "candidates", "front", "legal", "space_of"]
