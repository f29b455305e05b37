# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Eight candidates side by side: a vector type for jitted code.

A pipeline's span takes the same operations for every candidate that shares schedule, ranks and micro-batches. `Lanes`
holds one double of each of WIDTH such candidates, and `+ - * /` and `larger` act lane by lane, in the order in which
they are written: a lane gets the very bits that a scalar would. An array of lanes is a C-contiguous float64 [n, WIDTH].
"""

from __future__ import annotations

import operator
from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.extending import overload
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import lower_builtin, models, register_model

from estimator.jit import kernel

__all__ = ["WIDTH", "at_most", "below", "fill", "first", "larger", "load", "num_set", "put", "splat"]

WIDTH: Final = 8
"""Lanes: two AVX2 or one AVX-512 register, so that additions overlap."""

intrinsic: Any = numba_intrinsic  # its type would ask callers for a typing context

VECTOR = ir.VectorType(ir.DoubleType(), WIDTH)
INT64 = ir.IntType(64)


class LanesType(types.Type):
    """One double of each of WIDTH candidates."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:  # noqa: ANN401 - numba's protocol
        super().__init__(dmm, fe_type, VECTOR)


def _splat(builder, value):
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), mask)


def _address(context, builder, array_type, array, at):
    """Where the lanes of row `at` begin."""
    data = context.make_array(array_type)(context, builder, array).data
    place = builder.gep(data, [builder.mul(at, ir.Constant(INT64, WIDTH))])
    return builder.bitcast(place, VECTOR.as_pointer())


class _LaneWise(AbstractTemplate):
    """Lanes with lanes or with a float, which every lane gets."""

    def generic(self, args, kws):
        allowed = (LANES, types.float64)
        if not kws and len(args) == 2 and LANES in args and all(a in allowed for a in args):
            return signature(LANES, *args)
        return None


def _define(op, emit):
    infer_global(op)(type(f"_Lanes_{op.__name__}", (_LaneWise,), {"key": op}))

    def lower(context, builder, sig, args):
        a, b = (_splat(builder, v) if t == types.float64 else v for v, t in zip(args, sig.args, strict=True))
        return getattr(builder, emit)(a, b)

    for pair in ((LANES, LANES), (LANES, types.float64), (types.float64, LANES)):
        lower_builtin(op, *pair)(lower)


_define(operator.add, "fadd")
_define(operator.sub, "fsub")
_define(operator.mul, "fmul")
_define(operator.truediv, "fdiv")


@intrinsic
def splat(typingctx, value):
    """The same float in every lane."""

    def codegen(context, builder, sig, args):
        return _splat(builder, args[0])

    return LANES(types.float64), codegen


@intrinsic
def load(typingctx, array, at):
    """Row `at` of an array of lanes."""

    def codegen(context, builder, sig, args):
        value = builder.load(_address(context, builder, sig.args[0], *args))
        value.align = 8
        return value

    return LANES(array, types.int64), codegen


@intrinsic
def put(typingctx, array, at, value):
    """Write row `at` of an array of lanes."""

    def codegen(context, builder, sig, args):
        store = builder.store(args[2], _address(context, builder, sig.args[0], args[0], args[1]))
        store.align = 8
        return context.get_dummy_value()

    return types.void(array, types.int64, LANES), codegen


@intrinsic
def _larger(typingctx, a, b):
    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return LANES(LANES, LANES), codegen


def larger(a, b):
    """The larger of two, lane by lane (of two floats: the larger)."""
    raise TypeError("larger runs in jitted code only; call max or numpy.maximum instead")


@overload(larger)
def _larger_of(a, b):
    if a == LANES and b == LANES:
        return lambda a, b: _larger(a, b)
    if a == LANES:
        return lambda a, b: _larger(a, splat(b))
    if b == LANES:
        return lambda a, b: _larger(splat(a), b)
    return lambda a, b: max(a, b)


@intrinsic
def first(typingctx, lanes):
    """The number in lane 0."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(args[0], ir.Constant(ir.IntType(32), 0))

    return types.float64(LANES), codegen


def _mask(builder, comparison, a, b):
    bits = builder.bitcast(builder.fcmp_ordered(comparison, a, b), ir.IntType(WIDTH))
    return builder.zext(bits, INT64)


@intrinsic
def at_most(typingctx, a, b):
    """Bit i: whether lane i of a is at most that of b."""

    def codegen(context, builder, sig, args):
        return _mask(builder, "<=", *args)

    return types.int64(LANES, LANES), codegen


@intrinsic
def below(typingctx, a, b):
    """Bit i: whether lane i of a is less than that of b."""

    def codegen(context, builder, sig, args):
        return _mask(builder, "<", *args)

    return types.int64(LANES, LANES), codegen


@intrinsic
def num_set(typingctx, mask):
    """Bits that are set."""

    def codegen(context, builder, sig, args):
        return builder.ctpop(args[0])

    return types.int64(types.int64), codegen


@kernel
def fill(values, lanes):
    """Give every lane of `lanes` [n, WIDTH] the scalars `values` [n]."""
    for i in range(values.size):
        put(lanes, i, splat(values[i]))
