"""Postfix programs and their run over whole columns in NumPy. `postfix.run` does the same on one candidate, jitted.

Logic has three values (Kleene): what is undefined (division by zero, 0 * inf) is NaN, a comparison with NaN is NaN, and
NaN satisfies no constraint. There are no fractional powers and no transcendental functions, because the last bit of
those differs between libraries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Opcode", "Step", "Value", "arity", "run_columns", "text_code"]

Array = NDArray[np.float64]
"""Numbers `[N]`, or a single one."""

Value = object
"""What a caller gives for a variable: a number, a text, or an array of either."""


class Opcode(IntEnum):
    """Steps of a postfix program. PUSH and LOAD take an operand: a number, and the index of a variable."""

    PUSH = 0
    LOAD = 1
    ADD = 2
    SUBTRACT = 3
    MULTIPLY = 4
    DIVIDE = 5
    FLOOR_DIVIDE = 6
    MODULO = 7
    POWER = 8  # operand: the exponent, a natural number
    NEGATE = 9
    ABS = 10
    MIN = 11
    MAX = 12
    LESS = 13
    LESS_EQUAL = 14
    GREATER = 15
    GREATER_EQUAL = 16
    EQUAL = 17
    NOT_EQUAL = 18
    AND = 19
    OR = 20
    NOT = 21


Step = tuple[Opcode, float | str]
"""An opcode and its operand; LOAD's is the variable's name."""

_UNARY = frozenset({Opcode.NEGATE, Opcode.ABS, Opcode.NOT, Opcode.POWER})


def arity(code: Opcode) -> int:
    """Numbers that a step takes from the stack; each leaves one."""
    return 0 if code in (Opcode.PUSH, Opcode.LOAD) else 1 if code in _UNARY else 2


def text_code(text: str) -> float:
    """The number that stands for a text in a program: 48 bits of its hash, exact in a float."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))


def run_columns(steps: Sequence[Step], values: Mapping[str, Value]) -> Array:
    """Runs a program in NumPy. `postfix.run` does the same operations in the same order."""
    stack: list[Array] = []
    with np.errstate(all="ignore"):
        for code, operand in steps:
            if code is Opcode.PUSH:
                stack.append(np.asarray(operand, dtype=np.float64))
            elif code is Opcode.LOAD:
                stack.append(_numbers(values[str(operand)]))
            elif code in _UNARY:
                stack.append(_apply_unary(code, stack.pop(), int(operand)))
            else:
                right = stack.pop()
                stack.append(_apply_binary(code, stack.pop(), right))
    (result,) = stack
    return result


def _numbers(value: Value) -> Array:
    """Numbers as float64, texts as their codes."""
    array = np.asarray(value.value if isinstance(value, Enum) else value)
    if array.dtype.kind in "OUST":
        return np.array([text_code(str(item)) for item in array.ravel()]).reshape(array.shape)
    return array.astype(np.float64)


def _apply_unary(code: Opcode, a: Array, exponent: int) -> Array:
    match code:
        case Opcode.NEGATE:
            return -a
        case Opcode.ABS:
            return np.abs(a)
        case Opcode.NOT:
            return np.where(np.isnan(a), np.nan, np.where(a == 0.0, 1.0, 0.0))
        case _:
            return _power(a, exponent)


def _power(a: Array, exponent: int) -> Array:
    """Repeated squaring: the same bits everywhere, which pow() does not promise."""
    result: Array = np.ones_like(a)
    while exponent:
        if exponent & 1:
            result = result * a
        a = a * a
        exponent >>= 1
    return result


def _apply_binary(code: Opcode, a: Array, b: Array) -> Array:
    match code:
        case Opcode.ADD:
            return a + b
        case Opcode.SUBTRACT:
            return a - b
        case Opcode.MULTIPLY:
            return a * b
        case Opcode.DIVIDE:
            return np.where(b == 0.0, np.nan, a / b)
        case Opcode.MODULO:
            return _modulo(a, b)
        case Opcode.FLOOR_DIVIDE:
            return np.rint((a - _modulo(a, b)) / b)
        case Opcode.MIN:
            return np.where(np.isnan(a) | (a < b), a, b)
        case Opcode.MAX:
            return np.where(np.isnan(a) | (a > b), a, b)
        case Opcode.AND:
            return np.where((a == 0.0) | (b == 0.0), 0.0, _defined(a, b, 1.0))
        case Opcode.OR:
            return np.where(_true(a) | _true(b), 1.0, _defined(a, b, 0.0))
        case _:
            return _defined(a, b, np.where(_COMPARE[code](a, b), 1.0, 0.0))


_COMPARE: dict[Opcode, np.ufunc] = {
    Opcode.LESS: np.less, Opcode.LESS_EQUAL: np.less_equal, Opcode.GREATER: np.greater,
    Opcode.GREATER_EQUAL: np.greater_equal, Opcode.EQUAL: np.equal, Opcode.NOT_EQUAL: np.not_equal,
}  # fmt: skip


def _true(a: Array) -> NDArray[np.bool_]:
    true: NDArray[np.bool_] = (a != 0.0) & ~np.isnan(a)
    return true


def _defined(a: Array, b: Array, value: Array | float) -> Array:
    """`value` where both operands are defined, else NaN."""
    return np.where(np.isnan(a) | np.isnan(b), np.nan, value)


def _modulo(a: Array, b: Array) -> Array:
    """The remainder with the divisor's sign; fmod is exact, so every library gives these bits. NaN at b = 0."""
    rest = np.fmod(a, b)
    return np.where((rest != 0.0) & ((rest < 0.0) != (b < 0.0)), rest + b, rest)
