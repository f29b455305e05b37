"""One configuration, as a command line names it: a space file with one point, a point it names, or a row of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from estimator.band import Band
from estimator.batch import compose_rows
from estimator.model import ModelSpec
from estimator.result import StepResult
from estimator.rules import Case, check
from estimator.step import evaluate, with_layout
from estimator.strategy import LayoutRule, Strategy
from estimator.workload import Workload
from hardware.system import SystemSpec
from hardware.units import format_count
from results.report.text import counted
from results.schema import FRONT_FIELDS, REFERENCE_ID, conform, strategy_at, strategy_columns
from results.store import RUNS, RunFolder, is_run
from search.axes import axis_values
from search.bands import predicted_band
from search.commands.answer import tell
from search.commands.runs import find_batch, find_run, space_of
from search.finalists import system_of_row
from search.fold import folded_point
from search.space import Space, SpaceError, load_space, parse_space, shipped_spaces
from search.watching import COMPILING, is_compiled_here

__all__ = ["Point", "model_line", "read_point", "read_row", "split_named", "split_run", "work_line"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What an evaluation needs, under the name it was asked for.

    `notices`: a line for each choice without effect, to be told with an answer; a failure takes one line.
    """

    name: str
    model: ModelSpec
    system: SystemSpec
    workload: Workload
    strategy: Strategy
    notices: tuple[str, ...] = ()

    def settled(self) -> Point:
        """The point with the layers that layout `auto` comes to; ValueError where it is illegal."""
        if self.strategy.layout is LayoutRule.AUTO:  # which is found by prices
            self._tell_first_call(self.strategy)
        return replace(self, strategy=with_layout(self.model, self.strategy, self.system, self.workload))

    def evaluate(self, strategy: Strategy | None = None) -> StepResult:
        """Its price, or that of another strategy in its place; ValueError where that is illegal."""
        chosen = strategy or self.strategy
        self._tell_first_call(chosen)
        return evaluate(self.model, chosen, self.system, self.workload)

    def _tell_first_call(self, strategy: Strategy) -> None:
        """Says why a first call takes a minute; an illegal strategy is refused before anything is compiled."""
        if is_compiled_here(compose_rows):
            return
        if self.is_legal(strategy):
            tell(COMPILING)

    def is_legal(self, strategy: Strategy) -> bool:
        """Whether the rules let a strategy through here, whatever it costs."""
        return not check(Case.of(self.model, strategy, self.system, self.workload))[0]

    def band(self, result: StepResult) -> Band:
        """P10 and P90 around the price of its own strategy."""
        return predicted_band(self.model, self.strategy, self.system, self.workload, result)

    def row(self, result: StepResult, strategy: Strategy | None = None) -> dict[str, Any]:
        """A result under the columns of a front."""
        chosen = strategy or self.strategy
        sizes = Case.of(self.model, chosen, self.system, self.workload).sizes
        cells: dict[str, Any] = {name: [value] for name, value in result.columns.items()}
        cells |= strategy_columns(chosen, sizes["dp"])
        cells |= {
            "id": [REFERENCE_ID],
            "name": [self.name],
            "system": [self.system.name],
            "num_micro_batches": sizes["num_micro_batches"],
            "feasible": [bool(result.feasible)],
            "reason": [result.reason],
        }
        return conform(cells, FRONT_FIELDS).row(0)


def model_line(model: ModelSpec) -> str:
    """A model by its size."""
    active = "" if model.moe is None else f", {format_count(model.num_active_parameters())} active"
    return f"{model.name}: {format_count(model.num_parameters())} parameters{active}, {model.num_layers} layers"


def work_line(work: Workload) -> str:
    """What a step works on."""
    sequences = f"{counted(work.global_batch, 'sequence')} of {counted(work.seq, 'token')}"
    return f"{sequences}, {format_count(work.tokens)} tokens a step"


def split_run(target: str) -> tuple[RunFolder, str] | None:
    """The run and the id of `RUN:ID`; None where the target is something else."""
    name, colon, row = target.rpartition(":")
    if not colon or not name or Path(target).exists() or split_named(target) is not None:
        return None
    return find_run(name, answers=True), row


def split_named(target: str) -> tuple[str, str] | None:
    """The space file, or shipped space, and the name of `FILE:NAME`; None where the target is something else."""
    file, colon, name = target.rpartition(":")
    if not colon or Path(target).exists():
        return None
    is_file = Path(file).is_file() or Path(file).suffix in {".yaml", ".yml"}
    is_run = Path(file).is_dir() or (RUNS / file).is_dir()
    shipped = {*shipped_spaces(), *shipped_spaces(answers=True)}
    return (file, name) if is_file or (file in shipped and not is_run) else None


def read_point(target: str, reference: str | None, overrides: Sequence[str]) -> Point:
    """The configuration that `CONFIG`, `CONFIG:NAME` or `RUN:ID` means."""
    if reference is None and (named := split_named(target)) is not None:
        target, reference = named
    parts = split_run(target)
    if parts is not None:
        find_run(str(parts[0].path))  # which refuses runs of models that answer
    if parts is None and find_batch(target) is not None:
        find_run(target)  # which names the runs in it
    if parts is None and is_run(Path(target)):
        raise ValueError(f"{target}: a run holds many points; write {target}:ID, with an id of `search show {target}`")
    if parts is None:
        if reference is not None and overrides:  # which would make a point of that name
            _named(load_space(target, [text for text in overrides if not _is_of_strategy(text)]), reference)
        return _of_space(load_space(target, _of_named(reference, overrides)), reference, target)
    if reference is not None:
        raise ValueError(
            f"--reference goes with a space file, but got {target}; write {target.rpartition(':')[0]}:{reference}"
        )
    space = _narrowed(*parts)
    if overrides:
        space = parse_space(space.resolved_yaml(), target, parts[0].path, overrides)
    point = _of_space(space, None, target)
    return point if overrides else replace(point, notices=())  # a row is as its search wrote it, who told then


def _of_named(reference: str | None, overrides: Sequence[str]) -> list[str]:
    """Overrides of a strategy are those of the named point as well, which would keep its own values otherwise."""
    mine = [text.replace("strategy.", f"reference.{reference}.", 1) for text in overrides if _is_of_strategy(text)]
    return [*overrides, *(mine if reference is not None else ())]


def _is_of_strategy(override: str) -> bool:
    return override.startswith("strategy.")


def _of_space(space: Space, reference: str | None, target: str) -> Point:
    if reference is not None:
        strategy = _named(space, reference)
    elif space.is_point or not space.references:
        strategy = space.strategy()
    else:
        names = ", ".join(space.references)
        wide = [f"strategy.{name}" for name, values in space.axes.items() if len(values) > 1 or name in space.open_axes]
        keys = ", ".join(wide[:3]) + (", ..." if len(wide) > 3 else "") or "system"
        raise SpaceError(
            f"{target}: {keys}: a configuration has one value per key; name a point with --reference ({names})"
        )
    alone, notices = folded_point(space, strategy)
    return Point(
        name=reference or space.name, model=space.model, system=space.system, workload=alone.workload,
        strategy=alone.strategy(), notices=notices,
    )  # fmt: skip


def _named(space: Space, name: str) -> Strategy:
    if name in space.references:
        return space.references[name]
    near = get_close_matches(name, list(space.references), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise SpaceError(f"{space.name}: reference: no point is called {name!r}{hint}; have {', '.join(space.references)}")


def _narrowed(folder: RunFolder, row_id: str) -> Space:
    """The space of a run with the axes of one row: of its front, of what else it kept, or a reference by name."""
    row = read_row(folder, row_id)
    space = space_of(folder)
    axes = {name: (value,) for name, value in axis_values(strategy_at(row, space.fusion_rules)).items()}
    return replace(space, axes=axes, systems=(system_of_row(space, row),), constraints=(), references={})


def read_row(folder: RunFolder, row_id: str) -> dict[str, Any]:
    """A row of a run: of its front, of what else it kept, or a reference by name; ValueError where there is none."""
    references = folder.read_reference()
    if not row_id.isdecimal():
        named = np.flatnonzero(references["name"] == row_id)
        if not len(named):
            names = ", ".join(references["name"]) or "none"
            raise ValueError(
                f"{folder.path}:{row_id}: an id must be a number of `search show` or a reference ({names})"
            )
        return references.row(int(named[0]))
    front = folder.read_front()
    trials = folder.read_trials()
    table = trials if int(row_id) in trials["id"] and int(row_id) not in front["id"] else front
    try:
        return table.row(table.find(int(row_id)))
    except ValueError as error:
        raise ValueError(f"{folder.path}:{row_id}: {error}") from error
