"""Deployments of a model that answers, as plain text: the front, what a pass takes, the memory. Prints nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from estimator.inference import SERVED_COLUMNS
from results.colours import ITEM_COLOURS
from results.pareto import knee
from results.report.run_page import Subject
from results.report.text import WIDTH, clip, format_cell, hanging, title_lines
from results.schema import SERVED_FIELDS
from results.table import Table

__all__ = ["ITEMS", "TERMS", "choices", "degrees", "served_order", "served_subject", "served_table"]

CELL = 13
NARROW = "bf16"


TERMS = ("compute_s", "exposed_comm_tp_s", "exposed_comm_ep_s", "pipeline_s", "host_s")
"""They sum to the seconds of a token in decode, of the first token in prefill."""
CHOICES = ("batch", "tp", "pp", "ep", "etp", "dp", "weights", "activations", "kv_cache", "cuda_graph", "fusion",
           "overlap_ep", "absorb")  # fmt: skip
ITEMS = {"weights": "weight_bytes", "kv_cache": "kv_cache_bytes", "activations": "activation_bytes"}


def served_subject(objectives: Mapping[str, bool], phase: str) -> Subject:
    """What the page of a run of answers is of; `objectives` tells which are minimised."""
    is_decode = phase == "decode"
    return Subject(
        fields=SERVED_FIELDS, better={column.name: column.better for column in SERVED_COLUMNS},
        whole="time_per_output_token_s" if is_decode else "time_to_first_token_s",
        each="a token" if is_decode else "the first token", band=(), terms=TERMS, choices=CHOICES,
        items={**ITEM_COLOURS, "kv_cache": ITEM_COLOURS["gradients"]}, command="search infer",
        told=lambda row: [degrees(row), *choices(row)], marks=lambda front, _: served_order(front, objectives)[1],
    )  # fmt: skip


def degrees(row: Mapping[str, Any]) -> str:
    """How the chips multiply out: `64 = tp 1 x pp 1 x dp 64, ep 64`."""
    chips = row["tp"] * row["pp"] * row["dp"]
    experts = f", ep {row['ep']}" + (f", etp {row['etp']}" if row["etp"] != 1 else "")
    return f"{chips} = tp {row['tp']} x pp {row['pp']} x dp {row['dp']}{experts if row['ep'] * row['etp'] != 1 else ''}"


def choices(row: Mapping[str, Any]) -> list[str]:
    """The choices beside the degrees, as short phrases."""
    products = f", products in {row['activations']}" if row["activations"] != NARROW else ""
    return [
        f"batch {row['batch']}",
        f"weights {row['weights']}{products}",
        f"cache {row['kv_cache']}",
        f"CUDA graph of {row['cuda_graph']}" if row["cuda_graph"] != "none" else "no CUDA graph",
        *(["two halves take turns"] if row["overlap_ep"] else []),
        *([] if row["absorb"] else ["latents projected up"]),
        *([f"{row['redundant_experts']} copies of experts"] if row["redundant_experts"] else []),
        *([f"{row['drafts']} drafts a pass"] if row["drafts"] else []),
        *([f"prompts in chunks of {row['chunk']}"] if row["chunk"] else []),
        f"on {clip(row['system'])}",
    ]


def served_order(table: Table, objectives: Mapping[str, bool]) -> tuple[list[int], dict[int, list[str]]]:
    """Positions in reading order, and the marks of some: the best of each objective (True: minimised), the knee."""
    if not len(table):
        return [], {}
    costs = [table[name] if minimised else -table[name] for name, minimised in objectives.items()]
    marks: dict[int, list[str]] = {}
    for i, name in enumerate(objectives):
        rest = [cost for j, cost in enumerate(costs) if j != i]
        marks.setdefault(int(np.lexsort((table["id"], *reversed(rest), costs[i]))[0]), []).append(f"best {name}")
    if len(table) > 1 and len(costs) > 1:
        values = np.stack([table[name] for name in objectives], axis=1)
        marks.setdefault(knee(values, [not minimised for minimised in objectives.values()]), []).append("knee")
    others = [int(i) for i in np.lexsort((table["id"], *reversed(costs))) if int(i) not in marks]
    return [*marks, *others], marks


def served_table(
    table: Table, objectives: Mapping[str, bool], *, reference: Table | None = None, top: int | None = None,
    order: Sequence[int] | None = None,
) -> str:  # fmt: skip
    """Objectives, chips as a product of degrees, and the rest; reference points come last."""
    if not len(table) and not (reference is not None and len(reference)):
        return "the front is empty: no deployment is feasible\n"
    ranked, marks = served_order(table, objectives)
    shown = (ranked if order is None else list(order))[:top]
    rows = [(table.row(i), ", ".join(marks.get(i, []))) for i in shown]
    points = [(row, _reference(row)) for row in (reference.rows() if reference else ())]
    common = _common([choices(row) for row, _ in [*rows, *points]])
    lines = _header(list(objectives))
    for row, mark in rows:
        lines += _line(row, mark, list(objectives), common)
    lines += ["-" * WIDTH] if points else []
    for row, mark in points:
        lines += _line(row, mark, list(objectives), common)
    lines.append("-" * WIDTH)
    lines += hanging("all rows: ", ", ".join(common)) if common else []
    lines.append(f"{len(shown)} of {len(table)} points of the front")
    return "\n".join(lines) + "\n"


def _reference(row: Mapping[str, Any]) -> str:
    mark = f"reference {clip(row['name'])}"
    return mark if row["feasible"] else f"{mark}, not feasible: {clip(row['reason'], 200)}"


def _common(phrases: Sequence[Sequence[str]]) -> list[str]:
    return [text for text in phrases[0] if all(text in other for other in phrases[1:])] if len(phrases) > 1 else []


def _header(objectives: Sequence[str]) -> list[str]:
    titles = [title_lines(name, CELL) for name in objectives]
    height = max(len(title) for title in titles)
    padded = [[""] * (height - len(title)) + title for title in titles]
    lines = []
    for level in range(height):
        is_last = level == height - 1
        cells = "".join(f"{title[level]:>{CELL + 1}}" for title in padded)
        lines.append((f"{'id' if is_last else '':>7}{cells}  {'deployment' if is_last else ''}").rstrip())
    return [*lines, "-" * WIDTH]


def _line(row: Mapping[str, Any], mark: str, objectives: Sequence[str], common: Sequence[str]) -> list[str]:
    values = "".join(f"{_cell(name, row[name]):>{CELL + 1}}" for name in objectives)
    head = f"{'ref' if row['id'] < 0 else row['id']:>7}{values}  "
    text = "; ".join([degrees(row), *(phrase for phrase in choices(row) if phrase not in common)])
    lines: list[str] = []
    for part in filter(None, (f"* {mark}" if mark else "", text)):
        lines += hanging(" " * len(head) if lines else head, part)
    return lines


def _cell(name: str, value: float) -> str:
    return format_cell(name, value) if math.isfinite(value) else "-"
