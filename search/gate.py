# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Constraints on one candidate, jitted: the columns that follow from its step time and memory, and their programs."""

from __future__ import annotations

import numpy as np

from estimator.jit import kernel, njit
from estimator.memory import RESERVED_FACTOR
from search.parts import NUM_DERIVED
from search.postfix import run

__all__ = ["derive", "passes", "set_options"]


@kernel
def derive(f, c, step, memory):
    """Fill DERIVED; the operations are those of estimator/step.py: columns_of."""
    tokens, chips, per_chip, bf16, price, power, co2 = f.scale
    v = f.values
    v[0] = step
    v[1] = tokens / step
    v[2] = tokens / chips / step
    v[3] = per_chip / step / 1e12
    v[4] = per_chip / (step * bf16)
    v[5] = price * step / tokens * 1e6
    v[6] = power * step / tokens
    v[7] = co2 * step / tokens * 1e6
    v[8] = memory
    v[9] = memory * RESERVED_FACTOR
    v[10] = memory * RESERVED_FACTOR + c.context_bytes
    v[11] = chips
    v[12] = c.fixed_host_s


@kernel
def passes(f):
    """Whether all constraints hold for `values`."""
    start = 0
    for i in range(f.ends.size):
        if run(f.opcodes[start : f.ends[i]], f.operands[start : f.ends[i]], f.values, f.stack) != 1.0:
            return False
        start = f.ends[i]
    return True


@njit(cache=True)
def set_options(f, i, variant, keep, replicas, options, o, layers, z, tp, ep, pp, dp, bucket):
    """Write OPTION_VALUES, the structure's own values and those of its variant behind the derived columns."""
    v, start = f.values, NUM_DERIVED
    v[start : start + 7] = np.array([layers * 1.0, z * 1.0, tp * 1.0, ep * 1.0, pp * 1.0, dp * 1.0, bucket])
    v[start + 7] = options.plain_codes[o] if o < options.plain_codes.size else options.block_code
    v[start + 8] = replicas if z > 0 else 1.0  # ZeRO-0 does not see them
    v[start + 9], v[start + 10] = keep.reshard, keep.prefetch
    v[start + 11], v[start + 12] = keep.activations, keep.parameters
    v[start + 13], v[start + 14] = keep.gradients, keep.states
    start += 15
    for j in range(f.own.shape[1]):
        v[start + j] = f.own[i, j]
    start += f.own.shape[1]
    for j in range(f.of_variant.shape[1]):
        v[start + j] = f.of_variant[variant, j]
