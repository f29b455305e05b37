"""`search trace align` and `search trace replay`: from imported files to answers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from capture.traces.pairing import pair
from capture.traces.trace_file import read_traces, write_traces
from search.cli import main
from tests.capture.traces.made import compute, fine, shifted, trace
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
    data = told(capsys, "trace", "replay", str(aligned))
    assert data["measured_s"] == pytest.approx(0.4522, rel=0.002)
    assert -0.05 < data["order_alone_error"] < -0.01  # hosts take some of the time
    again = told(capsys, "trace", "align", str(aligned))
    assert all(abs(node["offset_s"]) < 1e-6 for node in again["nodes"])
    assert any("moved by" in note for note in read_traces(aligned).traces[1].notices)
    assert main(["trace", "align", str(raw), "-o", str(aligned)]) == 2
    assert "must not replace a file that exists; give another name, or remove it" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["align", "replay"])
def test_a_job_that_lacks_ranks_is_refused_in_one_line_with_the_file(command, tmp_path, capsys):
    path = tmp_path / "half.dfg"
    write_traces(path, ddp()[:1], pair(ddp()[:1]))
    assert main(["trace", command, str(path)]) == 2
    err = capsys.readouterr().err
    assert str(path) in err
    assert "1" in err.partition("missing")[0]
    assert err.count("\n") == 1


@pytest.fixture
def buckets(shared, tmp_path):
    """Files of the shipped runs with buckets of 4 and of 25 MB."""
    paths = []
    for name in ("b4", "b25"):
        traces = fine(shared, f"ddp2_1gbit_{name}", 2)
        paths.append(tmp_path / f"{name}.dfg")
        write_traces(paths[-1], traces, pair(traces))
    return [str(path) for path in paths]


def test_a_what_if_is_told_beside_the_same_job_and_the_baseline(buckets, capsys, tmp_path):
    path = tmp_path / "changed.json"
    what = "bucket_bytes=26214400,topology=ring"
    data = told(capsys, "trace", "replay", buckets[0], "--what-if", what, "--trace", str(path))
    change = data["change"]
    assert change["predicted_s"] == pytest.approx(0.312, rel=0.10)  # the run with these buckets took 311 ms
    assert change["synthesised_as_is_s"] == pytest.approx(data["measured_s"], rel=0.02)
    assert change["size_over_bandwidth_s"] > 0
    assert json.loads(path.read_text())["otherData"]["what"] == what
    assert main(["trace", "replay", buckets[0], "--what-if", "bandwidth=2"]) == 0
    assert "what if   bandwidth=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("bucket=2", "did you mean bucket_bytes?"),
        ("bandwidth", "--what-if takes KEY=VALUE with commas between"),
        ("topology=star", "--what-if topology must be ring, tree, hierarchical or parameter_server, but is 'star'"),
        ("topology=unknown", "must be one of ring, tree, hierarchical, parameter_server to be synthesised"),
        ("workers=0", "--what-if workers must be a whole number of at least 1, but is '0'"),
        ("bandwidth=0", "bandwidth must be at least 1e-06 and at most 1e+06 times as fast, but is 0.0"),
        ("bandwidth=nan", "bandwidth must be at least 1e-06"),
        ("bandwidth=inf", "bandwidth must be at least 1e-06"),
        ("compute=1e-300", "compute must be at least 1e-06"),
        ("latency_s=-1", "latency_s must be at least 0 and at most 1000 s, but is -1.0; leave it out"),
        ("bucket_bytes=0", "bucket_bytes must be at least 1, but is 0.0"),
        ("topology=tree,part_bytes=1e-320", "part_bytes must be at least 1"),
        ("bandwidth=2,bandwidth=3", "takes each key once, but bandwidth stands twice"),
        ("servers=2", "servers says nothing of a topology ring; add topology=parameter_server, or leave it out"),
        ("part_bytes=1e6", "part_bytes says nothing of a topology ring; add topology=tree or"),
        ("workers=1000000", "workers must be at least 1 and at most 100000"),
        ("workers=100000", "must have at most 20,000,000 transfers and edges, but this has"),
        ("topology=tree,part_bytes=1", "give fewer workers, or larger bucket_bytes or part_bytes"),
        ("workers=4,topology=hierarchical,per_machine=3", r"workers (4) must be divisible by workers per machine (3)"),
    ],
)
def test_a_what_if_that_makes_no_sense_is_refused_in_one_line(what, says, buckets, capsys):
    assert main(["trace", "replay", buckets[0], "--what-if", what]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_ranks_that_compute_differently_have_what_ifs_that_keep_their_graph(shared, tmp_path, capsys):
    job = tmp_path / "dlrm.dfg"
    assert main(["trace", "import", str(shared / "traces" / "param" / "dlrm_kineto.tar.gz"), "-o", str(job)]) == 0
    capsys.readouterr()
    data = told(capsys, "trace", "replay", str(job), "--what-if", "bandwidth=0.01")
    assert data["change"]["notices"][0].startswith("ranks compute differently: the graph is kept")
    assert data["change"]["synthesised_as_is_s"] == pytest.approx(data["measured_s"], rel=1e-3)
    assert 1.3 < data["change"]["predicted_s"] / data["measured_s"] < 1.7
    assert main(["trace", "replay", str(job), "--what-if", "workers=16"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "dlrm.dfg: a what-if of buckets, workers or topology needs ranks that compute the same" in line


def test_a_diff_of_two_runs_tells_operations_by_how_much_they_differ(buckets, capsys):
    data = told(capsys, "trace", "diff", *buckets)
    first = data["operations"][0]
    assert (first["name"], first["category"]) == ("AR.0", "dp")
    assert first["difference_s"] == pytest.approx(first["seconds_b"] - first["seconds_a"])
    assert sum(one["count_b"] for one in data["operations"] if one["name"].startswith("AR")) == 2
    same = told(capsys, "trace", "diff", buckets[0], buckets[0])
    assert {one["difference_s"] for one in same["operations"]} == {0.0}
    assert main(["trace", "diff", *buckets, "--iteration", "99"]) == 2
    assert "--iteration must be one of the trace, but is 99; have 0 to 14" in capsys.readouterr().err


def test_a_simulated_step_is_held_against_a_measured_one(job, capsys):
    data = told(capsys, "trace", "diff", str(job), "llama3_8b_small", "--reference", "fully_sharded")
    assert data["a"]["about"].startswith("measured")
    assert data["b"]["about"].startswith("simulated")
    for side in (data["a"], data["b"]):
        assert side["compute_s"] + side["non_compute_s"] + side["idle_s"] == pytest.approx(side["span_s"])
    assert any(one["count_a"] == 0.0 for one in data["operations"])
    assert main(["trace", "diff", str(job), "llama3_8b_small", "--reference", "fully_sharded", "--top", "3"]) == 0
    assert "of a rank on average" in capsys.readouterr().out


def test_of_one_rank_of_many_a_diff_still_compares(tmp_path, capsys):
    path = tmp_path / "one.dfg"
    write_traces(path, ddp()[:1], pair(ddp()[:1]))
    assert told(capsys, "trace", "diff", str(path), str(path))["a"]["span_s"] == pytest.approx(13.0)


def test_what_was_measured_is_looked_at_without_the_other_ranks(tmp_path, capsys):
    path, picture = tmp_path / "one.dfg", tmp_path / "one.json"
    write_traces(path, ddp()[1:], pair(ddp()[1:]))
    data = told(capsys, "trace", "replay", str(path), "--measured", "--trace", str(picture))
    assert data["about"] == "measured, iteration 0, 1 of 2 ranks"
    assert data["ranks"][0]["compute_s"] == pytest.approx(6.0)
    assert data["ranks"][0]["non_compute_s"] == pytest.approx(7.0)
    assert picture.exists()
    assert main(["trace", "replay", str(path), "--measured"]) == 0
    assert "measured, iteration 0" in capsys.readouterr().out
    for words in (["--measured", "--iteration", "7"], ["--iteration", "0"], ["--measured", "--what-if", "bandwidth=2"]):
        assert main(["trace", "replay", str(path), *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["nccl_data.json.gz", "trace_diff_control_rank3of8.json.gz"])
def test_one_rank_of_a_real_job_says_where_its_time_went(name, shared, tmp_path, capsys):
    path = tmp_path / "one.dfg"
    assert main(["trace", "import", str(shared / "traces" / "hta" / name), "-o", str(path)]) == 0
    capsys.readouterr()
    (rank,) = told(capsys, "trace", "replay", str(path), "--measured")["ranks"]
    data = told(capsys, "trace", "replay", str(path), "--measured")
    assert rank["compute_s"] + rank["non_compute_s"] + rank["idle_s"] == pytest.approx(data["span_s"])
    assert sum(rank["waits_s"].values()) == pytest.approx(rank["non_compute_s"] + rank["idle_s"])
    assert rank["compute_s"] > 0.0


@pytest.mark.parametrize(
    ("traces", "says"),
    [
        (
            [trace(0, [compute("A", 0.0, 1.0), compute("B", 1.0, 2.0)], world=1, edges=[(1, 0)])],
            "rank0.jsonl: 'A' of iteration 0 waits for itself in a circle",
        ),
        (
            [trace(r, [compute("FW", 0.0, 1.0, iteration=i) for i in range(1 + r)], world=2) for r in range(2)],
            "rank0.jsonl: every rank must have the same iterations",
        ),
    ],
)
def test_a_job_that_has_no_order_is_refused_with_file_and_event(traces, says, tmp_path, capsys):
    path = tmp_path / "bad.dfg"
    write_traces(path, traces, pair(traces))
    assert main(["trace", "replay", str(path)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_job_of_many_ranks_does_not_bury_its_answer_in_notes(tmp_path, capsys):
    path = tmp_path / "noted.dfg"
    traces = [replace(t, notices=tuple(f"rank {t.rank} notes {k}" for k in range(6))) for t in ddp()]
    write_traces(path, traces, pair(traces))
    assert main(["trace", "replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("note: ") == 9
    assert "note: 4 more with --json" in out
    assert len(told(capsys, "trace", "replay", str(path))["notices"]) == 12
