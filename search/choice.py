"""How a space is searched, and why: the exact sweep where it can, else samples. Searches nothing itself."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from hardware.units import format_count
from search.fold import folded
from search.free import STRUCTURAL, free_axes, grid_size, skeleton
from search.opened import OPENED
from search.space import Sampler, Space
from search.sweep import Plan, survey

__all__ = ["MAX_ENUMERATED", "MAX_SWEPT_GRID", "Choice", "check_searchable", "check_warm", "choose"]

MAX_SWEPT_GRID = 100_000_000
"""Points of the grid of structures that an exact sweep checks by itself: about five minutes at 2 to 3 us each."""

MAX_ENUMERATED = 2_000_000_000
"""Candidates that are priced one by one where nothing is pruned: some ten minutes of one core at 0.3 us each."""

NEEDS = {Sampler.GP: ("torch", "scipy"), Sampler.QMC: ("scipy",)}
"""Libraries that a sampler needs beside optuna (extra `samplers`)."""

DEFAULT = Sampler.NSGA2
"""The sampler of `auto`: it keeps a population over several objectives, and asks for a trial in about a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A sampler, or EXHAUSTIVE with the surveyed plan; `reason` is for the manifest and the terminal."""

    sampler: Sampler
    reason: str
    plan: Plan | None = None


def check_searchable(space: Space) -> None:
    """ValueError of one line where the way a space asks to be searched is not open to it, before a run is begun."""
    asked = space.options.sampler
    if asked is Sampler.EXHAUSTIVE:
        space.refuse_open()
    for name in space.open_axes:
        OPENED[name](space)
    if asked is not Sampler.EXHAUSTIVE:
        _check_surveyable(space)
    missing = [name for name in NEEDS.get(asked, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"sampler {asked.value} needs {' and '.join(missing)}, not installed; pip install 'trainspace[samplers]', "
            "or choose nsga2, nsga3, tpe or random"
        )


def _check_surveyable(space: Space) -> None:
    """ValueError of one line where a sampler would never be asked, for the structures that it samples are too many."""
    if _surveyed(space) <= MAX_SWEPT_GRID or (points := _surveyed(folded(space)[0])) <= MAX_SWEPT_GRID:
        return
    longest = sorted((name for name in STRUCTURAL if len(space.axes[name]) > 1), key=lambda n: -len(space.axes[n]))
    raise ValueError(
        f"{space.name}: a sampler needs a grid of structures of at most {format_count(MAX_SWEPT_GRID)} points, but it "
        f"has {format_count(points)}; shorten {', '.join(f'{n} ({len(space.axes[n])} values)' for n in longest[:3])}"
    )


def _surveyed(space: Space) -> int:
    """Points of the grid that a study surveys."""
    return grid_size(skeleton(space, free_axes(space)))


def check_warm(space: Space) -> None:
    """ValueError of one line where a search is exact and has no use for a former front, before a run is begun."""
    asked = space.options.sampler
    if asked is Sampler.EXHAUSTIVE:
        why = "asked for"
    elif (choice := choose(folded(space)[0])).plan is not None:
        why = choice.reason
    else:
        return
    raise ValueError(
        f"{space.name}: --warm starts a study, but this search is exact ({why}) and gains nothing from a former front; "
        "leave it out, or choose a sampler"
    )


def choose(space: Space) -> Choice:
    """The sampler of a space. SpaceError where the exact sweep is asked for and an axis is open."""
    asked = space.options.sampler
    if asked is Sampler.EXHAUSTIVE:  # which refuses an open axis by name
        return Choice(sampler=asked, reason="asked for", plan=survey(space))
    if asked is not Sampler.AUTO:
        return Choice(sampler=asked, reason="sampled because asked for: the front of what it tried, not of the space")
    if why := _beyond_survey(space):
        return _sampled(why)
    plan = survey(space)
    if not plan.bounded and plan.enumeration.legal > MAX_ENUMERATED:
        legal = format_count(plan.enumeration.legal)
        return _sampled(f"{plan.reason}, and {legal} legal candidates are beyond {format_count(MAX_ENUMERATED)}")
    return Choice(sampler=Sampler.EXHAUSTIVE, reason="exact because it can be", plan=plan)


def _beyond_survey(space: Space) -> str:
    """Why an exact sweep cannot even begin; empty where it can."""
    if names := space.open_axes:
        return f"strategy.{names[0]} is open, which no enumeration reaches"
    if space.raw_size >= 2**62:
        return f"the product of the axes, {format_count(space.raw_size)}, is beyond 2^62"
    if (grid := grid_size(space)) > MAX_SWEPT_GRID:
        return f"the grid of structures, {format_count(grid)} points, is beyond {format_count(MAX_SWEPT_GRID)}"
    return ""


def _sampled(why: str) -> Choice:
    return Choice(sampler=DEFAULT, reason=f"sampled because {why}: the front of what it tried, not of the space")
