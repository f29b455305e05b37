"""The table of docs/schedules.md, made anew from the orders: `python -m tests.schedules` rewrites it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from estimator.schedule import in_flight, order, placement, simulate
from estimator.strategy import Schedule

__all__ = ["M", "P", "STATED", "Stated", "rewritten", "simulated", "table"]

P, M = 8, 32  # ranks and micro-batches of the table
HEAD = "| schedule | chunks | bubble as stated | simulated | of each rank | activations as stated | simulated |\n"
HEAD += "|---|---|---|---|---|---|---|\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What a schedule's paper says: formulas, and what they come to at F = B = W = 1, P and M (None: it says none)."""

    chunks: int
    bubble: str
    bubble_at: float | None
    held: str
    held_at: float


STATED = {
    Schedule.GPIPE: Stated(chunks=1, bubble="(p-1)(F+B+W)", bubble_at=21, held="m", held_at=32),
    Schedule.ONE_F_ONE_B: Stated(chunks=1, bubble="(p-1)(F+B+W)", bubble_at=21, held="p", held_at=8),
    Schedule.INTERLEAVED: Stated(
        chunks=2, bubble="(p-1)(F+B+W)/v", bubble_at=10.5, held="p(1 + (p-1)/(pv))", held_at=11.5
    ),
    Schedule.BREADTH_FIRST: Stated(chunks=2, bubble="(p-1)(F+B+W)/v", bubble_at=10.5, held="m", held_at=32),
    Schedule.ZB_H1: Stated(chunks=1, bubble="(p-1)(F+B-W)", bubble_at=7, held="p", held_at=8),
    Schedule.ZB_H2: Stated(chunks=1, bubble="(p-1)(F+B-2W)", bubble_at=0, held="2p-1", held_at=15),
    Schedule.ZB_1P: Stated(chunks=1, bubble="searched", bubble_at=None, held="at most p", held_at=8),
    Schedule.ZB_2P: Stated(chunks=1, bubble="searched", bubble_at=None, held="at most 2p", held_at=16),
    Schedule.ZB_V: Stated(chunks=2, bubble="0", bubble_at=0, held="p", held_at=8),
    Schedule.V_HALF: Stated(chunks=2, bubble="about 1/2 of 1F1B's", bubble_at=10.5, held="(p+2)//2", held_at=5),
    Schedule.V_MIN: Stated(chunks=2, bubble="about 2/3 of 1F1B's", bubble_at=14, held="(p+4)//3", held_at=4),
    Schedule.DUALPIPE: Stated(chunks=1, bubble="(p/2-1)(F&B + B' - 3W)", bubble_at=6, held="p+1", held_at=9),
    Schedule.DUALPIPE_V: Stated(
        chunks=2, bubble="the same, p stages on p/2 ranks", bubble_at=7, held="p+1 chunks", held_at=8.5
    ),
}


def simulated(schedule: Schedule) -> tuple[float, float, float]:
    """Bubble of the step and of the rank that waits most between its own passes, activations held: F = B = W = 1."""
    v = STATED[schedule].chunks
    passes, chunks = order(schedule, P, M, v), placement(schedule, P, v)
    seconds = np.full(int(chunks.max()) + 1, 1.0 / v)
    told = simulate(passes, seconds, seconds, seconds)
    own = max(float(end[-1] - start[0]) for start, end in zip(told.start, told.end, strict=True))
    return told.span - 3 * M, own - 3 * M, float(in_flight(passes, chunks).sum(axis=1).max()) / v


def table() -> str:
    """The rows, in the order of the family."""
    rows = []
    for schedule, said in STATED.items():
        span, own, held = simulated(schedule)
        at = "" if said.bubble_at is None else f": {said.bubble_at:g}"
        cells = (f"`{schedule.value}`", said.chunks, f"{said.bubble}{at}", f"{span:.1f}", f"{own:.1f}",
                 f"{said.held}: {said.held_at:g}", f"{held:g}")  # fmt: skip
        rows.append("| " + " | ".join(map(str, cells)) + " |\n")
    return HEAD + "".join(rows)


def rewritten(text: str) -> str:
    """The page with its table made anew."""
    before, _, rest = text.partition(HEAD)
    after = rest[rest.index("\n\n") + 1 :]
    return before + table() + after


if __name__ == "__main__":
    page = Path(__file__).parents[1] / "docs" / "schedules.md"
    page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
