# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Walks a compiled order (program.py) with the seconds of WIDTH candidates in lanes."""

from __future__ import annotations

from typing import Final

from estimator.jit import kernel
from estimator.lanes import larger, load, put, splat

__all__ = ["RETURN", "program_rows", "walk"]

NEVER: Final = -1e300
"""When an input is there that nobody waits for."""
RETURN: Final = 3
"""Micro-batches over which a path may come back to its rank: program.py has the steps of as many."""


@kernel
def walk(program, seconds, hop, p, m, x):
    """Makespans. `seconds` [PASSES C]: f, b, w, alone f, alone b; scratch x [program_rows(program)]."""
    sums = program.sums
    left = float(m - program.walked)
    for i in range(program.rows, program.rows + program.num_costs):
        put(x, i, splat(0.0))
    for n in range(sums.shape[0]):
        at = sums[n, 0]
        value = load(seconds, sums[n, 1])
        put(x, at, load(x, at) + (value if sums[n, 2] == 0 else left * value))
    if program.around.shape[0] > 0:
        share = left / float(RETURN)
        for i in range(p):
            _set(x, program.rows, NEVER)
            put(x, i, splat(0.0))
            _run(program.around[program.between[i, 0] : program.between[i, 1]], hop, x)
            cut = program.rows + i
            put(x, cut, larger(load(x, cut), share * load(x, i)))
    _set(x, program.rows, 0.0)
    put(x, p, splat(NEVER))
    _run(program.steps, hop, x)
    span = splat(0.0)
    for i in range(p):
        span = larger(span, load(x, i))
    return span


@kernel
def _set(x, rows, value):
    for i in range(rows):
        put(x, i, splat(value))


@kernel
def _run(steps, hop, x):
    """Every step: its rank goes on once it is free and the inputs are there."""
    for n in range(steps.shape[0]):
        rank = steps[n, 0]
        ready = larger(load(x, steps[n, 2]), load(x, steps[n, 3])) + hop
        end = larger(load(x, rank), ready) + load(x, steps[n, 1])
        put(x, steps[n, 4], end)
        put(x, rank, end + load(x, steps[n, 5]))


@kernel
def program_rows(program):
    """Rows of lanes that a walk needs."""
    return program.rows + program.num_costs
