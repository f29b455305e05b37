"""Claims about `search report` and what a launch leaves behind."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from results.schema import FRONT_FIELDS
from results.store import RunFolder
from search.candidates import compose_ids, expand
from search.space import load_space
from search.sweep import prepare


def test_a_report_goes_into_the_run_or_where_it_is_asked_for(search, small_run, tmp_path):
    said = search("report", "latest")
    assert (said.code, said.out) == (0, "runs/small/report.html\n")
    inside = (small_run.path / "report.html").read_text(encoding="utf-8")
    said = search("report", "latest", "-o", "page.html", "--json")
    assert json.loads(said.out) == {"run": "runs/small", "report": "page.html", "bytes": len(inside.encode())}
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == inside
    for text in ("fully_sharded", "tp * pp &lt;= 16", "90 GiB of 76 GiB", "search show runs/small"):
        assert text in inside


def test_the_same_pictures_may_be_files(search, small_run, tmp_path):
    pytest.importorskip("matplotlib")
    said = search("report", "latest", "--png", "pictures")
    files = sorted(tmp_path.glob("pictures/*.png"))
    assert (said.code, sorted(said.out.split())) == (0, [f"pictures/{file.name}" for file in files])
    # A run without a pipeline has no picture of one.
    assert {f.stem for f in files} == {
        "front", "memory", "parallel", "ranks", "rejections", "sensitivity", "treemap", "waterfall"
    }  # fmt: skip
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size > 8000, file
    assert not (small_run.path / "report.html").exists()


def test_the_point_that_is_asked_for_is_shown_first(search, small_run, tmp_path):
    """In the page the first of the details is chosen at its start; pictures are of it."""
    rows = [*small_run.read_front()["id"].tolist(), "fully_sharded"]
    for place, name in enumerate(rows):
        assert search("report", "latest", "-o", f"{place}.html", "--point", str(name)).code == 0
        page = (tmp_path / f"{place}.html").read_text(encoding="utf-8")
        assert json.loads(re.search(r'id="data">(.*)</script>', page)[1])["details"][0]["row"] == place


def test_a_run_without_a_front_is_3_and_says_what_to_ask(search, small_run):
    small_run.write_front({field.name: [] for field in FRONT_FIELDS})
    small_run.close()
    said = search("report", "latest")
    assert (said.code, said.out) == (3, "")
    assert said.err == (
        "runs/small: nothing is feasible, so there is no front to show; search why runs/small tells why\n"
    )


@pytest.mark.parametrize(
    ("state", "held", "told"),
    [
        ("running", True, "this one is running; wait until it is done"),
        ("running", False, "this one is interrupted; go on with: search resume runs/small"),
        ("failed", False, "this one is failed; go on with: search resume runs/small"),
    ],
)
def test_a_run_that_is_not_done_is_one_line_and_2(search, small_run, state, held, told):
    small_run.update_manifest(state=state)
    if not held:
        small_run.close()
    said = search("report", "runs/small")
    small_run.close()
    assert (said.code, said.out) == (2, "")
    assert said.err == f"search: runs/small: only a finished run has a whole front, but {told}\n"


def test_a_launch_writes_the_page_and_keeps_what_came_closest(search, tmp_path):
    words = ("--set", "strategy.recompute=[none]", "--set", "strategy.zero_stage=[0]", "--set", "system.num_chips=8")
    said = search("launch", "llama3_8b_small", "--pool", "inline", "--replay", "0", "--out", "run", *words)
    assert said.code == 0
    manifest = RunFolder.open(tmp_path / "run").manifest
    closest = manifest["closest"]
    assert closest
    assert all(row["device_memory_bytes"] > row["capacity_bytes"] for row in closest)
    assert [row["short_by_bytes"] for row in closest] == sorted(row["short_by_bytes"] for row in closest)
    plan = prepare(load_space("llama3_8b_small", words[1::2]), prune=False)
    structures, least = plan.enumeration.structures, []
    for i in range(len(structures)):  # of every structure, the candidate that needs the least memory
        ids = expand(plan.enumeration.worlds[structures.world[i]], structures, i)
        least.append(compose_ids(plan.space, plan.enumeration, ids)["device_memory_bytes"].min())
    short = sorted(need - plan.space.system.usable_hbm_bytes for need in least)
    short = [over for over in short if over > 0.0]
    assert [row["short_by_bytes"] for row in closest] == pytest.approx(short[:3])
    assert len(short) > 3
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert closest[0]["remedy"] in page
    assert manifest["seconds"]["report"] > 0
    assert "page: run/report.html" in said.out


def test_a_sampled_run_tells_what_came_closest_of_what_it_tried(search, tmp_path):
    words = ("--set", "strategy.recompute=[none]", "--set", "strategy.zero_stage=[0]", "--set", "system.num_chips=8")
    options = ("--sampler", "random", "--trials", "48", "--seed", "1", "--pool", "inline", "--replay", "0")
    assert search("launch", "llama3_8b_small", *options, "--out", "run", *words).code == 0
    folder = RunFolder.open(tmp_path / "run")
    closest, trials = folder.manifest["closest"], folder.read_trials()
    missed = np.sort(trials.where(trials["reason"] == "memory")["device_memory_bytes"])
    assert len(missed) > 0
    assert [row["device_memory_bytes"] for row in closest] == missed[:3].tolist()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "of what the study tried and what does not fit in memory, what lacks the least" in page
    assert closest[0]["remedy"] in page
