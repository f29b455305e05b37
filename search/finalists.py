"""Which rows of a front are finalists, each with the reason, and how a replay orders them. Replays nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardware.system import SystemSpec
from results.report import ranked
from results.schema import STRATEGY_NAMES
from results.table import Table
from search.space import Space

__all__ = [
    "AGREEMENT",
    "MORE",
    "PARTIAL",
    "Finalist",
    "Key",
    "finalists",
    "key_of",
    "name_of",
    "order_line",
    "replayable",
    "reranked",
    "system_of_row",
]

MORE = 3  # finalists beside the best of each objective, the knee and the reference points
AGREEMENT = 0.05
"""A replay that differs from its estimate by more than this fraction is flagged: one of the two is wrong."""

PARTIAL = "trace shows operations"
"""How the note begins that says which operations a trace holds where not all fit."""

STRUCTURE = ("system", "tp", "pp", "cp", "ep", "etp", "dp", "vpp", "schedule", "layout", "micro_batch", "rank_order")
Key = tuple[int, str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A row of the front or of the reference points, and why it is one."""

    row: Mapping[str, Any]
    why: tuple[str, ...]

    @property
    def key(self) -> Key:
        """What tells rows of a run apart."""
        return key_of(self.row)


def key_of(row: Mapping[str, Any]) -> Key:
    """Id, name, system and its size: reference points have no id of their own, and may be priced on several."""
    return int(row["id"]), str(row["name"]), str(row["system"]), int(row["num_gpus"])


def name_of(row: Mapping[str, Any]) -> str:
    """What a user calls a row: its id, or the name of a reference point."""
    return str(row["name"]) if row["id"] < 0 else str(row["id"])


def finalists(front: Table, reference: Table, objectives: Sequence[str], more: int = MORE) -> list[Finalist]:
    """The best of each objective, the knee, `more` next best by the first objective, and what the user named.

    Of those next best, ones of another structure (degrees, schedule, layout, micro-batch) come first: neighbours that
    differ in an option alone teach a replay little. A reference point that does not fit is none; one that is on the
    front is named there.
    """
    order, marks = ranked(front, objectives)
    why = {place: [*marks[place]] for place in order[: len(marks)]}
    for place in _next_best(front, order[: len(marks)], order[len(marks) :], more):
        why[place] = [f"next best {objectives[0]}"]
    places = {_strategy_of(front.row(place)): place for place in why}
    named: list[Finalist] = []
    for row in reference.rows():
        if not row["feasible"]:
            continue
        told = f"reference {row['name']}"
        held = places.get(_strategy_of(row))
        if held is None:
            named.append(Finalist(row=row, why=(told,)))
        else:
            why[held].append(told)
    return [*(Finalist(row=front.row(place), why=tuple(reasons)) for place, reasons in why.items()), *named]


def _next_best(front: Table, taken: Sequence[int], others: Sequence[int], more: int) -> list[int]:
    """Of `others`, which come in order of the first objective, ones of another structure first."""
    seen = {_structure_of(front.row(place)) for place in taken}
    fresh: list[int] = []
    alike: list[int] = []
    for place in others:
        structure = _structure_of(front.row(place))
        (alike if structure in seen else fresh).append(place)
        seen.add(structure)
    return [*fresh, *alike][:more]


def _structure_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in STRUCTURE)


def _strategy_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row["system"], row["num_gpus"], *(row[name] for name in STRATEGY_NAMES))


def reranked(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of replays.parquet in order of replayed time; places filled in.

    What takes more memory than there is comes after all that fits, what could not be replayed last. Equal times keep
    the order of the estimate, then of the id.
    """
    done = [row for row in rows if math.isfinite(row["replayed_step_time_s"])]
    estimated = sorted(done, key=lambda row: (row["estimated_step_time_s"], *key_of(row)))
    first = {key_of(row): place for place, row in enumerate(estimated, start=1)}
    replayed = sorted(done, key=lambda row: (not row["fits"], row["replayed_step_time_s"], first[key_of(row)]))
    failed = [row for row in rows if not math.isfinite(row["replayed_step_time_s"])]
    return [
        *({**row, "rank_estimated": first[key_of(row)], "rank_replayed": n} for n, row in enumerate(replayed, start=1)),
        *({**row, "rank_estimated": 0, "rank_replayed": 0} for row in failed),
    ]


def order_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the replay did to the ranking; empty where it did nothing. Rows as `reranked` gives them."""
    done = [row for row in rows if row["rank_replayed"]]
    if all(row["rank_replayed"] == row["rank_estimated"] for row in done):
        return ""
    estimated = sorted(done, key=lambda row: row["rank_estimated"])
    return f"ranking changed: by replay {_names(done)}; by estimate {_names(estimated)}"


def _names(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(name_of(row) for row in rows)


def replayable(space: Space, chosen: Sequence[Finalist]) -> tuple[list[Finalist], str]:
    """The finalists on chips of one kind, which alone can be replayed, and what to say of the others."""
    kept = [one for one in chosen if not system_of_row(space, one.row).segments]
    left = len(chosen) - len(kept)
    note = f"{left} finalist{'s'[: left - 1]} on chips of several kinds: a replay runs on chips of one kind"
    return kept, f"{note}; the estimate stands alone" if left else ""


def system_of_row(space: Space, row: Mapping[str, Any]) -> SystemSpec:
    """The system that a row is on; its chips are what its degrees multiply to."""
    chips = math.prod(int(row[name]) for name in ("tp", "cp", "pp", "dp"))
    named = [system for system in space.systems if system.name == row["system"]]
    exact = [system for system in named if system.num_chips == chips]
    if not named:
        raise ValueError(f"{space.name}: no system is called {row['system']!r}, on which the run has a row")
    return (exact or named)[0]
