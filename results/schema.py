"""Columns of the Parquet files of a run: names, plain types, units and meaning. Reads and writes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.inference.result import SERVED_COLUMNS
from estimator.result import BAND_COLUMNS, COLUMNS
from estimator.strategy import (
    Chunks,
    ContextParallel,
    CudaGraph,
    Fusion,
    LayoutRule,
    Offload,
    Optimizer,
    Overlap,
    OwnFusion,
    RankOrder,
    Recompute,
    Schedule,
    Strategy,
)
from estimator.tasks import Category
from estimator.timeline import CONTENTION, IDLE
from results.table import Table

__all__ = [
    "FRONT_FIELDS",
    "REFERENCE_ID",
    "REJECTION_FIELDS",
    "REPLAY_CRITICAL",
    "REPLAY_EXPOSED",
    "REPLAY_FIELDS",
    "SERVED_FIELDS",
    "SCHEMA_VERSION",
    "STRATEGY_NAMES",
    "Field",
    "Plain",
    "conform",
    "fields_named",
    "layout_at",
    "strategy_at",
    "strategy_columns",
    "strategy_json",
]

SCHEMA_VERSION = 1
REFERENCE_ID = -1  # id of rows that were named by the user rather than enumerated


class Plain(Enum):
    """Column types that every Parquet reader knows, by their Arrow names."""

    INT64 = "int64"
    FLOAT64 = "float64"
    STRING = "string"
    BOOL = "bool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One column. A column with a `default` may be left out by the writer."""

    name: str
    kind: Plain
    unit: str
    description: str
    default: int | float | str | bool | None = None


def _field(
    kind: Plain, name: str, description: str, unit: str = "", default: float | str | bool | None = None
) -> Field:
    return Field(name=name, kind=kind, unit=unit, description=description, default=default)


_OVERLAPS, _OFFLOADS = (tuple(f.name for f in fields(kind)) for kind in (Overlap, Offload))
_STRATEGY_FIELDS = (
    _field(Plain.INT64, "tp", "tensor parallel degree", "1"),
    _field(Plain.INT64, "pp", "pipeline stages", "1"),
    _field(Plain.INT64, "cp", "context parallel degree", "1"),
    _field(Plain.INT64, "ep", "expert parallel degree", "1"),
    _field(Plain.INT64, "etp", "tensor parallel degree of experts", "1"),
    _field(Plain.INT64, "dp", "data parallel degree: chips / (tp * cp * pp)", "1"),
    _field(Plain.INT64, "vpp", "virtual stages of a rank", "1"),
    _field(Plain.STRING, "schedule", "pipeline schedule"),
    _field(
        Plain.STRING,
        "layout",
        "transformer layers per chunk joined by +, or 'even'; 'auto' where an illegal point asks for it",
    ),
    _field(Plain.INT64, "micro_batch", "sequences of a micro-batch", "1"),
    _field(Plain.INT64, "dp_replicate", "replicas of the ranks over which ZeRO shards (HSDP)", "1", default=1),
    _field(Plain.INT64, "zero_stage", "ZeRO stage", "1"),
    _field(Plain.BOOL, "reshard_after_forward", "ZeRO-3 frees weights after forward", default=True),
    _field(Plain.INT64, "prefetch_blocks", "blocks that ZeRO-3 gathers ahead", "1", default=1),
    _field(Plain.BOOL, "sequence_parallel", "norms and dropout are split by tp"),
    _field(Plain.STRING, "context_parallel", "how attention sees other ranks' keys and values"),
    _field(Plain.STRING, "rank_order", "parallel dimensions from the inside of the machine out", default="tp-cp-dp-pp"),
    _field(Plain.STRING, "recompute", "none, full, block, or modules joined by +"),
    _field(Plain.INT64, "recompute_layers", "block recompute: first N layers of each chunk", "1"),
    _field(Plain.STRING, "recompute_per_chunk", "recomputed layers per chunk joined by +, or 'same'", default="same"),
    _field(Plain.STRING, "precision", "precision recipe"),
    _field(Plain.STRING, "optimizer", "update rule"),
    _field(Plain.BOOL, "overlap_tp", "tensor-parallel traffic runs beside compute"),
    _field(Plain.BOOL, "overlap_cp", "ring attention passes keys and values beside attention", default=True),
    _field(Plain.BOOL, "overlap_dp", "data-parallel traffic runs beside compute"),
    _field(Plain.BOOL, "overlap_ep", "expert traffic runs beside compute"),
    _field(Plain.BOOL, "overlap_pp", "stage-to-stage traffic runs beside compute"),
    _field(Plain.STRING, "tp_chunks", "pieces of overlapped tp traffic: attention in, out, mlp in, out", default="4"),
    _field(Plain.INT64, "bucket_bytes", "gradient bucket; 0: one bucket", "B"),
    _field(Plain.INT64, "expert_bucket_bytes", "that of experts' gradients; -1: the others' buckets", "B", default=-1),
    _field(Plain.STRING, "fusion", "fused kernels joined by +, or 'none'"),
    *(
        _field(Plain.FLOAT64, f"offload_{what}", f"share of {what} in the host's memory", "1", default=0.0)
        for what in _OFFLOADS
    ),
    _field(Plain.INT64, "interleave_group", "micro-batches of a chunk's turn; 0: pp", "1", default=0),
    _field(Plain.STRING, "cuda_graph", "launches that are captured once", default="none"),
    _field(Plain.BOOL, "shared_expert_overlap", "shared experts run beside dispatch and combine", default=False),
    _field(Plain.INT64, "redundant_experts", "copies of hot experts over all of ep", "1", default=0),
)
_SIZE_NAMES = ("tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch", "dp_replicate", "zero_stage",
               "reshard_after_forward", "prefetch_blocks")  # fmt: skip
STRATEGY_NAMES = tuple(field.name for field in _STRATEGY_FIELDS)

_NAN = float("nan")
_LATER = {"co2_kg_per_mtoken": _NAN} | {c.name: _NAN for c in BAND_COLUMNS}  # of older runs, or trials, which lack them
FRONT_FIELDS: tuple[Field, ...] = (
    _field(Plain.INT64, "id", "canonical index of the candidate; -1 for reference points", "1"),
    _field(Plain.STRING, "name", "name of a reference point, else empty", default=""),
    _field(Plain.STRING, "system", "cluster"),
    *_STRATEGY_FIELDS,
    _field(Plain.INT64, "num_micro_batches", "micro-batches of a pipeline in one step", "1"),
    _field(Plain.BOOL, "feasible", "passes every rule and the memory gate", default=True),
    _field(Plain.STRING, "reason", "why it is not feasible, else empty", default=""),
    *(
        _field(Plain.FLOAT64, column.name, column.description, column.unit, default=_LATER.get(column.name))
        for column in (*COLUMNS, *BAND_COLUMNS)
    ),
)
REJECTION_FIELDS: tuple[Field, ...] = (
    _field(Plain.STRING, "rule", "rule that rejected"),
    _field(Plain.INT64, "count", "candidates that it rejected", "1"),
    _field(Plain.STRING, "example", "one of them, with the law it breaks", default=""),
)

SERVED_FIELDS: tuple[Field, ...] = (
    _field(Plain.INT64, "id", "canonical index of the candidate; -1 for reference points", "1"),
    _field(Plain.STRING, "name", "name of a reference point, else empty", default=""),
    _field(Plain.STRING, "system", "cluster"),
    _field(Plain.STRING, "phase", "prefill or decode"),
    _field(Plain.INT64, "batch", "sequences at once over all replicas", "1"),
    _field(Plain.INT64, "context", "tokens of a prompt, or in the cache when decoding begins", "1"),
    _field(Plain.INT64, "output", "tokens that are decoded behind them", "1"),
    _field(Plain.FLOAT64, "routing_skew", "coefficient of variation of the experts' loads", "1", default=0.0),
    _field(Plain.FLOAT64, "acceptance", "chance that a drafted token stands, given those before it", "1", default=0.8),
    _field(Plain.INT64, "tp", "tensor parallel degree", "1"),
    _field(Plain.INT64, "pp", "pipeline stages", "1"),
    _field(Plain.INT64, "ep", "expert parallel degree", "1"),
    _field(Plain.INT64, "etp", "tensor parallel degree of experts", "1"),
    _field(Plain.INT64, "dp", "replicas of attention: chips / (tp * pp)", "1"),
    _field(Plain.STRING, "weights", "format of linear layers' weights"),
    _field(Plain.STRING, "activations", "format of what products read"),
    _field(Plain.STRING, "kv_cache", "format of the cache"),
    _field(Plain.STRING, "cuda_graph", "launches that are captured once"),
    _field(Plain.STRING, "fusion", "fused kernels joined by +, or 'none'"),
    _field(Plain.BOOL, "overlap_ep", "two halves of a batch take turns"),
    _field(Plain.BOOL, "absorb", "decode multiplies queries into latents"),
    _field(Plain.INT64, "redundant_experts", "copies of hot experts over all of ep", "1", default=0),
    _field(Plain.INT64, "drafts", "tokens that are drafted and checked in a pass", "1", default=0),
    _field(Plain.INT64, "chunk", "tokens of prompts beside those that are decoded, in some passes", "1", default=0),
    _field(Plain.BOOL, "feasible", "passes every law and the memory gate", default=True),
    _field(Plain.STRING, "reason", "why it is not feasible, else empty", default=""),
    *(_field(Plain.FLOAT64, c.name, c.description, c.unit, default=_NAN) for c in SERVED_COLUMNS),
)
"""Rows of a model that answers."""

REPLAY_CRITICAL = (*(category.value for category in Category), CONTENTION, IDLE)
REPLAY_EXPOSED = tuple(c.value for c in Category if c in {
    Category.TP, Category.CP, Category.EP, Category.PP, Category.DP, Category.OPTIMIZER_COMM,
    Category.OFFLOAD})  # fmt: skip
REPLAY_FIELDS: tuple[Field, ...] = (
    _field(Plain.INT64, "id", "as in the front; -1 for reference points", "1"),
    _field(Plain.STRING, "name", "name of a reference point, else empty", default=""),
    _field(Plain.STRING, "system", "cluster"),
    _field(Plain.INT64, "num_gpus", "chips used", "1"),
    _field(Plain.STRING, "why", "what makes it a finalist, joined by commas"),
    _field(Plain.FLOAT64, "estimated_step_time_s", "step time of the estimate", "s"),
    _field(Plain.FLOAT64, "replayed_step_time_s", "step time of the replay", "s"),
    _field(Plain.FLOAT64, "error", "estimated over replayed step time, less 1", "1"),
    _field(Plain.FLOAT64, "replayed_pipeline_s", "from the first forward to the last gradient in place", "s"),
    _field(Plain.FLOAT64, "estimated_peak_memory_bytes", "allocated on the worst rank, by the estimate", "B"),
    _field(Plain.FLOAT64, "replayed_peak_memory_bytes", "allocated on the worst rank, by the replay", "B"),
    *(_field(Plain.FLOAT64, f"critical_{name}_s", f"seconds of {name} on the critical path", "s")
      for name in REPLAY_CRITICAL),
    *(_field(Plain.FLOAT64, f"exposed_{name}_s", f"{name} traffic beside no compute, on the rank with most", "s")
      for name in REPLAY_EXPOSED),
    _field(Plain.INT64, "events", "tasks that ran", "1"),
    _field(Plain.FLOAT64, "replay_s", "what unrolling and replaying it took", "s"),
    _field(Plain.STRING, "trace", "its trace, from the run folder or an absolute path; empty: none", default=""),
    _field(Plain.BOOL, "agrees", "error of at most 5 percent"),
    _field(Plain.BOOL, "fits", "the replay takes no more memory than there is", default=True),
    _field(Plain.INT64, "rank_estimated", "place among the finalists by estimate, from 1; 0: not replayed", "1"),
    _field(Plain.INT64, "rank_replayed", "place among the finalists by replay, from 1; 0: not replayed", "1"),
    _field(Plain.STRING, "note", "why it was not replayed, does not fit, or has no whole trace", default=""),
)  # fmt: skip


def fields_named(names: Sequence[str]) -> tuple[Field, ...]:
    """Fields of a front by name, in this order."""
    known = {field.name: field for field in FRONT_FIELDS}
    return tuple(known[name] for name in names)


def conform(columns: Mapping[str, Sequence[Any] | NDArray[Any]], fields: tuple[Field, ...]) -> Table:
    """The columns in schema order and type; ValueError on a missing, unknown, ragged or mistyped one."""
    known = {field.name for field in fields}
    if unknown := sorted(set(columns) - known):
        raise ValueError(f"unknown columns {unknown}; the schema has {[field.name for field in fields]}")
    missing = [field.name for field in fields if field.name not in columns and field.default is None]
    if missing:
        raise ValueError(f"every column of the schema must be given, but {missing} are missing")
    num_rows = len(next(iter(columns.values())))
    cells = {field.name: columns.get(field.name, [field.default] * num_rows) for field in fields}
    return Table(columns={field.name: _cast(field, cells[field.name]) for field in fields})


def _cast(field: Field, values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    if field.kind is Plain.STRING:
        if wrong := [value for value in values if not isinstance(value, str)]:
            raise ValueError(f"column {field.name!r} holds text, but got {wrong[0]!r}")
        texts = np.empty(len(values), dtype=object)
        texts[:] = list(values)
        return texts
    given = np.asarray(values)
    if given.dtype.kind not in "biuf" and given.size:
        raise ValueError(f"column {field.name!r} holds {field.kind.value}, but got {given.flat[0]!r}")
    if field.kind is Plain.FLOAT64:
        return given.astype(np.float64)
    if given.dtype.kind == "f":  # sizes of a batch are float64 arrays; only whole numbers may become integers
        whole = np.isfinite(given) & (given == np.rint(given)) & (np.abs(given) < 2.0**63)
        if not whole.all():
            raise ValueError(f"column {field.name!r} holds whole numbers, but got {given[~whole].flat[0]!r}")
    if field.kind is Plain.BOOL and not np.isin(given, (0, 1)).all():
        raise ValueError(f"column {field.name!r} holds true or false, but got {given.tolist()}")
    return given.astype(np.bool_ if field.kind is Plain.BOOL else np.int64)


def strategy_columns(strategy: Strategy, dp: int | float | NDArray[Any]) -> dict[str, Any]:
    """The strategy columns of a batch, `[N]` each. `dp` is what the cluster leaves: chips / (tp * cp * pp)."""
    expert_bucket = -1 if strategy.expert_bucket_bytes is None else strategy.expert_bucket_bytes
    plain = {name: getattr(strategy, name) for name in ("interleave_group", "redundant_experts")}
    sizes = strategy.sizes() | {"dp": dp, "expert_bucket_bytes": expert_bucket} | plain
    (num_rows,) = np.broadcast_shapes((1,), *(np.shape(value) for value in sizes.values()))
    texts = {
        "schedule": strategy.schedule.value,
        "layout": strategy.layout.value
        if isinstance(strategy.layout, LayoutRule)
        else _joined(strategy.layout, "even"),
        "context_parallel": strategy.context_parallel.value,
        "rank_order": strategy.rank_order.value,
        "recompute": str(strategy.recompute),
        "recompute_per_chunk": _joined(strategy.recompute_per_chunk, "same"),
        "tp_chunks": str(strategy.tp_chunks),
        "precision": strategy.precision,
        "optimizer": strategy.optimizer.value,
        "fusion": "+".join(sorted(f.value for f in strategy.fusion)) or "none",
        "cuda_graph": strategy.cuda_graph.value,
    }
    columns: dict[str, Any] = {name: np.broadcast_to(value, num_rows) for name, value in sizes.items()}
    columns |= {name: [text] * num_rows for name, text in texts.items()}
    for name in ("sequence_parallel", "shared_expert_overlap"):
        columns[name] = [getattr(strategy, name)] * num_rows
    return {name: columns[name] for name in STRATEGY_NAMES}


def _joined(numbers: tuple[int, ...] | None, none: str) -> str:
    return none if numbers is None else "+".join(map(str, numbers))


def _split(text: str, none: str) -> tuple[int, ...] | None:
    return None if text == none else tuple(map(int, text.split("+")))


def _layout_of(text: str) -> tuple[int, ...] | LayoutRule | None:
    return LayoutRule.AUTO if text == LayoutRule.AUTO.value else _split(text, "even")


def layout_at(row: Mapping[str, Any]) -> tuple[int, ...] | LayoutRule | None:
    """The layers per chunk of one row."""
    return _layout_of(row["layout"])


def strategy_at(row: Mapping[str, Any], own: Iterable[OwnFusion] = ()) -> Strategy:
    """The scalar strategy of one row of a front (the inverse of `strategy_columns`).

    `own`: fusion rules that the row's space brings.
    """
    fusion = () if row["fusion"] == "none" else row["fusion"].split("+")
    known = {rule.value: rule for rule in (*Fusion, *own)}
    if strange := [name for name in fusion if name not in known]:
        raise ValueError(
            f"fusion must name rules that are known, but has {strange[0]!r}; give fusion_rules that have it"
        )
    sizes: dict[str, Any] = {name: int(row[name]) for name in _SIZE_NAMES}
    return Strategy(
        **sizes,
        schedule=Schedule(row["schedule"]),
        layout=_layout_of(row["layout"]),
        sequence_parallel=bool(row["sequence_parallel"]),
        context_parallel=ContextParallel(row["context_parallel"]),
        rank_order=RankOrder(row["rank_order"]),
        recompute=Recompute.parse(row["recompute"]),
        recompute_layers=int(row["recompute_layers"]),
        recompute_per_chunk=_split(row["recompute_per_chunk"], "same"),
        precision=row["precision"],
        optimizer=Optimizer(row["optimizer"]),
        overlap=Overlap(**{axis: int(row[f"overlap_{axis}"]) for axis in _OVERLAPS}),
        offload=Offload(**{name: float(row[f"offload_{name}"]) for name in _OFFLOADS}),
        interleave_group=int(row["interleave_group"]),
        cuda_graph=CudaGraph(row["cuda_graph"]),
        shared_expert_overlap=bool(row["shared_expert_overlap"]),
        redundant_experts=int(row["redundant_experts"]),
        tp_chunks=Chunks.parse(row["tp_chunks"]),
        bucket_bytes=int(row["bucket_bytes"]),
        expert_bucket_bytes=None if row["expert_bucket_bytes"] < 0 else int(row["expert_bucket_bytes"]),
        fusion=frozenset(known[name] for name in fusion),
    )


def strategy_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """The `strategy` object of JSON output: as the columns, with `overlap`, `offload`, `tp_chunks` nested.

    What is left to another choice is null: the experts' own bucket.
    """
    nested: dict[str, Any] = {}
    for name in STRATEGY_NAMES:
        holder, _, part = name.partition("_")
        if holder in {"overlap", "offload"}:
            nested.setdefault(holder, {})[part] = row[name]
        else:
            nested[name] = row[name]
    layout, again = _layout_of(nested["layout"]), _split(nested["recompute_per_chunk"], "same")
    nested["layout"] = list(layout) if isinstance(layout, tuple) else nested["layout"]
    nested["recompute_per_chunk"] = "same" if again is None else list(again)
    nested["tp_chunks"] = asdict(Chunks.parse(nested["tp_chunks"]))
    nested["expert_bucket_bytes"] = None if nested["expert_bucket_bytes"] < 0 else nested["expert_bucket_bytes"]
    return nested
