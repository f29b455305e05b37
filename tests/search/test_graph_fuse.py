"""`search graph fuse` and `search graph passes`: what is told adds up, and names a reason for every rule."""

from __future__ import annotations

import json

import pytest

from estimator.build import build
from estimator.fusion_gain import explain
from estimator.passes import PASSES, Lowering
from estimator.precision import recipe
from estimator.strategy import Fusion, Strategy
from search.cli import main
from tests.estimator.cases import DEEPSEEK, LLAMA, MIXTRAL, SEQ, TINY, h100

KERNELS = """\
rules:
  - name: norm_rope
    about: norm and rotation in one kernel
    chain: [norm, rope]
    result: {kind: rope, passes: 1}
  - name: for_others
    about: of another vendor
    chips: mi300x*
    op: {kind: rope}
    change: {op: {passes: 0.5}}
  - name: swallows
    about: a norm and its products
    chain: [norm, matmul]
    result: {kind: norm}
"""


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
def test_what_firings_save_adds_up_to_what_the_model_saves(model, precision):
    strategy = Strategy(fusion=frozenset(Fusion), precision=precision, tp=2, sequence_parallel=True)
    report = explain(build(model, SEQ), Lowering(strategy=strategy, recipe=recipe(precision)), h100(8).chip)
    saved = report.before.minus(report.after)
    for name in ("seconds", "moved_bytes", "kept_bytes", "kernels"):
        total = sum(getattr(f.saved, name) * f.times for f in report.firings)
        # Each is a difference of sums over a block: rounding is relative to the whole.
        assert total == pytest.approx(getattr(saved, name), abs=1e-9 * getattr(report.before, name))
    assert {f.rule for f in report.firings} | {m.rule for m in report.missed} == {f.value for f in Fusion}


def test_what_does_not_fire_says_why():
    report = explain(build(LLAMA, SEQ), Lowering(strategy=Strategy(), recipe=recipe("bf16")), h100(8).chip)
    why = {m.rule: m.why for m in report.missed}
    assert why["fused_qkv"] == "it is not chosen (fusion)"
    every = Lowering(strategy=Strategy(fusion=frozenset(Fusion)), recipe=recipe("bf16"))
    why = {m.rule: m.why for m in explain(build(LLAMA, SEQ), every, h100(8).chip).missed}
    assert why["fused_router"] == "no op is topk, of router"
    assert why["fused_softmax"] == "no op is softmax"  # flash attention was there first
    mla = {m.rule: m.why for m in explain(build(DEEPSEEK, SEQ), every, h100(8).chip).missed}
    assert mla["fused_qkv"].startswith(
        "no two ops that are grouped_matmul or matmul, heads or kv_heads wide share kind"
    )
    moe = {m.rule for m in explain(build(MIXTRAL, SEQ), every, h100(8).chip).missed}
    assert "fused_router" not in moe


def told(capsys, *words):
    assert main(["graph", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_users_rules_are_told_by_layer_and_in_all(tmp_path, capsys):
    path = tmp_path / "kernels.yaml"
    path.write_text(KERNELS, encoding="utf-8")
    data = told(capsys, "fuse", "qwen3_32b", "--rules", str(path), "--only", "norm_rope,for_others,swallows")
    (rule,) = data["rules"]
    assert (rule["rule"], rule["fires"]) == ("norm_rope", 2 * 64)
    assert rule["saved"]["moved_bytes"] == data["saved"]["moved_bytes"] > 0
    assert data["saved"]["seconds"] > 0
    why = {m["rule"]: m["why"] for m in data["missed"]}
    assert why["for_others"] == "it is for mi300x*, and this is h100-80g-sxm"
    assert "is a product, whose gradients are its own" in why["swallows"]
    assert main(["graph", "fuse", "qwen3_32b", "--rules", str(path), "--explain"]) == 0
    text = capsys.readouterr().out
    assert "did not fire" in text
    assert "fused_router: it is not chosen" in text


def test_a_configuration_is_explained_as_it_is_priced(capsys):
    data = told(capsys, "fuse", "deepseek_v3:published")
    assert {rule["rule"] for rule in data["rules"]} == set(data["fusion"]) - {"fused_qkv"}
    assert data["chip"] == "h800-80g-sxm"


@pytest.mark.parametrize(("words", "law"), [
    (("fuse", "llama3_8b", "--only", "fused_nrom"), "--only must name rules of"),
    (("fuse", "llama3_8b", "--rules", "nowhere.yaml"), "nowhere.yaml: a rule file must be readable"),
    (("fuse", "llama3_8b", "--set", "strategy.tp=2"), "--set and --reference are for configurations"),
    (("fuse", "deepseek_v3:published", "--chip", "h100-80g-sxm"), "--chip is for a model"),
    (("passes", "llama3_8b", "--after", "fsue"), "did you mean 'fuse'?"),
    (("passes", "--after", "fuse"), "name a graph or configuration"),
    (("fuse", "no_such_model"), "neither a known name nor a file"),
])  # fmt: skip
def test_mistakes_take_one_line(words, law, capsys):
    assert main(["graph", *words]) == 2
    message = capsys.readouterr().err
    assert law in message
    assert message.count("\n") == 1


def test_the_passes_are_told_in_their_order(capsys):
    assert [row["pass"] for row in told(capsys, "passes")] == [p.name for p in PASSES]
    rows = told(capsys, "passes", "llama3_70b:rule_of_thumb", "--after", "gradients")["passes"]
    by_name = {row["pass"]: row for row in rows}
    assert list(by_name)[-1] == "gradients"
    assert by_name["dp"]["collectives"] == 0 < by_name["collectives"]["collectives"]
    assert by_name["fuse"]["hbm_bytes"] < by_name["offload"]["hbm_bytes"]
    assert main(["graph", "passes", "llama3_8b"]) == 0
    assert "collectives" in capsys.readouterr().out
