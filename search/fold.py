"""What has no effect, axes and routing skew: folded to one value and told. Knows nothing of prices.

On a model: experts of a dense one, recompute of modules and fused kernels that it lacks. Beside the other choices: what
splits by tp where that is 1 (idle_axes.py). A degree that is wrong stays: a configuration that asks for expert
parallelism in a dense model is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

from estimator.model import ModelSpec
from estimator.passes.fuse import rule_of
from estimator.strategy import Fusion, OwnFusion, Recompute, RecomputeKind, Strategy
from search.axes import AXES, OPEN, axis_values
from search.idle import effective, present
from search.idle_axes import first_of_all, idle_axes
from search.idle_kernels import Kernels, merged
from search.space import Space

__all__ = ["folded", "folded_point"]

OF_EXPERTS = {"ep": 1, "etp": 1, "redundant_experts": 0, "shared_expert_overlap": False, "expert_bucket_bytes": None,
              "overlap_ep": 0}  # fmt: skip
"""Axes that mean something where there are experts, with the value that means nothing."""
OF_SHARED_EXPERTS = {"shared_expert_overlap": False}
DEFAULTS = axis_values(Strategy())
Lost = Mapping[str, set[str]]
MOST_TOLD = 12
"""Values of an axis that a line names; ranges have thousands."""
OFF = {"bucket_bytes": 0}
"""What an axis without effect is written as in results, where that is not Strategy's default."""


def folded(space: Space) -> tuple[Space, tuple[str, ...]]:
    """The space without values that change nothing, and a line for each choice that lost some or has no effect."""
    space, told = _folded_on_model(space)
    axes = dict(space.axes)
    for name, where, values in _idle(space):
        line = f"{name}: {_joined(name, values)} has no effect where {where}"
        axes[name] = first_of_all(name, values)
        if axes[name] != values:
            line += f"; folded to {_joined(name, axes[name])}"
        told.append(line)
    told += _balanced_anyhow(space)
    return (space if axes == dict(space.axes) else replace(space, axes=axes)), tuple(told)


def folded_point(space: Space, strategy: Strategy) -> tuple[Space, tuple[str, ...]]:
    """One strategy of a space as a space of its own, folded.

    What has no effect beside its other choices is told, and stays: they may be changed by whoever looks for a remedy.
    """
    return folded(replace(space, axes={name: (value,) for name, value in axis_values(strategy).items()}, references={}))


def _folded_on_model(space: Space) -> tuple[Space, list[str]]:
    """Without what the model lacks."""
    axes, workload, told, model = dict(space.axes), space.workload, list[str](), space.model
    for name, neutral, what in _without_experts(model):
        values = axes[name]
        if values != (neutral,) and OPEN not in values:
            if name in {"ep", "etp"} and neutral not in values:
                continue  # each of them is an error, and says so
            axes[name] = (neutral,)
            told.append(f"{name}: {_joined(name, values)} has no effect on {model.name}, {what}; folded to "
                        f"{_joined(name, (neutral,))}")  # fmt: skip
    for name, fold in (("recompute", _modules_left_out), ("fusion", _kernels_left_out)):
        if OPEN not in axes[name]:
            values, lost = fold(space)
            changed = tuple(value for value in values if value not in axes[name]) or values
            told += [f"{name}: {', '.join(sorted(names))} has no effect {where}; folded to {_joined(name, changed)}"
                     for where, names in lost.items() if names]  # fmt: skip
            axes[name] = values
    if workload.routing_skew and (why := _evenly_loaded(model)):
        told.append(
            f"workload.routing_skew: {workload.routing_skew:g} has no effect on {model.name}, {why}; folded to 0"
        )
        workload = replace(workload, routing_skew=0.0)
    return (replace(space, axes=axes, workload=workload) if told else space), told


def _without_experts(model: ModelSpec) -> Iterator[tuple[str, object, str]]:
    if model.moe is None:
        yield from ((name, neutral, "a dense model") for name, neutral in OF_EXPERTS.items())
    elif not model.has_shared_experts:
        yield from ((name, neutral, "a model without shared experts") for name, neutral in OF_SHARED_EXPERTS.items())


def _evenly_loaded(model: ModelSpec) -> str:
    """Why routing skew means nothing on a model; empty where it does."""
    if model.moe is None:
        return "a dense model"
    return "whose experts are padded to their capacity" if model.moe.capacity_factor is not None else ""


def _modules_left_out(space: Space) -> tuple[tuple[object, ...], Lost]:
    """Recompute choices without modules that change nothing, each once; and the names of these by where that is so."""
    model, axes = space.model, cast("Mapping[str, tuple[Recompute, ...]]", space.axes)
    choices = axes["recompute"]
    if not any(choice.kind is RecomputeKind.SELECTIVE for choice in choices):
        return tuple(choices), {}
    left = [effective(model, choice) for choice in choices]
    lacking, inside = set[str](), set[str]()
    for choice, acting in zip(choices, left, strict=True):
        here = present(model, choice.modules)
        lacking |= {module.value for module in choice.modules - here}
        inside |= {module.value for module in here - acting.modules}
    return tuple(dict.fromkeys(left)), {f"on {model.name}, which has no such part": lacking,
                                        "beside modules that it lies inside": inside}  # fmt: skip


def _kernels_left_out(space: Space) -> tuple[tuple[object, ...], Lost]:
    """Fusion sets without kernels that merge nothing; those of Strategy's default stay, but for sets that are alike."""
    sets = cast("Mapping[str, tuple[Kernels, ...]]", space.axes)["fusion"]
    usual = Strategy().fusion
    if len(sets) == 1 and sets[0] <= usual:
        return tuple(sets), {}
    chips = (part.chip.name for system in space.systems for part in system.parts)
    firsts: dict[Kernels, Kernels] = {}
    lost: set[Fusion | OwnFusion] = set()
    for asked, acting in zip(sets, merged(space.model, sets, space.axes, chips), strict=True):
        first = firsts.setdefault(acting, asked & (acting | usual))
        lost |= (asked - acting - usual) | ((asked ^ first) - acting)
    where = f"on {space.model.name}, which has nothing left for it to merge"
    return tuple(firsts.values()), {where: {rule_of(kernel).name for kernel in lost}}


def _idle(space: Space) -> Iterator[tuple[str, str, tuple[object, ...]]]:
    """Axes whose values mean nothing beside the others, where that is so and the values; none that says nothing."""
    for name, where in idle_axes(space):
        values = space.axes[name]
        if OPEN not in values and values not in ((DEFAULTS[name],), (OFF.get(name, DEFAULTS[name]),)):
            yield name, where, values


def _balanced_anyhow(space: Space) -> list[str]:
    """What to say of routing skew where no rank of experts could have more to do than another."""
    skew, degrees = space.workload.routing_skew, {*space.axes["ep"], *(s.ep for s in space.references.values())}
    return [f"workload.routing_skew: {skew:g} has no effect where ep is 1"] if skew and degrees == {1} else []


def _joined(name: str, values: tuple[object, ...]) -> str:
    write = next(axis.write for axis in AXES if axis.name == name)
    words = ["null" if v is None else _word(v) for v in map(write, values[:MOST_TOLD])]
    return ", ".join([*words, f"{len(values) - MOST_TOLD} more"] if len(values) > MOST_TOLD else words)


def _word(value: object) -> str:
    return ("+".join(map(str, value)) or "none") if isinstance(value, list) else str(value).lower()
