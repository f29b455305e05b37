"""What an exporter is given: a graph, its ops with their amounts, and in words what they are of."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec

from estimator.formulas import Formulas, formulas
from estimator.graph import OpGraph
from estimator.inventory import Entry, without_gradient
from estimator.op import Op
from estimator.precision import PrecisionRecipe

__all__ = ["GraphView", "kind_of", "require", "shape_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphView:
    """A graph under a name. `told`: of what its amounts are; `sources`: per block and op, where it comes from."""

    name: str
    told: str
    graph: OpGraph
    recipe: PrecisionRecipe
    entries: tuple[Entry, ...]
    sources: dict[tuple[str, str], str] = field(default_factory=dict)

    def formulas(self) -> Formulas:
        """FLOPs and bytes in letters, entry by entry."""
        return formulas(self.graph, self.entries, self.recipe)

    def source_of(self, entry: Entry) -> str:
        """The place of the model's code that an op, or what it is a gradient of, was captured from; else nothing."""
        return self.sources.get((entry.block.kind.value, without_gradient(entry.op.name)), "")


def kind_of(op: Op) -> str:
    """The kind of an op; of traffic also over which group."""
    if op.collective is None or op.group is None:
        return op.kind.value
    return f"{op.collective.value} {op.group.value}"


def shape_of(op: Op) -> str:
    """Its dims as `axis=size`."""
    return " ".join(f"{dim.axis.value}={float(dim.size):.10g}" for dim in op.dims)


def require(package: str, what: str) -> None:
    """ValueError where an optional package is missing, with the extra that holds it."""
    if find_spec(package) is None:
        raise ValueError(f"{what} needs {package}, which this installation lacks; pip install 'trainspace[report]'")
