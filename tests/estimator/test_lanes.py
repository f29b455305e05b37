"""Eight pipelines at a time give the bits of each alone."""

import numpy as np
import pytest
from numba import njit

from estimator.lanes import WIDTH, put
from estimator.program import has_program, program
from estimator.schedule import check_conditions
from estimator.span import pipeline_span, pipeline_spans, scratch_rows
from estimator.span_codes import CODES
from estimator.span_program import program_rows, walk
from estimator.strategy import Schedule

SHAPES = [(1, 1, 4), (2, 1, 4), (4, 1, 8), (8, 1, 64), (16, 1, 40), (4, 2, 8), (8, 3, 32), (16, 2, 64)]


@njit
def eight_at_once(code, f, b, w, lone_f, lone_b, hop, p, v, m, x, out):
    put(out, 0, pipeline_spans(code, f, b, w, lone_f, lone_b, hop, p, v, m, x))


@njit
def eight_walked(made, seconds, hop, p, m, x, out):
    put(out, 0, walk(made, seconds, hop, p, m, x))


@pytest.mark.parametrize("schedule", Schedule)
def test_every_lane_is_the_scalar_bit_for_bit(schedule):
    draw, met = np.random.default_rng(7), 0
    for p, v, m in SHAPES:
        if check_conditions(schedule, p, m, v) is not None:
            continue
        met += 1
        for hop in (0.0, 0.07):
            f, b, w, lone_f, lone_b = (draw.uniform(0.5, 2.0, (p * v, WIDTH)) for _ in range(5))
            out = np.empty((1, WIDTH))
            made = program(schedule, p, v, m)
            x = np.empty((max(scratch_rows(p), program_rows(made)), WIDTH))
            if has_program(schedule, p):
                eight_walked(made, np.concatenate([f, b, w, lone_f, lone_b]), hop, p, m, x, out)
            else:
                eight_at_once(CODES[schedule], f, b, w, lone_f, lone_b, hop, p, v, m, x, out)
            alone = [
                pipeline_span(schedule, *times[:3], hop, p, v, m, *times[3:])
                for times in (
                    [np.ascontiguousarray(t[:, lane]) for t in (f, b, w, lone_f, lone_b)] for lane in range(WIDTH)
                )
            ]
            assert out[0].tolist() == alone, (schedule, p, v, m, hop)
    assert met
