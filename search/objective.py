"""What a search optimises and what it may not break, and whether bounds may be used to search for it.

Objectives are columns of a result with a direction; constraints are expressions (expression.py). `exactness` decides
whether a search that drops candidates by (step time, memory) dominance and lower bounds can lose a point of the front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from estimator.result import COLUMNS, Column
from search.expression import KNOWN_NAMES, Expression, strategy_values
from search.program import Opcode, Step, arity, text_code
from search.yaml_lines import SpaceError, shown

__all__ = [
    "KNOWN_NAMES",
    "Constraint",
    "Expression",
    "Objective",
    "Opcode",
    "Trend",
    "exactness",
    "strategy_values",
    "text_code",
    "conjuncts",
]

MAX_OBJECTIVES = 4

_COLUMNS: dict[str, Column] = {c.name: c for c in COLUMNS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A column to make small (`minimise`) or large."""

    column: str
    minimise: bool

    @property
    def sign(self) -> float:
        """Factor that turns the column into something to minimise."""
        return 1.0 if self.minimise else -1.0

    @property
    def follows(self) -> str:
        """Of what the objective is a monotone function, better with better: as in Column, or '' against the grain."""
        known = _COLUMNS[self.column]
        return known.follows if (known.better == "lower") is self.minimise else ""


class Trend(Enum):
    """How a value changes when step time and memory grow and all else stays."""

    CONSTANT = 0
    RISES = 1
    FALLS = -1
    ANY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """An expression that every accepted candidate satisfies.

    >>> Constraint.parse("step_time_s <= 40 and tp <= 8").is_bounded
    True
    >>> Constraint.parse("step_time_s >= 40").is_bounded
    False
    """

    expression: Expression

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """The constraint in a text; SpaceError where it gives a number instead of an answer."""
        expression = Expression.parse(text)
        if not expression.is_logical:
            raise SpaceError(f"a constraint must compare; got {shown(text)}; accepted one such as 'step_time_s <= 40'")
        return cls(expression=expression)

    @property
    def needs_result(self) -> bool:
        """False where strategy and system decide it before anything is priced."""
        return any(name in _COLUMNS and name != "num_gpus" for name in self.expression.variables)

    @property
    def is_bounded(self) -> bool:
        """Whether a candidate with less step time and memory, of any strategy, satisfies it too.

        Conjuncts count one by one. One that looks at strategy alone selects candidates before they are compared, so it
        is bounded; one that mixes strategy with result is not: the dominating candidate may have another strategy.
        """
        return all(_is_bounded(steps) for steps in conjuncts(self.expression.steps))


def exactness(objectives: Sequence[Objective], constraints: Sequence[Constraint]) -> tuple[bool, str]:
    """Whether bounds and dominance lose nothing, and why (not).

    They lose nothing if every objective follows step time, memory or the system alone (`Column.follows`), in the
    direction in which that gets better, and every constraint that looks at results holds for whatever is better.
    """
    for objective in objectives:
        if not objective.follows:
            direction = "minimised" if objective.minimise else "maximised"
            return False, f"{objective.column} {direction} does not follow step time or memory, so all are enumerated"
    for constraint in constraints:
        if not constraint.is_bounded:
            text = constraint.expression.text
            return False, f"{text!r} may hold for a slower or larger candidate only, so all are enumerated"
    return True, "every objective follows step time, memory or the system, and constraints hold for whatever is better"


Steps = Sequence[Step]


def conjuncts(steps: Steps) -> list[Steps]:
    """The programs between the outermost `and`s."""
    if steps[-1][0] is not Opcode.AND:
        return [steps]
    middle = _start(steps, len(steps) - 2)
    return conjuncts(steps[:middle]) + conjuncts(steps[middle:-1])


def _start(steps: Steps, end: int) -> int:
    """Where the operand that ends at `end` starts."""
    missing = 1
    while True:
        code = steps[end][0]
        missing += arity(code) - 1
        if not missing:
            return end
        end -= 1


def _is_bounded(steps: Steps) -> bool:
    names = [str(operand) for code, operand in steps if code is Opcode.LOAD]
    trends = {_name_trend(name) for name in names}
    if trends <= {Trend.CONSTANT}:
        return True
    if any(name not in _COLUMNS for name in names):
        return False
    return _trend(steps) in (Trend.CONSTANT, Trend.FALLS)


def _name_trend(name: str) -> Trend:
    known = _COLUMNS.get(name)
    if known is None or known.follows == "system":
        return Trend.CONSTANT
    if not known.follows:
        return Trend.ANY
    return Trend.RISES if known.better == "lower" else Trend.FALLS


def _trend(steps: Steps) -> Trend:
    """Interprets a program over trends and signs: (trend, value of a constant or None)."""
    stack: list[tuple[Trend, float | None]] = []
    for code, operand in steps:
        taken = arity(code)
        if code is Opcode.PUSH:
            stack.append((Trend.CONSTANT, float(operand)))
        elif code is Opcode.LOAD:
            stack.append((_name_trend(str(operand)), None))
        elif taken == 1:
            stack.append(_unary_trend(code, *stack.pop()))
        else:
            right = stack.pop()
            stack.append((_binary_trend(code, stack.pop(), right), None))
    return stack[0][0]


def _unary_trend(code: Opcode, trend: Trend, value: float | None) -> tuple[Trend, float | None]:
    if code is Opcode.NEGATE:
        return _flip(trend), None if value is None else -value
    if code is Opcode.NOT:
        return _flip(trend), None
    # abs and powers turn at zero; columns are not negative but differences of them may be.
    return (trend if trend is Trend.CONSTANT else Trend.ANY), None


def _binary_trend(code: Opcode, left: tuple[Trend, float | None], right: tuple[Trend, float | None]) -> Trend:
    a, b = left[0], right[0]
    match code:
        case Opcode.ADD | Opcode.MIN | Opcode.MAX | Opcode.AND | Opcode.OR:
            return _join(a, b)
        case Opcode.SUBTRACT | Opcode.GREATER | Opcode.GREATER_EQUAL:
            return _join(a, _flip(b))
        case Opcode.LESS | Opcode.LESS_EQUAL:
            return _join(_flip(a), b)
        case Opcode.MULTIPLY:
            return _scaled(b, left[1]) if left[1] is not None else _scaled(a, right[1])
        case Opcode.DIVIDE:
            return _scaled(a, right[1])
        case _:  # //, %, ==, !=
            return Trend.CONSTANT if a is b is Trend.CONSTANT else Trend.ANY


def _scaled(trend: Trend, factor: float | None) -> Trend:
    """The trend of a product with a known factor."""
    if trend is Trend.CONSTANT and factor is not None:
        return trend
    if not factor:  # unknown, or zero
        return Trend.ANY
    return trend if factor > 0 else _flip(trend)


def _flip(trend: Trend) -> Trend:
    return {Trend.RISES: Trend.FALLS, Trend.FALLS: Trend.RISES}.get(trend, trend)


def _join(a: Trend, b: Trend) -> Trend:
    """The trend of a function that grows in both."""
    if b is Trend.CONSTANT or a is b:
        return a
    return b if a is Trend.CONSTANT else Trend.ANY
