"""Claims about the page of a run of answers: held to its rows, and looked at in a real browser."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from results.report.served import TERMS
from results.store import RunFolder
from search.cli import main
from tests.browser import open_browser

SPACE = """
name: small
model: llama3_8b
system: {cluster: dgx_h100, num_chips: [1, 8]}
workload: {phase: PHASE, batch: [1, 16, 512], context: 4096, output: OUTPUT}
strategy: {tp: [1, 8], kv_cache: [bf16, fp8]}
objectives: [OBJECTIVE, tokens_per_s_per_gpu]
reference:
  one: {tp: 1, batch: 16}
"""
PHASES = {"decode": ("256", "time_per_output_token_s"), "prefill": ("1", "time_to_first_token_s")}


@pytest.fixture(scope="module", params=PHASES)
def run(request, tmp_path_factory):
    """A run in its folder, as `search launch` leaves it, and the column that its terms sum to."""
    folder = tmp_path_factory.mktemp("served")
    output, whole = PHASES[request.param]
    text = SPACE.replace("PHASE", request.param).replace("OUTPUT", output).replace("OBJECTIVE", whole)
    (folder / "small.yaml").write_text(text, encoding="utf-8")
    assert main(["launch", str(folder / "small.yaml"), "--out", str(folder / "run")]) == 0
    return RunFolder.open(folder / "run"), whole


def data_of(page):
    return json.loads(re.search(r'id="data">(.*)</script>', page)[1])


def test_every_launch_of_answers_writes_its_page(run):
    folder, whole = run
    data = data_of((folder.path / "report.html").read_text(encoding="utf-8"))
    front = folder.read_front()
    assert data["num_front"] == len(front) > 1
    assert data["whole"]["name"] == whole
    sums = np.sum([front[name] for name in TERMS], axis=0)
    assert sums == pytest.approx(front[whole])
    assert {detail["row"] for detail in data["details"]} == set(range(data["num_rows"]))
    for detail in data["details"][:3]:
        row = front.row(detail["row"]) if detail["row"] < len(front) else folder.read_reference().row(0)
        assert sum(detail["stages"][0]["memory"].values()) == pytest.approx(row["peak_memory_bytes"], rel=0.05)
        assert {shift["what"] for shift in detail["shifts"]} >= {"HBM bandwidth", "peak FLOP/s"}
        assert all(s["step_time_s"] <= row[whole] for s in detail["shifts"] if s["factor"] > 1)
        slower = [s for s in detail["shifts"] if s["factor"] < 1 and s["what"] == "HBM bandwidth"]
        assert all(s["step_time_s"] > row[whole] for s in slower)


def test_what_just_does_not_fit_is_told(run):
    folder, _ = run
    closest = data_of((folder.path / "report.html").read_text(encoding="utf-8"))["closest"]
    assert bool(closest) == bool(folder.manifest["counts"]["by_rule"].get("memory"))
    assert all(one["short_by_bytes"] > 0 and "search infer " in one["remedy"] for one in closest)


def test_the_report_of_answers_goes_where_it_is_asked_for_and_begins_with_a_point(run, tmp_path, capsys):
    folder, _ = run
    page = tmp_path / "page.html"
    assert main(["report", str(folder.path), "-o", str(page), "--point", "one"]) == 0
    assert data_of(page.read_text(encoding="utf-8"))["details"][0]["row"] == len(folder.read_front())
    assert main(["report", str(folder.path), "--png", str(tmp_path / "pictures")]) == 2
    told = capsys.readouterr().err
    assert "--png is for runs of training" in told
    assert told.count("\n") == 1


def test_the_page_of_answers_is_readable_and_the_console_silent(run):
    folder, whole = run
    browser = open_browser()
    try:
        for width in (1280, 400):
            browser.open(folder.path / "report.html", width)
            assert browser.complaints() == []
            assert browser.run("return document.documentElement.scrollWidth") <= width
        assert whole.removesuffix("_s").replace("_", " ") in browser.text("#waterfall")
        assert "weights" in browser.run("return document.getElementById('treemap').textContent")
        assert browser.run("return groupsOf(0, 0).tp.length") == folder.read_front()["tp"][0]
    finally:
        browser.driver.quit()
