"""Guards and formulas of fusion rules: text -> what can be evaluated, without anything that Python's eval could do.

A guard decides which ops exist, so it reads sizes that no split changes: every row of a batch has the same answer.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from estimator.graph import Block
from estimator.op import Axis, Op

__all__ = ["Guard", "linear", "parse_guard"]

WHOLE = (Axis.HIDDEN, Axis.HEAD, Axis.LATENT, Axis.ROUTER, Axis.KEY, Axis.POSITIONS)
"""Axes that no parallelism splits."""
FACTS = ("inputs", "outputs", "readers", "passes")
SPLIT = tuple(axis.value for axis in Axis if axis not in WHOLE)
COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}  # fmt: skip
Value = Callable[[Mapping[str, Op], Block], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """A condition on the ops of a match, and what it reads of them."""

    text: str
    holds: Callable[[Mapping[str, Op], Block], bool]
    reads: tuple[tuple[str, Value], ...]

    def told(self, ops: Mapping[str, Op], block: Block) -> str:
        """The guard with the values that it found."""
        found = ", ".join(f"{name} = {read(ops, block):g}" for name, read in self.reads)
        return f"{self.text} does not hold" + (f" ({found})" if found else "")


def parse_guard(text: str, labels: tuple[str, ...]) -> Guard:
    """The guard in a text; ValueError where it is none."""
    reads: dict[str, Value] = {}
    value = _value(_tree(text), labels, reads)

    def holds(ops: Mapping[str, Op], block: Block) -> bool:
        try:
            return bool(value(ops, block))
        except ZeroDivisionError:
            return False

    return Guard(text, holds, tuple(reads.items()))


def _tree(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} cannot be parsed ({getattr(error, 'msg', error)})") from None


def _value(node: ast.expr, labels: tuple[str, ...], reads: dict[str, Value]) -> Value:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        number = node.value
        return lambda ops, block: number
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return reads.setdefault(f"{node.value.id}.{node.attr}", _fact(node.value.id, node.attr, labels))
    if isinstance(node, ast.Name):
        if node.id == "count":
            return reads.setdefault("count", lambda ops, block: len(ops))
        raise ValueError(f"{node.id!r} cannot be parsed: a guard reads LABEL.FACT, with a label of {_listed(labels)}")
    if isinstance(node, ast.BoolOp):
        parts = [_value(part, labels, reads) for part in node.values]
        every = all if isinstance(node.op, ast.And) else any
        return lambda ops, block: every(part(ops, block) for part in parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        inner = _value(node.operand, labels, reads)
        turn = operator.not_ if isinstance(node.op, ast.Not) else operator.neg
        return lambda ops, block: turn(inner(ops, block))
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right, do = _value(node.left, labels, reads), _value(node.right, labels, reads), ARITHMETIC[type(node.op)]
        return lambda ops, block: do(left(ops, block), right(ops, block))
    if isinstance(node, ast.Compare) and all(type(op) in COMPARE for op in node.ops):
        sides = [_value(side, labels, reads) for side in (node.left, *node.comparators)]
        tests = [COMPARE[type(op)] for op in node.ops]
        return lambda ops, block: all(
            test(a(ops, block), b(ops, block)) for test, a, b in zip(tests, sides, sides[1:], strict=False)
        )
    raise ValueError(
        f"{ast.unparse(node)!r} cannot be parsed: a guard has numbers, LABEL.FACT, + - * / %, comparisons, and, or, not"
    )


def _listed(labels: tuple[str, ...]) -> str:
    return ", ".join(label for label in labels if label) or "none"


def _fact(label: str, name: str, labels: tuple[str, ...]) -> Value:
    if label not in labels:
        raise ValueError(f"{label}.{name} names no op of the rule; labels: {_listed(labels)}")
    if name in SPLIT:
        kept = ", ".join(axis.value for axis in WHOLE)
        raise ValueError(f"{label}.{name} must be a size that no split changes ({kept})")
    if name in FACTS:
        return lambda ops, block: _counted(ops.get(label), name, block)
    if name in {axis.value for axis in WHOLE}:
        axis = Axis(name)
        return lambda ops, block: _size(ops.get(label), axis, block)
    known = ", ".join((*FACTS, *(a.value for a in WHOLE)))
    raise ValueError(f"{label}.{name} is no fact of an op; have {known}")


def _counted(op: Op | None, name: str, block: Block) -> float:
    if op is None:
        return 0.0
    if name == "readers":
        return float(sum(bool(op.outputs) and op.outputs[0] in other.inputs for other in block.ops))
    return float(op.passes) if name == "passes" else float(len(getattr(op, name)))


def _size(op: Op | None, axis: Axis, block: Block) -> float:
    """Along an axis, of the op's own dims or else of its tensors; 0 where none has it."""
    if op is None:
        return 0.0
    dims = [*op.dims, *(dim for name in (*op.inputs, *op.outputs) for dim in block.tensors[name].dims)]
    return next((float(dim.size) for dim in dims if dim.axis is axis), 0.0)


def linear(text: str) -> list[tuple[str, float]]:
    """A sum of names times numbers; ValueError where it is none.

    >>> linear("2 * (x.inputs + inputs) + outputs")
    [('x.inputs', 2.0), ('inputs', 2.0), ('outputs', 1.0)]
    """
    terms = _terms(_tree(text), text)
    if "" in terms or not terms:
        raise ValueError(f"{text!r} must be a sum of tensors times numbers")
    if any(times < 0 for times in terms.values()):
        raise ValueError(f"{text!r} must move every tensor at least 0 times")
    return list(terms.items())


def _terms(node: ast.expr, text: str) -> dict[str, float]:
    """Coefficients by name; the number alone under ""."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return {"": float(node.value)}
    if isinstance(node, ast.Name | ast.Attribute):
        return {ast.unparse(node): 1.0}
    if isinstance(node, ast.BinOp):
        left, right = _terms(node.left, text), _terms(node.right, text)
        if isinstance(node.op, ast.Add | ast.Sub):
            sign = 1.0 if isinstance(node.op, ast.Add) else -1.0
            return {name: left.get(name, 0.0) + sign * right.get(name, 0.0) for name in {**left, **right}}
        for numbers, names in ((left, right), (right, left)):
            if isinstance(node.op, ast.Mult) and set(numbers) == {""}:
                return {name: times * numbers[""] for name, times in names.items()}
        if isinstance(node.op, ast.Div) and set(right) == {""} and right[""]:
            return {name: times / right[""] for name, times in left.items()}
    raise ValueError(f"{text!r} must be a sum of tensors times numbers")
