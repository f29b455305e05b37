"""`search trace tune`: from a file or a model's size to a table and a plan; what is refused."""

from __future__ import annotations

import json

import pytest

from capture.traces.pairing import pair
from capture.traces.trace_file import write_traces
from estimator.tuning import read_plan
from search.cli import main
from tests.capture.traces.made import compute, fine, trace
from tests.capture.traces.test_dfg import ddp


def told(capsys, *words):
    assert main(["trace", "tune", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def job(shared, tmp_path):
    """A file of the shipped run with buckets of 25 MB."""
    path = tmp_path / "b25.dfg"
    traces = fine(shared, "ddp2_1gbit_b25", 2)
    write_traces(path, traces, pair(traces))
    return str(path)


def test_a_measured_job_is_tuned_and_its_plan_is_read_back_and_used(job, tmp_path, capsys):
    path = tmp_path / "plan.json"
    data = told(capsys, job, "-o", str(path))
    rows = {row["name"]: row for row in data["rows"]}
    assert {"as recorded", "no fusion", "DDP (25 MiB)", "Horovod autotune", "tuned"} <= rows.keys()
    assert all(rows["tuned"]["iteration_s"] <= row["iteration_s"] for row in rows.values())
    assert rows["as recorded"]["iteration_s"] == pytest.approx(0.311, rel=0.02)  # as measured
    assert len(rows["tuned"]["iterations_s"]) == 15
    plan = read_plan(path)
    assert plan.before.p10_s < plan.before.p90_s
    assert plan.graph == data["graph"]
    assert {"11.fc.weight", "0.ln.bias"} <= {name for bucket in plan.buckets for name in bucket.tensors}
    again = told(capsys, job, "--plan", str(path))
    given = next(row for row in again["rows"] if row["name"] == "the plan given")
    assert given["iteration_s"] == pytest.approx(plan.after.seconds, rel=1e-3)
    assert main(["trace", "tune", job]) == 0
    out = capsys.readouterr().out
    assert "gain " in out
    assert "next:" in out
    assert max(map(len, out.partition("next:")[0].splitlines())) <= 100


def test_a_measured_profile_of_fused_operations_is_used(job, tmp_path, capsys):
    fused = tmp_path / "fused.json"
    names = ["BW.11.fc.bias", "BW.11.fc.weight"]
    fused.write_text(json.dumps({"fused": [{"ops": names, "seconds": 1e-4}]}))
    data = told(capsys, job, "--fused", str(fused))
    assert any(names == [name for name in group if name in names] for group in data["fused_ops"])
    assert data["gain"] > told(capsys, job)["gain"]


def test_a_job_of_a_models_size_needs_no_file(capsys):
    data = told(capsys, "resnet50", "--what-if", "workers=8,topology=parameter_server,servers=8")
    rows = {row["name"]: row["iteration_s"] for row in data["rows"]}
    assert {"no fusion", "XLA, BytePS parts", "BytePS (4 MB)", "tuned"} <= rows.keys()
    assert data["workers"] == 8
    assert rows["tuned"] == min(rows.values())
    assert data["gain_over_best_default"] > 0.05


def test_memory_passes_make_a_job_fit(capsys):
    free = told(capsys, "bert_base")
    data = told(capsys, "bert_base", "--memory-budget", "2.4e9")
    tuned = data["rows"][-1]
    assert free["rows"][-1]["peak_bytes"] > 2.4e9 >= tuned["peak_bytes"]
    assert data["recompute"] or data["accumulate"] > 1
    assert main(["trace", "tune", "bert_base", "--memory-budget", "2.4e9"]) == 0
    assert "no default fits the budget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.dfg"], "nowhere.dfg: must be a file of `search trace import -o`, or one of bert_base"),
        (["bert_base", "--driver", "luck"], "--driver must be one of alg1, mcmc, optuna, but is 'luck'"),
        (["bert_base", "--passes", "tensor_fuson"], "did you mean tensor_fusion?"),
        (["bert_base", "--without", "luck"], "--without takes names of passes, but 'luck' is none"),
        (["bert_base", "--memory-budget", "1e8"], "bert_base: --memory-budget must be at least"),
        (["bert_base", "--memory-budget", "-1"], "must be a positive number such as 16e9"),
        (["bert_base", "--what-if", "workers=1"], "bert_base: a job must have at least 2 workers to be tuned"),
        (["bert_base", "--what-if", "bucket_bytes=1e6"], "bucket_bytes is what a tuner decides; leave it out"),
        (["bert_base", "--what-if", "recompute=1"], "recompute is what a tuner decides; leave it out"),
        (["bert_base", "--what-if", "servers=4"], "servers says nothing of a topology ring; add topology=parameter_s"),
        (["bert_base", "--fused", "x.json"], "--fused is of a measured job"),
        (["bert_base", "--plan", "absent.json"], "absent.json: cannot be read"),
    ],
)
def test_bad_input_is_told_in_one_line(words, says, capsys):
    assert main(["trace", "tune", *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_plan_for_another_job_is_refused_and_none_is_written_over(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["trace", "tune", "vgg16", "-o", str(path)]) == 0
    capsys.readouterr()
    assert main(["trace", "tune", "resnet50", "--plan", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"resnet50: {path}: a plan must be for the graph it is applied to" in err
    assert err.count("\n") == 1
    assert main(["trace", "tune", "vgg16", "-o", str(path)]) == 2
    assert "must not replace a file that exists" in capsys.readouterr().err
    assert main(["trace", "tune", "vgg16", "-o", str(path), "--plan", str(path), "--force"]) == 2
    assert "an output must not replace the input" in capsys.readouterr().err
    path.write_text("{}")
    assert main(["trace", "tune", "vgg16", "-o", str(path), "--force"]) == 0
    assert read_plan(path).workers == 16
    path.write_text("{}")
    assert main(["trace", "tune", "vgg16", "--plan", str(path)]) == 2
    assert "format must be 'trainspace-plan'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("traces", "says"),
    [
        ([trace(0, [compute("FW", 0.0, 1.0)])], "at least 2 ranks to be tuned, for one has nothing to synchronise"),
        (ddp(), "a what-if needs transfers whose bytes are known"),
    ],
)
def test_a_trace_that_lacks_what_tuning_needs_is_refused_with_its_file(traces, says, tmp_path, capsys):
    path = tmp_path / "job.dfg"
    write_traces(path, traces, pair(traces))
    assert main(["trace", "tune", str(path)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert str(path) in err
    assert err.count("\n") == 1


def _moved(plan):
    first, second, *others = plan["buckets"]
    first["tensors"], second["tensors"] = first["tensors"][1:], [*second["tensors"], first["tensors"][0]]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda plan: plan["buckets"][0]["tensors"].append("nothing"), "there is a tensor 'nothing' that the plan has"),
        (lambda plan: plan["buckets"].pop(), "that the model has and the plan has not"),
        (_moved, "buckets must hold names that follow each other in the job, but"),
        (lambda plan: plan["fused_ops"].append(["nothing", "either"]), "fused_ops must hold names that follow each"),
        (
            lambda plan: plan.update(fused_ops=[plan["fused_ops"][0][::-1]]),
            "fused_ops must hold names that follow each",
        ),
        (lambda plan: plan.update(recompute=["nothing"]), "recompute must name modules of the job, but 'nothing'"),
    ],
)
def test_a_plan_that_was_edited_into_what_the_job_has_not_is_refused(edit, says, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["trace", "tune", "vgg16", "-o", str(path)]) == 0
    plan = json.loads(path.read_text())
    edit(plan)
    path.write_text(json.dumps(plan))
    capsys.readouterr()
    assert main(["trace", "tune", "vgg16", "--plan", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"vgg16: {path}: " in err
    assert says in err
    assert err.count("\n") == 1


def test_the_next_command_tunes_the_same_job(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["trace", "tune", "vgg16", "--batch", "64", "--without", "op_fusion", "-o", str(path)]) == 0
    again = f"  search trace tune vgg16 --batch 64 --without op_fusion --plan {path}\n"
    assert capsys.readouterr().out.endswith(f"next:\n{again}")
