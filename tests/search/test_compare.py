"""`search compare`: what differs, and where the time and the memory go apart; layouts as a command line takes them."""

from __future__ import annotations

import json
import math

import pytest

from estimator.step import evaluate
from hardware.units import format_bytes
from search.commands.point import read_point
from search.layout import layers_of

PUBLISHED = "deepseek_v3:published"
BALANCED = "reference.published.layout=auto"


def compared(search, *words):
    said = search("compare", *words, "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_terms_and_items_add_up_to_what_the_steps_and_the_ranks_differ_by(search):
    told = compared(search, PUBLISHED, PUBLISHED, "--set-b", BALANCED)
    a, b = told["a"], told["b"]
    *terms, step = told["waterfall"]
    assert step["term"] == "step_time_s"
    assert step["difference_s"] == b["step_time_s"] - a["step_time_s"] != 0
    for key in ("a_s", "b_s", "difference_s"):
        assert math.fsum(term[key] for term in terms) == pytest.approx(step[key], abs=1e-12 * a["step_time_s"])
    for side, other in (("a", a), ("b", b)):
        held = math.fsum(item[f"{side}_bytes"] for item in told["memory"])
        assert held == pytest.approx(max(rank["bytes"] for rank in other["ranks"]), rel=1e-12)
        assert other["ranks"][other["fullest_rank"]]["bytes"] == max(rank["bytes"] for rank in other["ranks"])


def test_a_balanced_layout_is_named_and_what_it_gains_is_the_headline(search):
    told = compared(search, PUBLISHED, PUBLISHED, "--set-b", BALANCED)
    assert [one["name"] for one in told["differences"]] == ["layout"]
    assert told["headline"].startswith("the layout alone differs: B is ")
    layers, num_mtp = layers_of(told["b"]["megatron_layout"])
    assert (sum(layers), num_mtp) == (61, 1)
    assert list(layers) == told["b"]["strategy"]["layout"]
    assert [rank["layers"] for rank in told["b"]["ranks"]] == [[layers[i], layers[15 - i]] for i in range(16)]
    busiest = [max(rank["seconds"] for rank in told[side]["ranks"]) for side in ("a", "b")]
    assert busiest[1] < busiest[0]
    said = search("compare", PUBLISHED, PUBLISHED, "--set-b", BALANCED)
    assert told["headline"].split(":")[0] in said.out
    assert told["b"]["megatron_layout"] in said.out


def test_each_side_is_what_estimate_says_of_it(search):
    told = compared(search, PUBLISHED, "llama3_70b:rule_of_thumb", "--set-b", "reference.rule_of_thumb.zero_stage=0")
    names = {one["name"] for one in told["differences"]}
    assert {"model", "system", "workload.seq", "workload.global_batch", "tp", "schedule"} <= names
    point = read_point("llama3_70b", "rule_of_thumb", ["reference.rule_of_thumb.zero_stage=0"])
    result = evaluate(point.model, point.strategy, point.system, point.workload)
    assert told["b"]["step_time_s"] == result.step_time_s
    assert told["b"]["feasible"] == result.feasible
    assert told["a"]["model"] == "deepseek_v3"
    text = search("compare", PUBLISHED, "llama3_70b:rule_of_thumb").out
    assert "differences: model, system" in text.replace("\n", " ")


def test_the_same_twice_has_no_difference(search, small_run):
    assert compared(search, PUBLISHED, PUBLISHED)["headline"] == "A and B are the same configuration"
    told = compared(search, f"{small_run.path}:0", f"{small_run.path}:7")
    assert [one["name"] for one in told["differences"]] == ["recompute"]
    assert told["headline"].endswith("; 1 difference: recompute")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("[4, 4]", "but for the first and the last; the layout has 2 chunks with 8 layers in all"),
        ("Et*4|(t*4|)*14t*2mL", "16 chunks with 62 layers in all"),
        ("Et*4|(t*4|*14tmL", "brackets of a pipeline layout must match"),
        ("Et*4|(t*4|)*14tL", "must hold the model's MTP layers (m) 1 times"),
        ("evn", "must be a word, a string of Megatron or layers per chunk; got 'evn'"),
        ("{}", "must be a word, a string of Megatron or layers per chunk"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "estimate"])
def test_a_layout_that_cannot_be_takes_one_line(search, command, layout, message):
    words = [PUBLISHED, PUBLISHED] if command == "compare" else [PUBLISHED]
    said = search(command, *words, "--set", f"reference.published.layout={layout}")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert message in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((PUBLISHED, "deepseek_v3:publish"), "no point is called 'publish'; did you mean 'published'?"),
        ((PUBLISHED, "nothing:3"), "'nothing' is no run"),
        ((PUBLISHED, "deepseek_v3"), "name a point with --reference (published)"),
        ((PUBLISHED, "nowhere.yaml:mine"), "nowhere.yaml"),
        ((PUBLISHED, PUBLISHED, "--set-a", BALANCED, "--set-a", "reference.published.pp=1"), "published: "),
    ],
)
def test_bad_input_takes_one_line(search, words, message):
    said = search("compare", *words)
    assert message in said.err
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)


def test_one_stage_has_nothing_to_balance(search):
    set_ = ["--set", "strategy={layout: auto}", "--set", "reference={}"]
    said = search("estimate", "llama3_8b_small", *set_)
    assert said.code == 2
    assert "auto_layout: layout auto balances the stages of a pipeline (pp 1)" in said.err


def test_estimate_and_show_name_the_layout_that_megatron_takes(search, small_run):
    said = search("estimate", PUBLISHED, "--json")
    assert json.loads(said.out)["megatron_layout"] == "Et*3|(t*4|)*13t*3|t*3mL"
    assert "pipeline layout of Megatron Et*3|(t*4|)*13t*3|t*3mL" in search("estimate", PUBLISHED).out
    rows = json.loads(search("show", small_run.path, "--json").out)["rows"]
    assert [row["megatron_layout"] for row in rows] == [None] * 3
    balanced = json.loads(search("estimate", PUBLISHED, "--set", BALANCED, "--json").out)
    assert list(layers_of(balanced["megatron_layout"])[0]) == balanced["strategy"]["layout"]


def test_a_launch_tells_uneven_layouts_with_equal_neighbours_counted(search, tmp_path):
    out = tmp_path / "run"
    sets = ["--set", "strategy={pp: 4, zero_stage: [0, 3], layout: [[9, 8, 8, 7]]}", "--set", "reference={}"]
    said = search("launch", "llama3_8b_small", *sets, "--pool", "inline", "--out", out, "--set", "constraints=[]")
    assert said.code == 0, said.err
    assert "layout 9, 2 x 8, 7" in said.out
    rows = json.loads(search("show", out, "--json").out)["rows"]
    assert {row["megatron_layout"] for row in rows} == {"Et*9|t*8|t*8|t*7L"}


RULE = "llama3_70b:rule_of_thumb"


def test_the_headline_says_which_is_faster_by_what_share_of_a_and_for_how_much_memory(search):
    full = "reference.rule_of_thumb.recompute=full"
    slower, faster = compared(search, RULE, RULE, "--set-b", full), compared(search, RULE, RULE, "--set-a", full)
    few, many = (slower[side]["step_time_s"] for side in ("a", "b"))
    assert few < many
    assert slower["headline"].startswith(f"B is {many / few - 1:.1%} slower, ")
    assert faster["headline"].startswith(f"B is {1 - few / many:.1%} faster, ")
    saved = slower["a"]["device_memory_bytes"] - slower["b"]["device_memory_bytes"]
    assert saved > 0
    assert f"with {format_bytes(saved)} less on the worst rank" in slower["headline"]
    assert f"with {format_bytes(saved)} more on the worst rank" in faster["headline"]


def test_a_side_that_does_not_fit_says_by_how_much_and_ranks_are_shown_where_they_differ(search):
    large = ("--set-b", "reference.rule_of_thumb.micro_batch=4")
    told = compared(search, RULE, RULE, *large)
    assert (told["a"]["feasible"], told["b"]["feasible"]) == (True, False)
    point = read_point("llama3_70b", "rule_of_thumb", [])
    over = told["b"]["device_memory_bytes"] - point.system.usable_hbm_bytes
    text = search("compare", RULE, RULE, *large).out
    assert text.count("does not fit: ") == 1
    assert f"does not fit: {format_bytes(over)} too much" in text
    assert "ranks: layers of their chunks" not in text
    shallow = search("compare", RULE, RULE, "--set-b", "reference.rule_of_thumb.vpp=2").out
    assert "ranks: layers of their chunks" in shallow
