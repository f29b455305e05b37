"""One configuration in full, as plain text: where the time of a step goes and what fills the memory. Prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardware.units import format_bytes, format_seconds
from results.report.text import WIDTH, columns, hanging

__all__ = ["TIME_TERMS", "memory_table", "waterfall"]

# The leaves of the identities in estimator/result.py: they sum to step_time_s.
TIME_TERMS = (
    "forward_s",
    "backward_s",
    "recompute_s",
    "exposed_comm_tp_s",
    "exposed_comm_cp_s",
    "exposed_comm_ep_s",
    "exposed_comm_pp_s",
    "exposed_comm_dp_s",
    "exposed_offload_s",
    "exposed_host_s",
    "bubble_s",
    "optimizer_s",
    "optimizer_comm_s",
    "fixed_host_s",
    "jitter_s",
)

_BAR = 50
_STAGES_A_BLOCK = 7  # columns of the memory table that fit beside the item names
_SUM_RTOL = 1e-9  # fifteen float64 additions
_NOISE = 1e-13  # of a step: what rounding leaves of a remainder that is zero


def waterfall(row: Mapping[str, Any]) -> str:
    """The terms of a step, each bar starting where the one before ends; terms that are zero are named below."""
    step_s = float(row["step_time_s"])
    terms = [(name, float(row[name])) for name in TIME_TERMS]
    total_s = sum(seconds for _, seconds in terms)
    # The bubble and the gradient traffic are remainders: what is left of rounding is not worth a bar.
    terms = [(name, 0.0 if abs(seconds) <= _NOISE * step_s else seconds) for name, seconds in terms]
    lines = []
    start_s = 0.0
    for name, seconds in terms:
        if seconds:
            lines.append(_term_line(name, seconds, step_s, _bar(start_s, start_s + seconds, step_s)))
        start_s += seconds
    lines += ["-" * WIDTH, _term_line("step_time_s", step_s, step_s, _bar(0.0, step_s, step_s))]
    if abs(total_s - step_s) > _SUM_RTOL * abs(step_s):
        lines.append(f"the terms sum to {format_seconds(total_s)}, not to the step: {total_s!r} against {step_s!r} s")
    if zero := [name for name, seconds in terms if not seconds]:
        lines += hanging("zero: ", ", ".join(zero))
    return "\n".join(lines) + "\n"


def memory_table(
    stages: Sequence[Mapping[str, float]], *, capacity_bytes: float | None = None,
    outside: tuple[float, float] | None = None,
) -> str:  # fmt: skip
    """Bytes per item (rows) and stage (columns); `stages` hold item -> bytes. Equal neighbours share a column.

    A star marks the fullest stage. With `outside` (the allocator's factor, bytes of driver context and communicators)
    the table goes on from what tensors take (allocated) to what the allocator holds (reserved) and the driver reports
    (device).
    """
    if not stages:
        return "no stages\n"
    groups = _runs(stages)
    allocated = [sum(stages[first].values()) for first, _ in groups]
    totals, sums = allocated, [("total", allocated)]
    if outside is not None:
        factor, context_bytes = outside
        reserved = [total * factor for total in allocated]
        totals = [total + context_bytes for total in reserved]
        sums = [("allocated", allocated), ("reserved", reserved), ("device", totals)]
    fullest = totals.index(max(totals))
    items = list(dict.fromkeys(item for stage in stages for item in stage))
    lines: list[str] = []
    for begin in range(0, len(groups), _STAGES_A_BLOCK):
        block = range(begin, min(begin + _STAGES_A_BLOCK, len(groups)))
        header = ["stage", *(_span(*groups[g]) + ("*" if g == fullest else "") for g in block)]
        rows = [[item, *(_bytes(stages[groups[g][0]].get(item, 0.0)) for g in block)] for item in items]
        rows = [row for row in rows if any(cell != "-" for cell in row[1:])]
        rows += [[name, *(format_bytes(values[g]) for g in block)] for name, values in sums]
        table = columns(header, rows)
        lines += ([""] if lines else []) + [*table[: -len(sums)], table[1], *table[-len(sums) :]]
    if capacity_bytes is not None:
        share = totals[fullest] / capacity_bytes
        lines.append(f"fullest stage {_span(*groups[fullest])}: {share:.1%} of {format_bytes(capacity_bytes)}")
    return "\n".join(lines) + "\n"


def _term_line(name: str, seconds: float, step_s: float, bar: str) -> str:
    share = seconds / step_s if step_s else 0.0
    return f"{name:<18} {format_seconds(seconds):>10} {share:>7.1%}  |{bar}".rstrip()


def _bar(start_s: float, end_s: float, step_s: float) -> str:
    """At least one mark for anything above zero, so that small terms stay visible."""
    if not step_s > 0:
        return ""
    first = min(max(round(start_s / step_s * _BAR), 0), _BAR - 1)
    last = min(max(round(end_s / step_s * _BAR), first + 1), _BAR)
    return " " * first + "#" * (last - first)


def _runs(stages: Sequence[Mapping[str, float]]) -> list[tuple[int, int]]:
    """First and last index of each run of equal neighbours."""
    starts = [i for i in range(len(stages)) if i == 0 or dict(stages[i]) != dict(stages[i - 1])]
    return list(zip(starts, [start - 1 for start in starts[1:]] + [len(stages) - 1], strict=True))


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _bytes(nbytes: float) -> str:
    return format_bytes(nbytes) if nbytes else "-"
