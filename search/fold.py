"""Axes that can mean nothing on a model: a list of values is folded to one, and it is told. Knows nothing of prices.

A single value that is wrong stays: a configuration that asks for experts in a dense model is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from estimator.model import ModelSpec
from search.axes import AXES, OPEN
from search.space import Space

__all__ = ["folded"]

OF_EXPERTS = {"ep": 1, "etp": 1, "redundant_experts": 0, "shared_expert_overlap": False, "expert_bucket_bytes": None,
              "overlap_ep": 0}  # fmt: skip
"""Axes that mean something where there are experts, with the value that means nothing."""
OF_SHARED_EXPERTS = {"shared_expert_overlap": False}


def folded(space: Space) -> tuple[Space, tuple[str, ...]]:
    """The space without values that change nothing on its model, and a line for each axis that lost some."""
    axes, told = dict(space.axes), []
    for name, neutral, what in _without_effect(space.model):
        values = axes[name]
        if len(values) > 1 and OPEN not in values:
            kept = neutral if neutral in values else values[0]
            if name in {"ep", "etp"} and kept != neutral:
                continue  # each of them is an error, and says so
            axes[name] = (kept,)
            told.append(f"{name}: {_joined(name, values)} has no effect on {space.model.name}, {what}; folded to "
                        f"{_joined(name, (kept,))}")  # fmt: skip
    return (replace(space, axes=axes) if told else space), tuple(told)


def _without_effect(model: ModelSpec) -> Iterator[tuple[str, object, str]]:
    if model.moe is None:
        yield from ((name, neutral, "a dense model") for name, neutral in OF_EXPERTS.items())
    elif not model.moe.shared_ffn:
        yield from ((name, neutral, "a model without shared experts") for name, neutral in OF_SHARED_EXPERTS.items())


def _joined(name: str, values: tuple[object, ...]) -> str:
    write = next(axis.write for axis in AXES if axis.name == name)
    return ", ".join("null" if v is None else str(v).lower() for v in map(write, values))
