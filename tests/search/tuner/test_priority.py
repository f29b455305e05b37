"""Servers that let the next forward pass begin layer by layer: by hand, and against waiting for all gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from capture.traces.records import Topology
from capture.traces.synthesise import Gradient, Job, Link, Wire
from estimator.tasks import Category
from search.tuner.decisions import apart
from search.tuner.judge import Judge, SpeedUps
from search.tuner.priority import layered_s, needs
from search.tuner.subject import MANY
from tests.search.tuner.jobs import drawn, job, subject, wire

SERVED = Wire(topology=Topology.PARAMETER_SERVER, link=Link(bytes_per_s=1.0), lanes=MANY)


def by_hand(sizes=(1.0, 1.0)):
    """FW a, b of 1 s each; BW b, a of 1 s each; one worker, so that a byte takes a second in and one out."""
    kinds = (Category.FORWARD, Category.FORWARD, Category.BACKWARD, Category.BACKWARD, Category.OPTIMIZER)
    gradients = (Gradient(name="b", nbytes=sizes[1], op=2), Gradient(name="a", nbytes=sizes[0], op=3))
    return Job(
        names=("FW.a", "FW.b", "BW.b", "BW.a", "UPD"), category=kinds, seconds=np.array([[1.0, 1.0, 1.0, 1.0, 0.0]]),
        lag_s=np.zeros((1, 5)), release_s=np.zeros(1), waits=4, gradients=gradients, saves_s=np.full(5, np.nan),
    )  # fmt: skip


def test_what_the_first_layer_needs_passes_what_the_last_does():
    made = by_hand(sizes=(1.0, 4.0))
    judge = Judge(subject(made, SERVED), SpeedUps())
    parts = replace(apart(made), part_bytes=1.0)
    # b is made at 1 in 4 parts, a at 2. Without priorities a is pushed last, from 5 to 6, and is back at 7.
    assert layered_s(judge, parts, priority=False) == pytest.approx(7 + 2)
    # With them a is pushed from 2 to 3 and back at 4, FW a runs until 5, b is back at 7.
    assert layered_s(judge, parts, priority=True) == pytest.approx(7 + 1)


def test_first_come_first_served_takes_as_long_as_waiting_for_all():
    for seed in range(6):
        made = job(seed, layers=6, silent=0.0)
        judge = Judge(subject(made, wire(Topology.PARAMETER_SERVER, servers=3)), SpeedUps())
        held = drawn(made, seed, part_bytes=2e6)
        held = replace(held, ops=np.zeros_like(held.ops))
        fifo, first = (layered_s(judge, held, priority=priority) for priority in (False, True))
        assert fifo <= judge.seconds(held) * (1 + 1e-12)
        assert first <= fifo * 1.02  # priorities are greedy: a part that does not give way may cost a little


def test_where_modules_do_not_match_nothing_is_said():
    made = by_hand()
    strange = replace(made, names=("FW.x", "FW.y", "BW.b", "BW.a", "UPD"))
    assert needs(strange) is None
    assert needs(made).tolist() == [1, 0]
    assert layered_s(Judge(subject(strange, SERVED), SpeedUps()), apart(strange), priority=True) is None
    assert layered_s(Judge(subject(made, wire()), SpeedUps()), apart(made), priority=True) is None
