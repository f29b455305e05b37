"""In which order two passes side by side launch their kernels."""

from __future__ import annotations

import numpy as np

from estimator.detail.script import Lane, Script
from estimator.detail.traffic import Transfer
from estimator.detail.turns import turns
from estimator.tasks import Category, Shield


def script(*parts):
    """Kernels (a number of seconds) and exchanges that the partner is to hide (a pair of brackets round it)."""
    made = Script(num_links=1)
    for part in parts:
        if isinstance(part, list):
            what = Transfer(part[0], np.zeros(1), 0.0)
            made.transfer("exchange", Lane.EP, what, Category.EP, Shield.PARTNER)
        else:
            made.compute("kernel", part, Category.FORWARD)
    return made


def test_a_pass_computes_while_the_other_waits_for_its_exchange():
    a, b = script(1.0, [2.0], 1.0), script(1.0, 1.0, 1.0)
    assert turns((a, b)) == [(0, 0, 0), (1, 0, 1), (0, 2, 2), (1, 2, 2)]


def test_of_two_that_can_compute_the_one_with_more_left_does():
    assert turns((script(1.0, 0.5), script(3.0, 1.0))) == [(1, 0, 0), (0, 0, 0), (1, 1, 1), (0, 1, 1)]


def test_exchanges_of_both_follow_one_another():
    # Both send at once; the second exchange waits for the first, and its pass for it.
    a, b = script([2.0], 1.0), script([2.0], 9.0)
    assert turns((a, b)) == [(0, 1, 1), (1, 1, 1)]
    assert turns((b, a)) == [(0, 1, 1), (1, 1, 1)]


def test_an_exchange_that_nobody_hides_is_part_of_no_plan():
    made = script(1.0)
    made.transfer("gather", Lane.TP, Transfer(1.0, np.zeros(1), 0.0), Category.TP, Shield.NOTHING)
    made.compute("kernel", 1.0, Category.FORWARD)
    assert turns((made, script())) == [(0, 0, 2)]
