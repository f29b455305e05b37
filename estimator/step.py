"""The sentence this package says: evaluate(model, strategy, system, workload) -> StepResult."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from estimator.auto_layout import configured_layouts
from estimator.batch import Out, Rows, compose_rows
from estimator.compose import Place, place_of
from estimator.imbalance import MEDIAN
from estimator.layout import even_layers
from estimator.memory import ITEMS, RESERVED_FACTOR, Item
from estimator.model import ModelSpec
from estimator.precision import recipe
from estimator.result import COLUMNS, StageResult, StepResult, Value
from estimator.rules import RULES, Case, check, explain
from estimator.segments import missing_bytes, segment_of_ranks
from estimator.span_codes import CODES
from estimator.strategy import LayoutRule, Offload, RecomputeKind, Strategy
from estimator.tables import (
    NET_SIZES,
    ROW_FLAGS,
    ROW_SIZES,
    TableBuilder,
    choice_index,
    fixed_host_s,
    model_flops_per_token,
)
from estimator.workload import Workload
from hardware.system import SystemSpec

__all__ = ["columns_of", "distinct", "evaluate", "with_layout"]

MAX_KEYS = 1 << 22  # look-up table of 32 MB; beyond it keys are sorted


def evaluate(
    model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload, *, gate: bool = False,
    quantile: float = MEDIAN,
) -> StepResult:  # fmt: skip
    """Price one strategy, or `[N]` strategies that share their structure fields.

    An illegal scalar raises ValueError (law, offence, remedy); illegal rows of a batch are marked with their rule. A
    row that does not fit in memory is infeasible; `gate` leaves its seconds unpriced (NaN). `quantile`: of how far the
    fullest rank of experts is above the mean, where routing is skewed (band.py asks for others than the median).
    """
    case = Case.of(model, strategy, system, workload)
    code = check(case)
    scalar = all(np.ndim(v) == 0 for v in strategy.sizes().values())
    if scalar and code[0]:
        raise ValueError(explain(case, int(code[0])))
    if strategy.layout is LayoutRule.AUTO:
        if scalar:
            return _best_layout(case, strategy, gate=gate, quantile=quantile)[1]
        return _balanced(case, code, gate=gate, quantile=quantile)
    legal = np.flatnonzero(code == 0)
    out = np.full((len(code), len(Out)), np.nan)
    stages: tuple[StageResult, ...] = ()
    seconds = np.empty((0, 3))
    if legal.size:
        out[legal], stages, seconds = _compose(case, legal, gate=gate, quantile=quantile)
    columns = columns_of(out, model, system, workload, strategy)
    too_large = out[:, Out.DEVICE_MEMORY_BYTES] > system.usable_hbm_bytes
    fits = (code == 0) & ~too_large & (out[:, Out.HOST_MEMORY_BYTES] <= system.chip.host_memory_bytes)
    gates = np.where(too_large, "memory", "host_memory").tolist()
    reasons = tuple(
        "" if ok else RULES[c - 1].name if c else gate for ok, c, gate in zip(fits, code, gates, strict=True)
    )
    chips = dict.fromkeys(text for part in system.parts for text in part.chip.assumptions)
    assumptions = (*model.notes, *system.assumptions, *chips)
    if not scalar:
        return StepResult(columns={**columns}, feasible=fits, reason=reasons, assumptions=assumptions)
    plain: dict[str, Value] = {name: float(np.asarray(value)[0]) for name, value in columns.items()}
    return StepResult(
        columns=plain, feasible=bool(fits[0]), reason=reasons[0], stages=stages, assumptions=assumptions,
        chunks=tuple((float(f), float(b), float(w)) for f, b, w in seconds),
        finishing_rank=0 if np.isnan(out[0, Out.RANK]) else int(out[0, Out.RANK]),
    )  # fmt: skip


def with_layout(model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload) -> Strategy:
    """The scalar strategy with the layout that `auto` comes to (None where that is the even one); others as they are.

    ValueError where it is illegal.
    """
    if strategy.layout is not LayoutRule.AUTO:
        return strategy
    case = Case.of(model, strategy, system, workload)
    code = check(case)
    if code[0]:
        raise ValueError(explain(case, int(code[0])))
    return _best_layout(case, strategy, gate=False, quantile=MEDIAN)[0]


def _best_layout(case: Case, strategy: Strategy, *, gate: bool, quantile: float) -> tuple[Strategy, StepResult]:
    """The fastest of the balanced layouts and the even one, and its price; where none fits, what takes least memory.

    Even can be faster where rounds are few: the busiest rank is then not all that a span depends on.
    """
    parts = case.model, case.system, case.workload
    found = configured_layouts(case.model, strategy, case.system, case.workload)
    even = even_layers(case.model.num_layers, len(found[0]))
    named: list[tuple[int, ...] | None] = [layers for layers in found if layers != even]
    options = [replace(strategy, layout=layers) for layers in (*named, None)]
    priced = [(option, evaluate(parts[0], option, *parts[1:], quantile=quantile)) for option in options]
    best = min(priced, key=lambda one: _merit(one[1]))
    return best if not gate else (best[0], evaluate(parts[0], best[0], *parts[1:], gate=True, quantile=quantile))


def _merit(result: StepResult) -> tuple[bool, float, float]:
    """Smaller is better: what fits by its seconds, then its bytes; what does not the other way round."""
    seconds, nbytes = float(result.step_time_s), float(result.device_memory_bytes)
    return (False, seconds, nbytes) if result.feasible else (True, nbytes, seconds)


def _balanced(case: Case, code: np.ndarray, *, gate: bool, quantile: float) -> StepResult:
    """A batch of strategies, each with the layout that balances it."""
    rows = []
    for i in range(len(code)):
        sizes = {name: float(case.sizes[name][i]) for name in case.strategy.sizes()}
        s = case.strategy.with_sizes(sizes)
        rows.append(None if code[i] else _best_layout(case, s, gate=gate, quantile=quantile)[1])
    told = [row for row in rows if row is not None]
    names = [c.name for c in COLUMNS]
    columns = {n: np.array([np.nan if row is None else row.columns[n] for row in rows]) for n in names}
    return StepResult(
        columns={**columns}, feasible=np.array([row is not None and bool(row.feasible) for row in rows]),
        reason=tuple(RULES[c - 1].name if row is None else str(row.reason) for row, c in zip(rows, code, strict=True)),
        assumptions=told[0].assumptions if told else (),
    )  # fmt: skip


def _compose(
    case: Case, legal: np.ndarray, *, gate: bool, quantile: float
) -> tuple[np.ndarray, tuple[StageResult, ...], np.ndarray]:
    """Price the distinct rows of the legal candidates, then compose each."""
    s = case.strategy
    sizes = {name: values[legal] for name, values in case.sizes.items()}
    has_blocks = s.recompute.kind is RecomputeKind.BLOCK
    builder = TableBuilder(case.model, case.system, case.workload, s, (s.recompute,), has_blocks, quantile)
    row_of, rows = distinct(sizes, (*ROW_SIZES, *ROW_FLAGS))
    net_of, nets = distinct(sizes, NET_SIZES)
    layout_of, places = distinct(sizes, ("pp", "vpp"))
    program_of, orders = distinct(sizes, ("pp", "vpp", "num_micro_batches"))
    made = [builder.layout(s.schedule, int(pp), int(v)) for pp, v in zip(places["pp"], places["vpp"], strict=True)]
    walked = [builder.program(s.schedule, *map(int, shape)) for shape in zip(*orders.values(), strict=True)]
    tables = builder.tables(rows, nets)

    def whole(name: str) -> np.ndarray:
        return sizes[name].astype(np.int64)

    n = len(legal)
    # A layout that knows what each chunk recomputes has it as the first layer (estimator/layout.py).
    layers = whole("recompute_layers") if s.recompute_per_chunk is None else np.ones(n, dtype=np.int64)
    candidates = Rows(
        row=row_of, net=net_of, layout=np.array(made, dtype=np.int64)[layout_of],
        schedule=np.full(n, CODES[s.schedule]), program=np.array(walked, dtype=np.int64)[program_of],
        pp=whole("pp"), vpp=whole("vpp"),
        num_micro_batches=whole("num_micro_batches"), choice=np.full(n, choice_index(builder.choices, s.recompute)),
        layers=layers, overlap_tp=whole("overlap_tp"),
        overlap_ep=whole("overlap_ep") * (sizes["ep"] > 1),
        overlap_pp=whole("overlap_pp"), overlap_dp=whole("overlap_dp"), zero=whole("zero_stage"),
        reshard=whole("reshard_after_forward"), prefetch=np.ascontiguousarray(sizes["prefetch_blocks"]),
        offload=np.stack([sizes[f"offload_{f.name}"] for f in fields(Offload)], axis=1),
        bucket=np.ascontiguousarray(sizes["bucket_bytes"]),
    )  # fmt: skip
    out = np.empty((n, len(Out)))
    num_ranks = int(candidates.pp[-1])
    place = place_of(tables, candidates.layout[-1], num_ranks)
    items, seconds = np.zeros((candidates.pp[-1], len(ITEMS))), np.zeros((len(place.class_of), 3))
    compose_rows(tables, candidates, gate, out, items, seconds)
    if case.system.segments:  # what a rank's chip lacks is counted there, and is no tensor
        lacking = np.array(missing_bytes(case.system))[list(segment_of_ranks(case.system, num_ranks))]
        items[:, Item.WORKING_SET] -= lacking
    return out, _stages(place, items, seconds), seconds


def distinct(sizes: dict[str, np.ndarray], names: tuple[str, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Index of each candidate's distinct combination of `names` [N], and those combinations."""
    n = len(sizes[names[0]])
    if n == 1:
        return np.zeros(1, dtype=np.int64), {name: np.array(sizes[name]) for name in names}
    # Mixed-radix keys of the few values of each column: no sort of whole rows.
    key, radix = np.zeros(n, dtype=np.int64), 1
    tables = [np.unique(sizes[name]) for name in names]
    for name, table in zip(names, tables, strict=True):
        key += np.searchsorted(table, sizes[name]) * radix
        radix *= len(table)
    if radix > MAX_KEYS:
        found, inverse = np.unique(key, return_inverse=True)
    else:
        place = np.zeros(radix, dtype=np.int64)
        found = np.flatnonzero(np.bincount(key, minlength=radix))
        place[found] = np.arange(len(found))
        inverse = place[key]
    values: dict[str, np.ndarray] = {}
    left = found.copy()
    for name, table in zip(names, tables, strict=True):
        left, digit = np.divmod(left, len(table))
        values[name] = table[digit]
    return inverse.reshape(-1).astype(np.int64), values


def _stages(place: Place, items: np.ndarray, seconds: np.ndarray) -> tuple[StageResult, ...]:
    """Details of the last candidate, per rank."""
    first = place.first.reshape(len(place.counts), -1, place.first.shape[1])
    layers = first[place.class_of, -1].sum(axis=1).astype(int).tolist()
    forward, backward = seconds[:, 0].tolist(), (seconds[:, 1] + seconds[:, 2]).tolist()
    places = place.chunks.tolist()
    result = [
        StageResult(
            rank=rank, memory=dict(zip(ITEMS, memory, strict=True)), layers=tuple([layers[j] for j in chunks]),
            forward_s=sum([forward[j] for j in chunks]), backward_s=sum([backward[j] for j in chunks]),
        )
        for rank, (memory, chunks) in enumerate(zip(items.tolist(), places, strict=True))
    ]  # fmt: skip
    return tuple(result)


def columns_of(
    out: np.ndarray, model: ModelSpec, system: SystemSpec, workload: Workload, strategy: Strategy
) -> dict[str, np.ndarray]:
    """The columns of estimator/result.py from composed rows [N, Out] of one strategy's structure fields."""
    col = {o.name.lower(): out[:, o].copy() for o in Out}
    step, chips, tokens = col["step_time_s"], system.num_chips, float(workload.tokens)
    r = recipe(strategy.precision)
    per_chip = model_flops_per_token(model, workload.seq) * tokens / chips
    peak, bf16 = system.peak(r.gemm), system.half_peak
    priced = col["tile_s"] + col["measured_s"] + col["roofline_s"]
    col |= {
        "tokens_per_s": tokens / step,
        "tokens_per_s_per_gpu": tokens / chips / step,
        "model_tflops_per_gpu": per_chip / step / 1e12,
        "mfu": per_chip / (step * peak),
        "mfu_bf16": per_chip / (step * bf16),
        "hfu": (per_chip + col["recompute_flops"]) / (step * peak),
        "compute_s": col["forward_s"] + col["backward_s"] + col["recompute_s"],
        "fixed_host_s": np.where(np.isnan(step), np.nan, fixed_host_s(strategy.cuda_graph)),
        "reserved_memory_bytes": col["peak_memory_bytes"] * RESERVED_FACTOR,
        "num_gpus": np.full_like(step, chips),
        "cost_usd_per_mtoken": system.price_usd_per_s * step / tokens * 1e6,
        "energy_j_per_token": system.power_w * step / tokens,
        "co2_kg_per_mtoken": system.co2_kg_per_s * step / tokens * 1e6,
        "price_share_measured": col["measured_s"] / priced,
        "price_share_tile": col["tile_s"] / priced,
        "price_share_roofline": col["roofline_s"] / priced,
    }
    return {c.name: col[c.name] for c in COLUMNS}
