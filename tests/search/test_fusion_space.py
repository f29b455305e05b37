"""Fusion rules in a space: by name, on and off, a user's own from files; a dimension of the search like any other."""

from __future__ import annotations

import json

import pytest

import estimator.passes
from estimator import tables
from estimator.passes.fuse import After
from estimator.rules import Case, check
from estimator.step import evaluate
from estimator.strategy import DEFAULT_FUSION, Fusion, OwnFusion
from results.schema import strategy_at, strategy_columns
from search.cli import main
from search.opened import OPENED
from search.space import SpaceError, load_space, parse_space, shipped_spaces
from search.sweep import sweep_inline
from tests.estimator.kernels import casts_inside, fused_by_hand
from tests.search.small import enumerated, swept

HEAD = """\
name: small
model: qwen3_32b
system: {cluster: dgx_h100, num_chips: 64}
workload: {seq: 4096, global_batch: 64}
"""
RULES = """\
rules:
  - name: norm_rope
    about: norm and rotation of queries and of keys in one kernel
    chain: [norm, rope]
    result: {kind: rope, component: attention, passes: 1}
  - name: one_pass_rope
    about: never fires
    op: {kind: rope}
    when: op.inputs > 7
    change: {op: {passes: 1}}
"""
OPEN = """\
strategy:
  zero_stage: 3
  tp: [1, 2]
  fusion:
    - {enable: [norm_rope]}
    - [flash_attention, fused_norm]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "kernels.yaml").write_text(RULES, encoding="utf-8")
    return tmp_path


def space_of(text, folder):
    return parse_space(HEAD + text, "x.yaml", folder)


def refusal(text, folder):
    with pytest.raises(SpaceError) as caught:
        space_of(text, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def by_hand(graph, fusion, after=After.COLLECTIVES):
    if after is After.COLLECTIVES:
        return fused_by_hand(graph, fusion)
    return graph.map(casts_inside) if Fusion.FUSED_QUANTIZE in fusion else graph


@pytest.mark.parametrize("name", shipped_spaces())
def test_published_points_of_shipped_spaces_have_the_prices_of_kernels_by_hand(name, monkeypatch):
    space = load_space(name)

    def columns():
        for cached in (tables._one_row, tables._one_lowered, tables.model_flops_per_token):
            cached.cache_clear()
        found = []
        for s in space.references.values():
            system = next(x for x in space.systems if not check(Case.of(space.model, s, x, space.workload))[0])
            priced = evaluate(space.model, s, system, space.workload)
            found.append({column: float(value) for column, value in priced.columns.items()})
        return found

    by_rules = columns()
    monkeypatch.setattr(estimator.passes, "fuse", by_hand)
    try:
        assert columns() == by_rules
    finally:
        tables._one_row.cache_clear()
        tables._one_lowered.cache_clear()


def test_rules_go_on_and_off_by_name(folder):
    space = space_of("strategy: {fusion: {enable: [fused_qkv, fused_loss], disable: fused_norm}}\n", folder)
    assert space.strategy().fusion == (DEFAULT_FUSION | {Fusion.FUSED_QKV, Fusion.FUSED_LOSS}) - {Fusion.FUSED_NORM}


def test_a_file_of_rules_gives_names_to_a_space(folder):
    space = space_of(f"fusion_rules: kernels.yaml\n{OPEN}", folder)
    assert [rule.value for rule in space.fusion_rules] == ["norm_rope", "one_pass_rope"]
    sets = [{f.value for f in fusion} for fusion in space.axes["fusion"]]
    assert sets == [{f.value for f in DEFAULT_FUSION} | {"norm_rope"}, {"flash_attention", "fused_norm"}]


def test_a_resolved_space_needs_no_other_file(folder, tmp_path_factory):
    space = space_of(f"fusion_rules: [kernels.yaml]\n{OPEN}", folder)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert parse_space(space.resolved_yaml(), "space.yaml", elsewhere) == space


def test_rules_written_in_place_are_rules(folder):
    text = "fusion_rules:\n  - {name: mine, about: a pass, op: {kind: rope}, change: {op: {passes: 2}}}\n"
    space = space_of(f"{text}strategy: {{fusion: [mine]}}\n", folder)
    (only,) = space.strategy().fusion
    assert isinstance(only, OwnFusion)
    assert only.value == "mine"


def test_rule_sets_are_a_dimension_that_the_sweep_covers(folder):
    space = space_of(f"fusion_rules: kernels.yaml\n{OPEN}", folder)
    front = swept(space)
    assert front == enumerated(space)
    best = min(front, key=front.get)
    plain = space_of("strategy: {zero_stage: 3, tp: [1, 2]}\n", folder)
    assert min(front.values())[0] < min(swept(plain).values())[0]
    assert best in sweep_inline(space).ids


def test_a_row_of_a_front_knows_its_rules_again(folder):
    space = space_of("fusion_rules: kernels.yaml\nstrategy: {fusion: [norm_rope, fused_norm]}\n", folder)
    row = {name: column[0] for name, column in strategy_columns(space.strategy(), 8).items()}
    assert row["fusion"] == "fused_norm+norm_rope"
    assert strategy_at(row, space.fusion_rules) == space.strategy()
    with pytest.raises(ValueError, match="'norm_rope'; give fusion_rules that have it"):
        strategy_at(row)


def test_an_open_fusion_axis_has_own_rules_as_well(folder):
    space = space_of("fusion_rules: kernels.yaml\nstrategy: {fusion: search}\n", folder)
    free = OPENED["fusion"](space)
    names = [name for name, _ in free.parameters]
    assert names[-2:] == ["fusion.norm_rope", "fusion.one_pass_rope"]
    chosen = free.value(space, {}, (0,) * (len(names) - 2) + (1, 0))
    assert {f.value for f in chosen} == {"norm_rope"}


@pytest.mark.parametrize(("text", "law"), [
    ("strategy: {fusion: [fused_nrom]}\n", "x.yaml:5: strategy.fusion: must be a known name; did you mean 'fused_norm"),
    ("fusion_rules: kernels.yaml\nstrategy: {fusion: [norm_roep]}\n", "did you mean 'norm_rope'?"),
    ("strategy: {fusion: {enable: [fused_norm], disable: [fused_norm]}}\n", "not be both enabled and disabled"),
    ("strategy: {fusion: {enabel: [fused_norm]}}\n", "did you mean 'enable'?"),
    ("fusion_rules: missing.yaml\n", "must be readable UTF-8 text, but got No such file"),
    ("fusion_rules: 7\n", "x.yaml:5: fusion_rules: must be the path of a rule file or a rule"),
    ("fusion_rules: [kernels.yaml, kernels.yaml]\n", "but 'norm_rope' stands twice"),
    ("fusion_rules: [{name: fused_norm, about: x, op: {}, change: {op: {passes: 1}}}]\n", "of a shipped rule"),
    ("fusion_rules: [{name: mine, about: x, op: {kind: norm}}]\n", "must have one of change, join, result"),
])  # fmt: skip
def test_what_is_wrong_with_rules_of_a_space_is_told_in_one_line(text, law, folder):
    assert law in refusal(text, folder)


def test_the_command_line_prices_a_users_rule(folder, capsys):
    (folder / "space.yaml").write_text(f"{HEAD}fusion_rules: kernels.yaml\n", encoding="utf-8")
    seconds = []
    for enabled in ("[]", "[norm_rope]"):
        change = f"strategy.fusion={{enable: {enabled}}}"
        point = ["--set", change, "--set", "strategy.zero_stage=3", "--set", "strategy.recompute=full"]
        assert main(["estimate", str(folder / "space.yaml"), *point, "--json"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["step_time_s"])
    assert seconds[1] < seconds[0]


def test_a_broken_rule_file_ends_the_command_with_file_and_line(folder, capsys):
    (folder / "kernels.yaml").write_text(RULES.replace("kind: rope}", "kind: rpoe}"), encoding="utf-8")
    (folder / "space.yaml").write_text(f"{HEAD}fusion_rules: kernels.yaml\n", encoding="utf-8")
    assert main(["estimate", str(folder / "space.yaml")]) == 2
    message = capsys.readouterr().err
    assert f"{folder / 'kernels.yaml'}:8: rules.1.op.kind: must be a kind of op; did you mean 'rope'?" in message
    assert message.count("\n") == 1
