"""Tables of a run as plain text of at most 100 columns: fronts, rejections, runs, CSV. Prints nothing."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

import numpy as np

from estimator.result import column
from estimator.strategy import Chunks, ContextParallel, CudaGraph, Offload, RankOrder, Schedule
from hardware.units import format_bytes
from results.pareto import knee, spread
from results.report.text import WIDTH, clip, columns, format_cell, hanging, title_lines
from results.table import Table

__all__ = [
    "arithmetic",
    "csv_text",
    "front_table",
    "ranked",
    "rejection_table",
    "runs_table",
    "settings",
]

_OFFLOADS = tuple(part.name for part in fields(Offload))
_CELL = 12  # characters of an objective's column


def ranked(front: Table, objectives: Sequence[str]) -> tuple[list[int], dict[int, list[str]]]:
    """Positions of a front in reading order, and the marks of some.

    The best of each objective comes first, then the knee, then the others by the first objective. Among equals in one
    objective the other objectives decide, then the id.
    """
    if not len(front):
        return [], {}
    signs = [-1.0 if column(name).better == "higher" else 1.0 for name in objectives]
    costs = [sign * front[name] for sign, name in zip(signs, objectives, strict=True)]
    marks: dict[int, list[str]] = {}
    for i, name in enumerate(objectives):
        rest = [cost for j, cost in enumerate(costs) if j != i]
        best = int(np.lexsort((front["id"], *reversed(rest), costs[i]))[0])
        marks.setdefault(best, []).append(f"best {name}")
    values = np.stack([front[name] for name in objectives], axis=1)
    if len(front) > 1 and len(objectives) > 1:
        marks.setdefault(knee(values, [sign < 0 for sign in signs]), []).append("knee")
    others = [int(i) for i in np.lexsort((front["id"], *reversed(costs))) if int(i) not in marks]
    return [*marks, *others], marks


def front_table(
    front: Table, objectives: Sequence[str], *, reference: Table | None = None, replays: Table | None = None,
    top: int | None = None, what: str = "points of the front",
) -> str:  # fmt: skip
    """The front: objectives, the chips as a product of degrees, and the rest of each configuration.

    `reference` rows come last with their distance to the best of each objective. `replays` adds the step time of what
    was replayed, with a `!` where it is far from the estimate. `top` limits the rows of the front to the marked ones
    and, of the others, those that differ most from what is shown; `what` says of what there are so many.
    """
    if not len(front) and not (reference is not None and len(reference)):
        return "the front is empty: no configuration is feasible\n"
    order, marks = ranked(front, objectives)
    shown = order if top is None or top >= len(order) else _standing_for(front, objectives, order, list(marks), top)
    rows = [(front.row(i), ", ".join(marks.get(i, []))) for i in shown]
    points = [(row, _reference_mark(row, front, objectives)) for row in (reference.rows() if reference else ())]
    common = _common([settings(row) for row, _ in [*rows, *points]])
    id_width = max(len(_id(row)) for row, _ in [*rows, *points])
    replayed = _replayed(replays)
    lines = _front_header([*objectives, *(["replayed_step_time_s"] if replayed else [])], id_width)
    for row, mark in rows:
        lines += _front_row(row, mark, objectives, id_width, common, replayed)
    if points:
        lines.append("-" * WIDTH)
    for row, mark in points:
        lines += _front_row(row, mark, objectives, id_width, common, replayed)
    lines.append("-" * WIDTH)
    if common:
        lines += hanging("all rows: ", ", ".join(common))
    lines.append(f"{len(shown)} of {len(front)} {what}")
    return "\n".join(lines) + "\n"


def _standing_for(front: Table, objectives: Sequence[str], order: list[int], marked: list[int], top: int) -> list[int]:
    """`top` positions of a front in reading order: neighbours that hardly differ give way."""
    values = np.stack([front[name] for name in objectives], axis=1)
    taken = set(spread(values, marked, top))
    return [i for i in order if i in taken]


def arithmetic(row: Mapping[str, Any]) -> str:
    """How the chips multiply out, `2048 = tp 1 x pp 16 x dp 128, ep 64`; cp and etp where they are not 1."""
    degrees = [name for name in ("tp", "cp", "pp", "dp") if name != "cp" or row["cp"] != 1]
    product = math.prod(int(row[name]) for name in degrees)
    chips = row["num_gpus"]
    known = math.isfinite(chips)
    left = f"{int(chips) if known else product} {'=' if not known or chips == product else '!='} "
    experts = f", ep {row['ep']}" + (f", etp {row['etp']}" if row["etp"] != 1 else "")
    return left + " x ".join(f"{name} {row[name]}" for name in degrees) + experts


def settings(row: Mapping[str, Any]) -> list[str]:
    """The choices beside the degrees, as short phrases; choices that have no effect are left out."""
    overlaps = [axis for axis in ("tp", "dp", "ep", "pp") if row[f"overlap_{axis}"]]
    per_chunk = row["recompute_per_chunk"]
    depth = f"{row['recompute_layers']} layers a chunk" if per_chunk == "same" else f"{per_chunk} layers by chunk"
    layers = f" of {depth}" if row["recompute"] == "block" else ""
    in_buckets = row["overlap_dp"] and row["zero_stage"] != 3
    own_bucket = row["expert_bucket_bytes"] >= 0 and in_buckets
    experts = format_bytes(row["expert_bucket_bytes"]) if row["expert_bucket_bytes"] else "all at once"
    ring = row["context_parallel"] == ContextParallel.RING.value
    in_turns = row["interleave_group"] and row["schedule"] == Schedule.INTERLEAVED.value
    replicated = row["zero_stage"] and row["dp_replicate"] != 1
    ahead = row["zero_stage"] == 3 and row["overlap_dp"] and row["prefetch_blocks"] != 1
    shares = {name: row[f"offload_{name}"] for name in _OFFLOADS}
    offloaded = [name if share == 1.0 else f"{100.0 * share:.3g}% of {name}" for name, share in shares.items() if share]
    phrases = [
        row["schedule"],
        f"vpp {row['vpp']}" if row["vpp"] != 1 else "",
        f"turns of {row['interleave_group']} micro-batches" if in_turns else "",
        f"layout {_runs(row['layout'])}" if row["layout"] != "even" else "",
        f"micro-batch {row['micro_batch']} x {row['num_micro_batches']}",
        f"zero {row['zero_stage']}" + (f" in {row['dp_replicate']} replicas" if replicated else ""),
        "weights kept after forward" if row["zero_stage"] == 3 and not row["reshard_after_forward"] else "",
        f"{row['prefetch_blocks']} blocks gathered ahead" if ahead else "",
        f"on the host: {', '.join(offloaded)}" if offloaded else "",
        ("sequence parallel" if row["sequence_parallel"] else "no sequence parallel") if row["tp"] != 1 else "",
        f"context by {row['context_parallel']}" if row["cp"] != 1 else "",
        f"ranks {row['rank_order']}" if row["rank_order"] != RankOrder.TP_CP_DP_PP.value else "",
        f"recompute {row['recompute']}{layers}",
        f"overlap {'+'.join(overlaps)}" if overlaps else "no overlap",
        f"tp in {row['tp_chunks']} pieces" if row["overlap_tp"] and row["tp_chunks"] != str(Chunks()) else "",
        f"buckets of {format_bytes(row['bucket_bytes'])}" if row["bucket_bytes"] and in_buckets else "",
        f"of experts {experts}" if own_bucket else "",
        f"{row['redundant_experts']} copies of experts" if row["redundant_experts"] and row["ep"] != 1 else "",
        row["precision"],
        row["optimizer"],
        f"fused: {row['fusion']}",
        f"CUDA graph of {row['cuda_graph']}" if row["cuda_graph"] != CudaGraph.NONE.value else "",
        "shared experts beside all-to-all" if row["shared_expert_overlap"] else "",
        "rings exposed" if row["cp"] != 1 and ring and not row["overlap_cp"] else "",
        f"on {clip(row['system'])}",
    ]
    return [phrase for phrase in phrases if phrase]


def _runs(layout: str) -> str:
    """Layers per chunk with equal neighbours counted: `4, 14 x 3, 1`."""
    groups = [(layers, len(list(same))) for layers, same in groupby(layout.split("+"))]
    return ", ".join(layers if num == 1 else f"{num} x {layers}" for layers, num in groups)


def rejection_table(rejections: Table) -> str:
    """Rules by how many candidates each rejected, with one example."""
    if not len(rejections):
        return "nothing was rejected\n"
    total = int(rejections["count"].sum())
    lines = ["rejected  share  rule"]
    for row in rejections.sort("count", descending=True).rows():
        share = row["count"] / total if total else 0.0
        lines.append(f"{_short_count(row['count']):>8}  {share:>5.1%}  {clip(row['rule'], WIDTH - 17)}")
        lines += hanging(" " * 17 + "e.g. ", clip(row["example"], 300)) if row["example"] else []
    return "\n".join(lines) + "\n"


def runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Runs of a folder (rows of `store.list_runs`)."""
    if not runs:
        return "no runs\n"
    rows = [
        [
            clip(run["path"], 48),
            run["state"],
            "-" if run["front"] is None else str(run["front"]),
            "-" if run["seconds"] is None else format_cell("step_time_s", run["seconds"]),
            clip(run["error"] or run["created"], 25),
        ]
        for run in runs
    ]
    return "\n".join(columns(["run", "state", "front", "took", "started"], rows, left=2)) + "\n"


def csv_text(table: Table, names: Sequence[str] | None = None) -> str:
    """The table as CSV; floats are written so that they read back to the same bits."""
    chosen = list(table.names) if names is None else list(names)
    picked = Table(columns={name: table[name] for name in chosen})
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(chosen)
    for row in picked.rows():
        writer.writerow(
            [str(v).lower() if isinstance(v, bool) else repr(v) if isinstance(v, float) else v for v in row.values()]
        )
    return sink.getvalue()


def _front_header(objectives: Sequence[str], id_width: int) -> list[str]:
    titles = [title_lines(name, _CELL) for name in objectives]
    height = max(len(title) for title in titles)
    lines = []
    for level in range(height):
        cells = [title[level - height + len(title)] if level >= height - len(title) else "" for title in titles]
        is_last = level == height - 1
        head = ("id" if is_last else "").rjust(id_width)
        tail = "configuration" if is_last else ""
        lines.append((head + "".join(f"{cell:>{_CELL + 1}}" for cell in cells) + "  " + tail).rstrip())
    return [*lines, "-" * WIDTH]


def _front_row(
    row: Mapping[str, Any], mark: str, objectives: Sequence[str], id_width: int, common: Sequence[str],
    replayed: Mapping[tuple[Any, ...], str],
) -> list[str]:  # fmt: skip
    values = "".join(f"{format_cell(name, row[name]):>{_CELL + 1}}" for name in objectives)
    values += f"{replayed.get(_key(row), ''):>{_CELL + 1}}" if replayed else ""
    head = f"{_id(row):>{id_width}}{values}  "
    own = [phrase for phrase in settings(row) if phrase not in common]
    lines: list[str] = []
    for text in filter(None, (f"* {mark}" if mark else "", "; ".join([arithmetic(row), *own]))):
        lines += hanging(head if not lines else " " * len(head), text)
    return lines


def _replayed(replays: Table | None) -> dict[tuple[Any, ...], str]:
    """Replayed step times of rows that were replayed, by what tells rows apart."""
    rows = [] if replays is None else [row for row in replays.rows() if math.isfinite(row["replayed_step_time_s"])]
    cells = [format_cell("replayed_step_time_s", row["replayed_step_time_s"]) for row in rows]
    return {_key(row): cell if row["agrees"] else f"!{cell}" for row, cell in zip(rows, cells, strict=True)}


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["id"], row["name"], row["system"], row["num_gpus"]


def _reference_mark(row: Mapping[str, Any], front: Table, objectives: Sequence[str]) -> str:
    mark = f"reference {clip(row['name'])}"
    if not row["feasible"]:
        return f"{mark}, not feasible: {clip(row['reason'], 200)}"
    ratios = []
    for name in objectives if len(front) else ():
        best = float(front[name].max() if column(name).better == "higher" else front[name].min())
        if best > 0:
            ratios.append(f"{row[name] / best:.3g} x best {name}")
    return ", ".join([mark, *ratios])


def _common(phrases: Sequence[Sequence[str]]) -> list[str]:
    if len(phrases) < 2:
        return []
    return [phrase for phrase in phrases[0] if all(phrase in other for other in phrases[1:])]


def _id(row: Mapping[str, Any]) -> str:
    return "ref" if row["id"] < 0 else str(row["id"])


def _short_count(count: int) -> str:
    return str(count) if count < 10**8 else f"{count:.1e}"
