"""Operators, collectives and training steps are really run here, on a CPU, in one process and in two."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from capture import samples
from capture.bench import HEADERS, measure, pilot
from capture.device import open_device
from capture.measure_plan import COLLECTIVES, STREAMS, Attention, Plan, Product, Stream, Traffic
from capture.ranks import in_ranks
from capture.step import Task, num_parameters, run_steps
from estimator.model import ModelSpec

PLAN = {"kind": "cpu", "expected_s": 1.0, "products": (), "attentions": (), "streams": (), "traffic": ()}
TINY = ModelSpec(name="tiny", num_layers=2, hidden=64, ffn=128, num_heads=2, num_kv_heads=2, head_dim=32, vocab=256)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What others do to this machine is not what is tested here: no waiting for them, and no thread that they stop."""
    monkeypatch.setattr(samples, "PATIENCE_S", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cpu():
    return open_device("cpu", None)


def counted(found, table):
    return len(found.rows.get(table, [])) + found.distrusted.get(table, 0)


def test_every_operator_of_a_plan_becomes_a_row_or_is_counted_as_not_trusted(cpu):
    products = tuple(Product(dtype=d, m=256, n=512, k=512, layout=way)
                     for d in ("fp32", "bf16") for way in ("nt", "nn", "tn"))  # fmt: skip
    streams = tuple(Stream(dtype="fp32", op=op, nbytes=STREAMS[op] * 2**18) for op in STREAMS)
    attentions = (Attention(dtype="fp32", batch=1, seq=256, heads=2, head_dim=64),)
    plan = Plan(**PLAN | {"products": products, "streams": streams, "attentions": attentions}, seconds=60.0,
                talking_s=0.0)  # fmt: skip
    found = measure(cpu, plan)
    assert {table: counted(found, table) for table in ("gemm", "attention", "streams")} == {
        "gemm": 6, "attention": 2, "streams": 5,
    }  # fmt: skip
    for table, rows in found.rows.items():
        for row in rows:
            assert len(row) == len(HEADERS[table])
            told = dict(zip(HEADERS[table], row, strict=True))
            assert 0.1 < told["latency_us"] < 1e6
    assert found.not_reached == 0


def test_a_plan_whose_seconds_are_over_measures_no_more(cpu):
    plan = Plan(**PLAN | {"products": (Product(dtype="fp32", m=256, n=512, k=512, layout="nt"),) * 3}, seconds=1e-9,
                talking_s=0.0)  # fmt: skip
    found = measure(cpu, plan)
    assert found.rows == {}
    assert found.not_reached == 3


def test_a_pilot_knows_the_device_to_an_order_of_magnitude(cpu):
    told = pilot(cpu, ["fp32"])
    assert 1e9 < told.flops_per_s["fp32"] < 1e14
    assert 1e8 < told.bytes_per_s < 1e12


@pytest.mark.slow
def test_collectives_run_between_two_processes(cpu):
    traffic = tuple(Traffic(collective=c, nbytes=2**18, ranks=2) for c in COLLECTIVES)
    found = measure(cpu, Plan(**PLAN | {"traffic": traffic}, seconds=25.0, talking_s=25.0))
    assert counted(found, "collectives") + len(found.unsupported) + found.not_reached == len(COLLECTIVES)
    assert counted(found, "collectives") >= 1  # on a machine that others use, a sample waits for them
    assert {text.partition(":")[0] for text in found.unsupported} <= {"reduce_scatter", "all_to_all"}  # of old gloo


def test_a_rank_that_dies_is_told_in_one_line():
    with pytest.raises(ValueError, match="rank 1 of 2 died"):
        in_ranks(os._exit, ranks=2, kind="cpu", threads=1, limit_s=60.0)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dtype"), [(1, "fp32"), (1, "bf16"), (2, "fp32")])
def test_a_small_model_trains_in_one_process_and_in_two(cpu, ranks, dtype):
    task = Task(name="tiny", model=TINY, seq=32, batch=2, dtype=dtype)
    timed = run_steps(task, replace(cpu, ranks=ranks))
    assert set(timed.parts) == {"forward", "backward", "optimizer"}
    assert 0 < sum(timed.parts.values()) < 60
    assert timed.step.seconds > 0


def test_a_model_that_cannot_be_run_is_refused():
    odd = ModelSpec(name="odd", num_layers=1, hidden=64, ffn=128, num_heads=2, num_kv_heads=1, head_dim=32, vocab=256)
    with pytest.raises(ValueError, match="odd: a checked model has plain attention"):
        num_parameters(odd, 32)
