"""Modules that are computed again run before their backward pass, and what did before no longer does."""

from __future__ import annotations

import numpy as np
import pytest

from capture.traces.recomputed import recomputed
from capture.traces.synthesise import Bucket, Gradient, Job
from estimator.tasks import Category

NAMES = ("FW.0", "FW.1.up", "FW.1.down", "FW.loss", "BW.1.down.weight", "BW.1.up.weight", "BW.0.weight", "UPD")
KINDS = (*[Category.FORWARD] * 4, *[Category.BACKWARD] * 3, Category.OPTIMIZER)


def job():
    seconds = np.arange(1.0, 9.0)
    gradients = tuple(Gradient(name=NAMES[k][3:], nbytes=4.0, op=k) for k in (4, 5, 6))
    return Job(names=NAMES, category=KINDS, seconds=np.stack([seconds, 2 * seconds]), lag_s=np.zeros((2, 8)),
               release_s=np.zeros(2), waits=7, gradients=gradients)  # fmt: skip


CUT = [Bucket(nbytes=8.0, op=5, names=("a",)), Bucket(nbytes=4.0, op=6, names=("b",))]


def test_a_module_runs_again_before_its_backward_but_for_its_last_operation():
    made, cut = recomputed(job(), CUT, ["1"])
    assert made.names == (*NAMES[:4], "BW.again.1.up", *NAMES[4:])
    assert made.category[4] is Category.RECOMPUTE
    assert made.seconds.tolist() == [[1, 2, 3, 4, 2, 5, 6, 7, 8], [2, 4, 6, 8, 4, 10, 12, 14, 16]]
    assert made.waits == 8
    assert [g.op for g in made.gradients] == [5, 6, 7]
    assert [b.op for b in cut] == [6, 7]


def test_what_was_computed_again_need_not_be():
    again, cut = recomputed(job(), CUT, ["1"])
    made, back = recomputed(again, cut, [])
    assert made.names == NAMES
    assert (made.seconds == job().seconds).all()
    assert back == CUT
    assert recomputed(again, cut, ["1"])[0].names == again.names


def test_a_module_of_one_operation_saves_nothing_by_running_again():
    assert recomputed(job(), CUT, ["0"])[0].names == NAMES


@pytest.mark.parametrize("module", ["2", "loss", "1.u"])
def test_a_module_that_is_not_there_is_refused_with_those_that_are(module):
    with pytest.raises(ValueError, match=f"but '{module}' has not; have 0, 1, loss"):
        recomputed(job(), CUT, [module])
