"""`search trace align` and `search trace replay`: from imported files to answers."""

from __future__ import annotations

import json

import pytest

from capture.traces.pairing import pair
from capture.traces.trace_file import read_traces, write_traces
from search.cli import main
from tests.capture.traces.made import fine, shifted
from tests.capture.traces.test_dfg import ddp

INJECTED = (0.0, 0.041, -0.05, 0.017)


def told(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def job(tmp_path):
    """A file of the job of tests/capture/traces/test_dfg.py."""
    path = tmp_path / "job.dfg"
    traces = ddp(late_s=0.5)
    write_traces(path, traces, pair(traces))
    return path


def test_a_replay_tells_measured_beside_replayed_and_where_time_went(job, capsys):
    data = told(capsys, "trace", "replay", str(job))
    assert data["measured_s"] == pytest.approx(13.5)
    assert data["error"] == pytest.approx(0.0, abs=1e-9)
    assert data["shown"]["critical_path_s"]["dp"] == pytest.approx(8.0)
    first = data["shown"]["ranks"][0]
    assert first["compute_s"] + first["non_compute_s"] + first["idle_s"] == pytest.approx(13.5)
    assert {"waits_s", "overlap_share"} <= first.keys()
    assert main(["trace", "replay", str(job)]) == 0
    out = capsys.readouterr().out
    assert "replayed  13.5 s" in out
    assert "critical path" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_replay_writes_a_trace_that_perfetto_opens(job, capsys, tmp_path):
    path = tmp_path / "job.json.gz"
    assert told(capsys, "trace", "replay", str(job), "--trace", str(path))["trace"] == str(path)
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert main(["trace", "replay", str(job), "--trace", str(other)]) == 2
    assert "holds something else" in capsys.readouterr().err


def test_clocks_that_were_moved_are_moved_back(shared, tmp_path, capsys):
    raw, aligned = tmp_path / "raw.dfg", tmp_path / "aligned.dfg"
    traces = shifted(fine(shared, "ring4_400mbit", 4), INJECTED)
    write_traces(raw, traces, pair(traces))
    data = told(capsys, "trace", "align", str(raw), "-o", str(aligned))
    for node, injected in zip(data["nodes"], INJECTED, strict=True):
        assert node["offset_s"] == pytest.approx(-injected, abs=100e-6)
        assert node["low_s"] <= node["offset_s"] <= node["high_s"]
    assert told(capsys, "trace", "replay", str(aligned))["measured_s"] == pytest.approx(0.4522, rel=0.002)
    again = told(capsys, "trace", "align", str(aligned))
    assert all(abs(node["offset_s"]) < 1e-6 for node in again["nodes"])
    assert any("moved by" in note for note in read_traces(aligned).traces[1].notices)
    assert main(["trace", "align", str(raw), "-o", str(aligned)]) == 2
    assert "must not exist yet" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["align", "replay"])
def test_a_job_that_lacks_ranks_is_refused_in_one_line_with_the_file(command, tmp_path, capsys):
    path = tmp_path / "half.dfg"
    write_traces(path, ddp()[:1], pair(ddp()[:1]))
    assert main(["trace", command, str(path)]) == 2
    err = capsys.readouterr().err
    assert str(path) in err
    assert "1" in err.partition("missing")[0]
    assert err.count("\n") == 1
