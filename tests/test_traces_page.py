"""docs/traces.md: its examples run, its figures are what comes out."""

from __future__ import annotations

import re
import shlex

import pytest

from capture.align import align, moved
from capture.traces.dfg import build
from capture.traces.recognise import read_all
from capture.traces.replay import replay_trace
from capture.traces.what_if import Change, predict
from search.cli import main

MIB = 2**20
JOBS = {
    "ring4_400mbit": "fine_ring/ring4_400mbit_*", "ddp2_1gbit_b1": "fine_ring/ddp2_1gbit_b1_*",
    "ddp2_1gbit_b4": "fine_ring/ddp2_1gbit_b4_*", "ddp2_1gbit_b25": "fine_ring/ddp2_1gbit_b25_*",
    "kineto_gloo": "kineto_gloo/*.gz", "dlrm_kineto": "param/dlrm_kineto.tar.gz",
}  # fmt: skip


@pytest.fixture
def page(root):
    return (root / "docs" / "traces.md").read_text(encoding="utf-8")


@pytest.fixture
def job(shared):
    return lambda name: build(read_all(sorted((shared / "traces").glob(JOBS[name]))))


def test_the_examples_of_replaying_run(page, shared, tmp_path, monkeypatch, capsys):
    wanted = ("search trace align", "search trace tune")
    blocks = [b for b in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if any(word in b for word in wanted)]
    monkeypatch.chdir(tmp_path)
    ran = 0
    for line in "".join(blocks).splitlines():
        words = shlex.split(line)[1:]
        files = [
            sorted(shared.glob(w.removeprefix("../shared/"))) if w.startswith("../shared/") else [w] for w in words
        ]
        assert main([str(word) for found in files for word in found]) == 0, line
        ran += 1
    assert ran >= 11
    assert "what if" in capsys.readouterr().out


@pytest.mark.parametrize("name", JOBS)
def test_the_page_tells_what_replays_come_to(page, shared, name):
    traces = read_all(sorted((shared / "traces").glob(JOBS[name])))
    dfg = build(moved(traces, align(traces)))
    done, bare = replay_trace(dfg), replay_trace(dfg.without_lags())
    mean, spread = done.measured_s.mean() * 1e3, done.measured_s.std() * 1e3
    took = f"{mean:.1f} ± {spread:.1f} ms" if len(done.iterations) > 1 else f"{mean:.1f} ms"
    row = f"| `{name}` | {len(dfg.ranks)} | {len(done.iterations)} | {took} | {done.mean_error + 0.0:+.2%} "
    row += f"| {bare.mean_error:+.2%} |"
    assert row.replace("%", " %") in page.replace("-0.00 %", "+0.00 %")


def test_the_page_tells_what_other_buckets_come_to(page, job):
    runs = {size: job(f"ddp2_1gbit_b{size}") for size in (1, 4, 25)}
    for recorded, run in runs.items():
        cells = []
        for size, other in runs.items():
            found, took = predict(run, Change(bucket_bytes=size * MIB)), other.iteration_s().mean()
            ours, plain = found.seconds.mean() / took - 1.0, found.size_over_bandwidth_s.mean() / took - 1.0
            cells.append(f"{ours:+.1%} ({plain:+.1%})")
        assert f"| {recorded} MiB | {' | '.join(cells)} |".replace("%", " %") in page


def test_the_page_tells_what_the_same_ring_comes_to(page, job):
    dfg = job("ring4_400mbit")
    found, took = predict(dfg, Change()), dfg.iteration_s().mean()
    ours, plain = found.seconds.mean() / took - 1.0, found.size_over_bandwidth_s.mean() / took - 1.0
    assert f"synthesised as it is: {ours:+.1%} ({plain:+.1%})".replace("%", " %") in page
