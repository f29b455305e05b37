"""Where the time of a timeline went, as plain text: temporal breakdown, overlap, waits by cause, stragglers, diff."""

from __future__ import annotations

from collections.abc import Sequence

from estimator.breakdown import Breakdown, Cause, Difference, Straggler
from hardware.units import format_seconds
from results.report.text import clip, columns

__all__ = ["breakdown_table", "difference_table", "straggler_table"]

RANKS = 16  # of a table; of more, the first ones
_NAME = 38


def breakdown_table(found: Breakdown, names: Sequence[str]) -> str:
    """A row per device: what it did, how much of its transfers compute hides, what it waited for."""
    causes = [cause for cause in Cause if found.waits_s[cause].any()]
    rows, waits = [], []
    for d, name in enumerate(names[:RANKS]):
        parts = (found.compute_s[d], found.non_compute_s[d], found.idle_s[d])
        shares = [f"{float(part) / found.span_s:.1%}" if found.span_s else "-" for part in parts]
        rows.append([name, *shares, f"{float(found.overlap_share[d]):.1%}"])
        waits.append([name, *(format_seconds(float(found.waits_s[cause][d])) for cause in causes)])
    more = [f"{len(names) - RANKS} more ranks"] if len(names) > RANKS else []
    lines = [*columns(["rank", "compute", "non-compute", "idle", "overlapped"], rows), *more]
    if causes:
        lines += ["", *columns(["no compute for", *(cause.value for cause in causes)], waits), *more]
    return "\n".join(lines) + "\n"


def straggler_table(found: Sequence[Straggler], names: Sequence[str]) -> str:
    """Devices by how much of the critical path is their compute."""
    rows = [
        [names[one.device], format_seconds(one.compute_s), _signed(one.beyond_s), format_seconds(one.critical_s),
         "straggler" if one.late else ""]
        for one in found[:RANKS]
    ]  # fmt: skip
    return "\n".join(columns(["rank", "compute", "against median", "on critical path", ""], rows)) + "\n"


def difference_table(found: Sequence[Difference], top: int) -> str:
    """Operations whose seconds differ most: count and seconds in both, and the difference."""
    rows = [
        [clip(one.name, _NAME), one.category, f"{one.count_a:g}", f"{one.count_b:g}", format_seconds(one.seconds_a),
         format_seconds(one.seconds_b), _signed(one.seconds)]
        for one in found[:top]
    ]  # fmt: skip
    total = [sum(one.seconds_a for one in found), sum(one.seconds_b for one in found)]
    rows.append(["all", "", "", "", *map(format_seconds, total), _signed(total[1] - total[0])])
    head = ["operation", "kind", "# A", "# B", "A", "B", "B - A"]
    return "\n".join(columns(head, rows, left=2)) + "\n"


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))
