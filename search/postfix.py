# mypy: disallow-untyped-decorators=False
"""Runs a postfix program on one candidate, jitted. The operations and their order are those of program.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from estimator.jit import njit
from search.program import Array, Opcode

__all__ = ["run"]

PUSH = int(Opcode.PUSH)
LOAD = int(Opcode.LOAD)
ADD = int(Opcode.ADD)
SUBTRACT = int(Opcode.SUBTRACT)
MULTIPLY = int(Opcode.MULTIPLY)
DIVIDE = int(Opcode.DIVIDE)
FLOOR_DIVIDE = int(Opcode.FLOOR_DIVIDE)
MODULO = int(Opcode.MODULO)
POWER = int(Opcode.POWER)
NEGATE = int(Opcode.NEGATE)
ABS = int(Opcode.ABS)
MIN = int(Opcode.MIN)
MAX = int(Opcode.MAX)
LESS = int(Opcode.LESS)
LESS_EQUAL = int(Opcode.LESS_EQUAL)
GREATER = int(Opcode.GREATER)
GREATER_EQUAL = int(Opcode.GREATER_EQUAL)
EQUAL = int(Opcode.EQUAL)
AND = int(Opcode.AND)
OR = int(Opcode.OR)
NOT = int(Opcode.NOT)


@njit(cache=True, error_model="numpy")
def run(opcodes: NDArray[np.int64], operands: Array, values: Array, stack: Array) -> float:
    """The value of a program: of a logical one 1 (satisfied), 0 or NaN (undefined, which satisfies nothing).

    opcodes: int64 [S], operands: float64 [S], of `Expression.program`; values: [V], one per variable; stack: scratch of
    at least `Expression.stack_size`.
    """
    top = -1
    for i in range(opcodes.size):
        code = opcodes[i]
        if code == PUSH:
            top += 1
            stack[top] = operands[i]
        elif code == LOAD:
            top += 1
            stack[top] = values[int(operands[i])]
        elif code == NEGATE or code == ABS or code == NOT or code == POWER:
            stack[top] = _unary(code, stack[top], operands[i])
        else:
            top -= 1
            stack[top] = _binary(code, stack[top], stack[top + 1])
    result: float = stack[0]
    return result


@njit(cache=True, error_model="numpy")
def _unary(code: int, a: float, exponent: float) -> float:
    if code == NEGATE:
        return -a
    if code == ABS:
        return abs(a)
    if code == NOT:
        return a if a != a else 1.0 if a == 0.0 else 0.0
    result = 1.0
    left = int(exponent)
    while left:
        if left & 1:
            result = result * a
        a = a * a
        left >>= 1
    return result


@njit(cache=True, error_model="numpy")
def _modulo(a: float, b: float) -> float:
    if b == 0.0:
        return np.nan
    rest: float = np.fmod(a, b)
    if rest != 0.0 and (rest < 0.0) != (b < 0.0):
        return rest + b
    return rest


@njit(cache=True, error_model="numpy")
def _binary(code: int, a: float, b: float) -> float:
    if code == ADD:
        return a + b
    if code == SUBTRACT:
        return a - b
    if code == MULTIPLY:
        return a * b
    if code == DIVIDE:
        return np.nan if b == 0.0 else a / b
    if code == MODULO:
        return _modulo(a, b)
    if code == FLOOR_DIVIDE:
        quotient: float = np.rint((a - _modulo(a, b)) / b)
        return quotient
    if code == MIN:
        return a if a != a or a < b else b
    if code == MAX:
        return a if a != a or a > b else b
    return _logic(code, a, b)


@njit(cache=True, error_model="numpy")
def _logic(code: int, a: float, b: float) -> float:
    undefined = a != a or b != b
    if code == AND:
        return 0.0 if a == 0.0 or b == 0.0 else np.nan if undefined else 1.0
    if code == OR:
        true = (a != 0.0 and a == a) or (b != 0.0 and b == b)
        return 1.0 if true else np.nan if undefined else 0.0
    if undefined:
        return np.nan
    if code == LESS:
        return 1.0 if a < b else 0.0
    if code == LESS_EQUAL:
        return 1.0 if a <= b else 0.0
    if code == GREATER:
        return 1.0 if a > b else 0.0
    if code == GREATER_EQUAL:
        return 1.0 if a >= b else 0.0
    if code == EQUAL:
        return 1.0 if a == b else 0.0
    return 1.0 if a != b else 0.0
