"""Expressions over the columns of a result and the fields of a strategy. Knows nothing of what they are used for.

An expression is arithmetic and logic over named numbers. It is parsed once into a postfix program (program.py) that
runs on whole columns or, jitted and bit-equal, on one candidate. Python's parser is used, its evaluation never.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from estimator.inference.formats import ACTIVATIONS, CACHES, WEIGHTS
from estimator.precision import RECIPES
from estimator.result import BAND_COLUMNS, COLUMNS
from estimator.strategy import ContextParallel, CudaGraph, Fusion, Optimizer, Recompute, Schedule, Strategy
from search.program import Array, Opcode, Step, Value, arity, run_columns, text_code
from search.yaml_lines import SpaceError, shown

__all__ = [
    "BAND_IS_TOLD",
    "BAND_NAMES",
    "KNOWN_NAMES",
    "TEXT_NAMES",
    "COMPARISONS",
    "Expression",
    "Opcode",
    "SERVED_TEXTS",
    "STRATEGY_NUMBERS",
    "strategy_values",
    "text_code",
]

MAX_LENGTH = 1_000  # characters
MAX_DEPTH = 100  # levels of nesting, which is also what a sum may have terms
MAX_POWER = 64

_LOGIC = frozenset({Opcode.AND, Opcode.OR, Opcode.NOT})
_COMPARISONS: dict[type[ast.cmpop], Opcode] = {
    ast.Lt: Opcode.LESS, ast.LtE: Opcode.LESS_EQUAL, ast.Gt: Opcode.GREATER, ast.GtE: Opcode.GREATER_EQUAL,
    ast.Eq: Opcode.EQUAL, ast.NotEq: Opcode.NOT_EQUAL,
}  # fmt: skip
_BINARY: dict[type[ast.operator], Opcode] = {
    ast.Add: Opcode.ADD, ast.Sub: Opcode.SUBTRACT, ast.Mult: Opcode.MULTIPLY, ast.Div: Opcode.DIVIDE,
    ast.FloorDiv: Opcode.FLOOR_DIVIDE, ast.Mod: Opcode.MODULO,
}  # fmt: skip
COMPARISONS = frozenset(_COMPARISONS.values())
_FUNCTIONS: dict[str, Opcode] = {"abs": Opcode.ABS, "min": Opcode.MIN, "max": Opcode.MAX}

STRATEGY_NUMBERS: tuple[str, ...] = (*Strategy().sizes(), "sequence_parallel", "dp", "num_micro_batches")
TEXT_NAMES: dict[str, frozenset[str] | None] = {
    "schedule": frozenset(s.value for s in Schedule),
    "context_parallel": frozenset(c.value for c in ContextParallel),
    "optimizer": frozenset(o.value for o in Optimizer),
    "precision": frozenset(RECIPES),
    "recompute": None,
    "fusion": None,
}
"""Names that hold text, with what they can hold (None: open). Expressions compare them with == and != and `in`."""
SERVED_TEXTS: dict[str, frozenset[str] | None] = {
    "weights": frozenset(WEIGHTS),
    "activations": frozenset(ACTIVATIONS),
    "kv_cache": frozenset(CACHES),
    "cuda_graph": frozenset(scope.value for scope in CudaGraph),
}
"""The same of a model that answers."""
_TEXTS = TEXT_NAMES | SERVED_TEXTS

KNOWN_NAMES: tuple[str, ...] = (*(c.name for c in COLUMNS), *STRATEGY_NUMBERS, *TEXT_NAMES)
"""Every name of an expression: columns of a result, sizes of a strategy, and texts."""

BAND_NAMES = {c.name: re.sub("_p[19]0", "", c.name) for c in BAND_COLUMNS}
"""Columns of a band, with what a search prices in their place."""
BAND_IS_TOLD = "P10 and P90 are told of the rows that a search keeps, not priced for every candidate"


def strategy_values(strategy: Strategy) -> dict[str, Value]:
    """What a strategy gives to expressions: its sizes, its flags and the codes of its texts (`dp` depends on more)."""
    texts = {
        "schedule": strategy.schedule.value,
        "context_parallel": strategy.context_parallel.value,
        "optimizer": strategy.optimizer.value,
        "precision": strategy.precision,
        "recompute": str(strategy.recompute),
        "fusion": "+".join(sorted(f.value for f in strategy.fusion)),
    }
    codes = {name: text_code(text) for name, text in texts.items()}
    return {**strategy.sizes(), "sequence_parallel": float(strategy.sequence_parallel), **codes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A parsed expression. `steps` is its postfix program, with variables by name."""

    text: str
    steps: tuple[Step, ...] = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str, names: Collection[str] = KNOWN_NAMES) -> Expression:
        """The expression in a text over `names`; SpaceError names what is not one, and its column.

        >>> Expression.parse("tp * cp <= 8 and schedule != 'gpipe'").variables
        ('tp', 'cp', 'schedule')
        """
        if not isinstance(text, str) or not text.strip():
            raise SpaceError(f"an expression must be text such as 'tp * cp <= 8'; got {shown(text)}")
        if len(text) > MAX_LENGTH:
            raise SpaceError(f"an expression must have at most {MAX_LENGTH} characters; got {len(text)}")
        text = " ".join(text.split())
        return cls(text=text, steps=tuple(_Compiler(text, names).steps(_parse(text), 0)))

    @property
    def variables(self) -> tuple[str, ...]:
        """Names in order of first use."""
        return tuple(dict.fromkeys(str(operand) for code, operand in self.steps if code is Opcode.LOAD))

    @property
    def stack_size(self) -> int:
        """Numbers that a run holds at once, at most."""
        depth = most = 0
        for code, _ in self.steps:
            depth += 1 - arity(code)
            most = max(most, depth)
        return most

    @property
    def is_logical(self) -> bool:
        """Whether it answers a question (ends in a comparison, and, or, not) rather than giving a number."""
        last = self.steps[-1][0]
        return last in COMPARISONS or last in _LOGIC

    def evaluate(self, values: Mapping[str, Value]) -> Array | NDArray[np.bool_]:
        """Over numbers and texts, or arrays `[N]` of them. Answers, if logical, bool: False where undefined."""
        result = run_columns(self.steps, values)
        return (result == 1.0) if self.is_logical else result

    def program(self, variables: Sequence[str]) -> tuple[NDArray[np.int64], Array]:
        """`(opcodes int64 [S], operands float64 [S])` for `postfix.run`; LOAD's operand indexes `variables`."""
        index = {name: float(i) for i, name in enumerate(variables)}
        for name in self.variables:
            if name not in index:
                raise ValueError(f"the variables of {self.text!r} must hold {name!r}, but got {list(variables)}")
        opcodes = np.array([int(code) for code, _ in self.steps], dtype=np.int64)
        operands = [index[value] if isinstance(value, str) else value for _, value in self.steps]
        return opcodes, np.array(operands, dtype=np.float64)


def _parse(text: str) -> ast.expr:
    """Python's syntax tree, which is only looked at."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # '40and tp' only warns
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        place = f" at column {error.offset}" if error.offset else ""
        raise SpaceError(f"an expression must be well formed; got {shown(text)}{place}: {error.msg}") from None
    except (ValueError, MemoryError, RecursionError) as error:  # a NUL, thousands of brackets
        raise SpaceError(f"an expression must be well formed; got {shown(text)}: {error or 'too deep'}") from None


Steps = Iterator[Step]


class _Compiler:
    """Syntax tree to postfix steps. Each method yields the steps that leave one number on the stack."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        self.text = text
        self.names = names

    def fail(self, node: ast.AST, rule: str, accepted: str = "") -> SpaceError:
        part = ast.get_source_segment(self.text, node) or self.text
        column = getattr(node, "col_offset", 0) + 1
        tail = f"; accepted {accepted}" if accepted else ""
        return SpaceError(f"{rule}; got {shown(part)} at column {column} of {shown(self.text)}{tail}")

    def steps(self, node: ast.expr, depth: int) -> Steps:
        if depth >= MAX_DEPTH:
            raise self.fail(node, f"an expression must nest at most {MAX_DEPTH} deep")
        match node:
            case ast.Constant():
                yield Opcode.PUSH, self.number(node)
            case ast.Name():
                yield Opcode.LOAD, self.name(node, text=False)
            case ast.BinOp(op=ast.Pow()):
                yield from self.steps(node.left, depth + 1)
                yield Opcode.POWER, self.exponent(node.right)
            case ast.BinOp(op=op) if type(op) in _BINARY:
                yield from self.steps(node.left, depth + 1)
                yield from self.steps(node.right, depth + 1)
                yield _BINARY[type(op)], 0.0
            case ast.UnaryOp():
                yield from self.unary(node, depth)
            case ast.BoolOp():
                code = Opcode.AND if isinstance(node.op, ast.And) else Opcode.OR
                yield from self.folded(node.values, code, depth)
            case ast.Compare():
                yield from self.comparison(node, depth)
            case ast.Call():
                yield from self.call(node, depth)
            case _:
                accepted = "numbers, names, + - * / // % **, comparisons, in, and, or, not, min, max, abs"
                raise self.fail(node, "an expression must be arithmetic and logic", accepted)

    def number(self, node: ast.Constant) -> float:
        if isinstance(node.value, str):
            names = ", ".join(_TEXTS)
            raise self.fail(node, "a text must be compared with a name by ==, != or in", f"one of the names {names}")
        if not isinstance(node.value, int | float):
            raise self.fail(node, "a constant must be a number")
        try:
            value = float(node.value)
        except OverflowError:
            value = np.inf
        if not np.isfinite(value):
            raise self.fail(node, "a number must be finite")
        return value

    def name(self, node: ast.Name, *, text: bool) -> str:
        if node.id not in self.names:
            if node.id in BAND_NAMES:
                raise self.fail(node, BAND_IS_TOLD, BAND_NAMES[node.id])
            near = get_close_matches(node.id, list(self.names), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise self.fail(node, f"a name must be known{hint}", "" if near else ", ".join(self.names))
        if node.id in _TEXTS and not text:
            raise self.fail(node, "a text must be compared by ==, != or in", f"{node.id} == {self.example(node.id)!r}")
        return node.id

    @staticmethod
    def example(name: str) -> str:
        known = _TEXTS[name]
        return sorted(known)[0] if known else {"recompute": "full"}.get(name, "flash_attention")

    def exponent(self, node: ast.expr) -> float:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_POWER:
            raise self.fail(node, "an exponent must be a whole number", f"0 to {MAX_POWER}")
        return float(value)

    def unary(self, node: ast.UnaryOp, depth: int) -> Steps:
        if isinstance(node.op, ast.Invert):
            raise self.fail(node, "~ is not read", "not")
        yield from self.steps(node.operand, depth + 1)
        if not isinstance(node.op, ast.UAdd):
            yield (Opcode.NOT if isinstance(node.op, ast.Not) else Opcode.NEGATE), 0.0

    def folded(self, nodes: Sequence[ast.expr], code: Opcode, depth: int) -> Steps:
        for i, node in enumerate(nodes):
            yield from self.steps(node, depth + 1)
            if i:
                yield code, 0.0

    def call(self, node: ast.Call, depth: int) -> Steps:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in _FUNCTIONS or node.keywords:
            raise self.fail(node, "a call must be to a known function", ", ".join(_FUNCTIONS))
        if not node.args or (name == "abs" and len(node.args) != 1):
            raise self.fail(node, f"{name} must be given {'one value' if name == 'abs' else 'values'}")
        yield from self.folded(node.args, _FUNCTIONS[name], depth)
        if name == "abs":
            yield Opcode.ABS, 0.0

    def comparison(self, node: ast.Compare, depth: int) -> Steps:
        """`a < b <= c` is `a < b and b <= c`."""
        sides = [node.left, *node.comparators]
        for i, op in enumerate(node.ops):
            yield from self.pair(sides[i], op, sides[i + 1], depth)
            if i:
                yield Opcode.AND, 0.0

    def pair(self, left: ast.expr, op: ast.cmpop, right: ast.expr, depth: int) -> Steps:
        if isinstance(op, ast.In | ast.NotIn):
            yield from self.membership(left, right, depth)
            if isinstance(op, ast.NotIn):
                yield Opcode.NOT, 0.0
            return
        if type(op) not in _COMPARISONS:
            raise self.fail(left, "a comparison must be one of < <= > >= == != in", "==")
        texts = [side for side in (left, right) if isinstance(side, ast.Name) and side.id in _TEXTS]
        if texts and texts[0].id in self.names:
            other = right if texts[0] is left else left
            if not isinstance(op, ast.Eq | ast.NotEq):
                raise self.fail(texts[0], "a text has no order", "==, !=, in")
            yield Opcode.LOAD, self.name(texts[0], text=True)
            yield Opcode.PUSH, self.code(texts[0].id, other)
        else:
            yield from self.steps(left, depth + 1)
            yield from self.steps(right, depth + 1)
        yield _COMPARISONS[type(op)], 0.0

    def membership(self, left: ast.expr, right: ast.expr, depth: int) -> Steps:
        """`a in [b, c]` is `a == b or a == c`."""
        if not isinstance(right, ast.List | ast.Tuple | ast.Set) or not right.elts:
            raise self.fail(right, "the right side of in must be a list", "['1f1b', 'dualpipe']")
        for i, item in enumerate(right.elts):
            yield from self.pair(left, ast.Eq(), item, depth + 1)
            if i:
                yield Opcode.OR, 0.0

    def code(self, name: str, node: ast.expr) -> float:
        """The number of a text that `name` can hold."""
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            raise self.fail(node, f"{name} must be compared with a text", repr(self.example(name)))
        try:
            return text_code(_canonical(name, node.value))
        except ValueError as error:
            raise self.fail(node, str(error)) from None


def _canonical(name: str, text: str) -> str:
    """A text as a strategy writes it; ValueError where `name` cannot hold it."""
    known = _TEXTS[name]
    if name == "recompute":
        return str(Recompute.parse(text))
    if name == "fusion":
        parts = [part for part in text.split("+") if part]
        return "+".join(sorted(_member(name, part, [f.value for f in Fusion]) for part in parts))
    return text if known is None else _member(name, text, sorted(known))


def _member(name: str, text: str, known: Sequence[str]) -> str:
    if text not in known:
        near = get_close_matches(text, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {list(known)}{hint}")
    return text
