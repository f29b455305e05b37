"""What can mean nothing on a model, axes and routing skew: folded to what says so, and told. Knows nothing of prices.

A degree that is wrong stays: a configuration that asks for expert parallelism in a dense model is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from estimator.model import ModelSpec
from estimator.strategy import Strategy
from search.axes import AXES, OPEN, axis_values
from search.space import Space

__all__ = ["folded", "folded_point"]

OF_EXPERTS = {"ep": 1, "etp": 1, "redundant_experts": 0, "shared_expert_overlap": False, "expert_bucket_bytes": None,
              "overlap_ep": 0}  # fmt: skip
"""Axes that mean something where there are experts, with the value that means nothing."""
OF_SHARED_EXPERTS = {"shared_expert_overlap": False}


def folded(space: Space) -> tuple[Space, tuple[str, ...]]:
    """The space without values that change nothing on its model, and a line for each choice that lost some."""
    axes, workload, told = dict(space.axes), space.workload, []
    for name, neutral, what in _without_effect(space.model):
        values = axes[name]
        if values != (neutral,) and OPEN not in values:
            if name in {"ep", "etp"} and neutral not in values:
                continue  # each of them is an error, and says so
            axes[name] = (neutral,)
            told.append(f"{name}: {_joined(name, values)} has no effect on {space.model.name}, {what}; folded to "
                        f"{_joined(name, (neutral,))}")  # fmt: skip
    if space.model.moe is None and workload.routing_skew:
        skew = f"workload.routing_skew: {workload.routing_skew:g}"
        told.append(f"{skew} has no effect on {space.model.name}, a dense model; folded to 0")
        workload = replace(workload, routing_skew=0.0)
    return (replace(space, axes=axes, workload=workload) if told else space), tuple(told)


def folded_point(space: Space, strategy: Strategy) -> tuple[Space, tuple[str, ...]]:
    """One strategy of a space as a space of its own, folded."""
    return folded(replace(space, axes={name: (value,) for name, value in axis_values(strategy).items()}))


def _without_effect(model: ModelSpec) -> Iterator[tuple[str, object, str]]:
    if model.moe is None:
        yield from ((name, neutral, "a dense model") for name, neutral in OF_EXPERTS.items())
    elif not model.moe.shared_ffn:
        yield from ((name, neutral, "a model without shared experts") for name, neutral in OF_SHARED_EXPERTS.items())


def _joined(name: str, values: tuple[object, ...]) -> str:
    write = next(axis.write for axis in AXES if axis.name == name)
    return ", ".join("null" if v is None else str(v).lower() for v in map(write, values))
