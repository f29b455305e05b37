"""The language of fusion rules: shipped ones against kernels by hand, what each key does, what is refused and how."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from estimator.build import build
from estimator.cost.work import work
from estimator.graph import BlockKind, Origin, Sources
from estimator.model import ModelSpec
from estimator.op import OpKind, Phase
from estimator.passes import lower
from estimator.passes.fuse import After, chosen_rules, fired, for_chip, fuse
from estimator.passes.fuse.places import parse
from estimator.passes.fuse.reading import read_rules, rules_of, shipped_rules
from estimator.passes.precision import insert_quantization
from estimator.passes.shard import shard
from estimator.precision import Role, recipe
from estimator.step import evaluate
from estimator.strategy import DEFAULT_FUSION, Fusion, OwnFusion, Strategy
from tests.estimator import kinds
from tests.estimator.cases import LLAMA, MIXTRAL, SEQ, TINY, WORK, h100, named
from tests.estimator.kernels import casts_inside, fused_by_hand
from tests.estimator.test_dropout import DROPPED

BF16 = recipe("bf16")
MODELS = (*TINY, DROPPED, *(m for m in vars(kinds).values() if isinstance(m, ModelSpec)))
DENSE = BlockKind.DENSE


@pytest.fixture
def own(tmp_path):
    """Rules of a user, by their text."""

    def read(text):
        path = tmp_path / "own.yaml"
        path.write_text(text, encoding="utf-8")
        return frozenset(OwnFusion(rule.name, content) for rule, content in read_rules(path))

    return read


def sets_of_rules():
    rng = random.Random(0)
    singles = [frozenset({f}) for f in Fusion]
    return [*singles, *(frozenset(Fusion) - f for f in singles), frozenset(Fusion),
            *(frozenset(rng.sample(list(Fusion), rng.randint(2, 10))) for _ in range(5))]  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_shipped_rules_make_the_kernels_that_were_written_by_hand(model):
    whole = build(model, SEQ)
    split = Strategy(tp=2, sequence_parallel=True, cp=2, ep=2 if model.moe else 1)
    for graph in (whole, shard(whole, split)):
        for fusion in sets_of_rules():
            assert fuse(graph, fusion).blocks == fused_by_hand(graph, fusion).blocks, sorted(f.value for f in fusion)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize("name", ["fp8", "fp8_block", "nvfp4"])
def test_casts_ride_by_a_rule_as_they_did_by_hand(model, name):
    graph = insert_quantization(fuse(build(model, SEQ), DEFAULT_FUSION), recipe(name))
    want = graph.map(casts_inside).blocks
    assert fuse(graph, frozenset({Fusion.FUSED_QUANTIZE}), After.QUANTIZATION).blocks == want


def test_shipped_rules_are_the_names_that_strategies_have():
    assert {rule.name for rule in shipped_rules()} == {f.value for f in Fusion}
    assert all(rule.about and rule.phases == {"train", "prefill", "decode"} for rule in shipped_rules())


NORM_ROPE = """
rules:
  - name: norm_rope
    about: norm and rotation of queries and of keys in one kernel
    chain: [norm, rope]
    result: {kind: rope, component: attention, passes: 1}
"""
QK_NORM = replace(LLAMA, name="tiny-qk-norm", qk_norm=kinds.QKNorm.HEAD)


def test_a_chain_becomes_one_op_that_moves_what_comes_in_and_goes_out(own):
    plain, fused = (
        lower(build(QK_NORM, SEQ), Strategy(fusion=f), BF16).blocks[DENSE]
        for f in (DEFAULT_FUSION, DEFAULT_FUSION | own(NORM_ROPE))
    )
    before = [named(plain, f"attention.{name}") for name in ("q_norm", "q_rope")]
    one = named(fused, "attention.q_rope")
    assert "attention.q_norm" not in {op.name for op in fused.ops}
    assert (one.inputs, one.outputs) == (before[0].inputs, before[1].outputs)
    assert one.weights == before[0].weights
    x = plain.tensors[one.inputs[0]].elements * 2
    assert sum(work(op, plain, BF16).nbytes for op in before) == 4 * x
    assert work(one, fused, BF16).nbytes == 2 * x
    between = before[0].outputs[0]
    assert between not in {save.tensor for op in fused.ops for save in op.saves}
    assert {s.tensor for s in one.saves} == {s.tensor for op in before for s in op.saves} - {between}


def test_a_rule_of_a_user_is_priced_on_every_path(own):
    system = h100(8)
    plain, fused = (
        evaluate(QK_NORM, Strategy(fusion=f), system, WORK) for f in (DEFAULT_FUSION, DEFAULT_FUSION | own(NORM_ROPE))
    )
    assert fused.step_time_s < plain.step_time_s
    assert fused.mfu > plain.mfu


FORMULAS = """
rules:
  - name: told
    about: how often each tensor moves is said
    dag:
      sum: {kind: elementwise, component: residual}
      norm: {kind: norm, reads: {0: sum}}
    result:
      kind: norm
      outputs: [sum.out0, norm.out0]
      saves: [{of: sum.out0, as: activation}, {of: norm.saves, only: full}]
      traffic: inputs + 3 * sum.out0 + norm.out0
      backward: 2 * inputs + outputs / 2
"""


def test_traffic_and_kept_tensors_follow_the_formulas(own):
    block = lower(build(LLAMA, SEQ), Strategy(fusion=own(FORMULAS)), BF16).blocks[DENSE]
    one, x = named(block, "post_attention_norm"), 2 * SEQ * LLAMA.hidden
    assert work(one, block, BF16).nbytes == (2 + 3 + 1) * x
    assert work(named(block, "post_attention_norm.grad"), block, BF16).nbytes == (2 * 2 + 2 / 2) * x
    total = one.outputs[0]
    assert [(s.tensor, s.role) for s in one.saves][0] == (total, Role.ACTIVATION)
    assert {s.role for s in one.saves[1:]} == {Role.FULL}


@pytest.mark.parametrize(("guard", "fires"), [
    ("norm.hidden <= 1024", True), ("norm.hidden < 1024", False), ("norm.hidden % 8 == 0 and norm.inputs == 1", True),
    ("not norm.readers > 1", False), ("sum.inputs + 2 * norm.passes == 8", True), ("norm.hidden / 0 > 1", False),
])  # fmt: skip
def test_a_guard_decides(own, guard, fires):
    text = FORMULAS.replace("    result:", f"    when: {guard}\n    result:")
    graph = build(LLAMA, SEQ)
    assert (fuse(graph, own(text)).blocks != graph.blocks) == fires


def test_rules_are_for_phases_and_chips(own):
    graph = build(LLAMA, SEQ)
    decode = own(NORM_ROPE.replace("about:", "phases: decode\n    about:"))
    build_qk = build(QK_NORM, SEQ)
    assert fuse(build_qk, decode).blocks == build_qk.blocks
    assert fuse(replace(build_qk, phase="decode"), decode).blocks != build_qk.blocks
    only = own(NORM_ROPE.replace("about:", "chips: [b200*, h800*]\n    about:"))
    assert for_chip(only, "h100-80g-sxm") == frozenset()
    assert for_chip(only, "h800-80g-sxm") == only
    plain, same = (
        evaluate(QK_NORM, Strategy(fusion=f), h100(8), WORK) for f in (DEFAULT_FUSION, DEFAULT_FUSION | only)
    )
    assert plain.step_time_s == same.step_time_s
    assert graph.phase == "train"


TWO = """
rules:
  - {name: early, about: first, priority: 5, op: {kind: norm}, when: op.passes == 3, change: {op: {passes: 7}}}
  - {name: late, about: never sees it, op: {kind: norm}, when: op.passes == 3, change: {op: {passes: 9}}}
"""


@pytest.mark.parametrize(("low", "passes"), [("priority: 5", {7.0}), ("priority: -5", {9.0})])
def test_priority_decides_which_rule_works_first(own, low, passes):
    block = fuse(build(LLAMA, SEQ), own(TWO.replace("priority: 5", low))).blocks[DENSE]
    assert {op.passes for op in block.ops if op.kind is OpKind.NORM} == passes


def test_a_rule_by_class_follows_bases_and_takes_in_what_is_inside(own):
    """Of a graph that was captured; of one that was built nothing is known of classes."""
    text = """
rules:
  - name: whole_act
    about: what the activation of the MLP does
    module: GatedBase
    result: {kind: activation, inputs: [inputs], outputs: [outputs]}
"""
    graph = build(LLAMA, SEQ)
    origins = {
        "mlp.silu": (Origin((), "model.layers.0.mlp.act_fn", "SiLU", ""),),
        "mlp.act": (Origin((), "model.layers.0.mlp.act_fn.mul", "Mul", ""),),
        "input_norm": (Origin((), "model.layers.0.input_layernorm", "RMSNorm", ""),),
    }
    known = Sources(origins={DENSE: origins}, modules={"model.layers.0.mlp.act_fn": "MyGate"},
                    bases={"MyGate": ("Gate", "GatedBase")})  # fmt: skip
    assert fuse(graph, own(text)).blocks == graph.blocks
    block = fuse(replace(graph, sources=known), own(text)).blocks[DENSE]
    assert "mlp.silu" not in {op.name for op in block.ops}
    assert named(block, "mlp.act").inputs == ("mlp.gate_proj.out", "mlp.up_proj.out")
    by_class = own("rules: [{name: n, about: of a class, op: {class: RMSNorm}, change: {op: {passes: 1}}}]")
    norms = fuse(replace(graph, sources=known), by_class).blocks[DENSE]
    assert [named(norms, n).passes for n in ("input_norm", "post_attention_norm")] == [1.0, 3.0]


def test_scopes_hold_of_built_and_captured_graphs(own):
    text = "rules: [{name: n, about: inside a scope, op: {kind: rope, scope: 'attention*'}, change: {op: {passes: 2}}}]"
    assert named(fuse(build(LLAMA, SEQ), own(text)).blocks[DENSE], "attention.q_rope").passes == 2


def test_a_product_is_never_swallowed(own):
    rules = own("rules: [{name: n, about: swallows, chain: [norm, [matmul]], result: {kind: norm}}]")
    graph = build(replace(LLAMA, parallel_block=False), SEQ)
    assert fuse(graph, rules).blocks == graph.blocks
    (rule,) = chosen_rules(rules, After.COLLECTIVES)
    reasons = [why for kind in graph.kinds for _, _, why in fired(rule, graph.blocks[kind], graph.sources)]
    assert reasons
    assert all("is a product" in why for why in reasons)


def test_what_others_read_in_between_stays_where_it_is(own):
    """The norm's kernel would end behind the op that reads the sum."""
    text = """
rules:
  - name: late
    about: ends too late
    dag: {sum: {kind: elementwise, component: residual}, last: {kind: elementwise, component: residual, reads: sum}}
    result: {kind: elementwise}
"""
    graph = build(MIXTRAL, SEQ)
    assert fuse(graph, own(text)).blocks == graph.blocks


GOOD = """rules:
  - name: one
    about: a rule
    dag:
      a: {kind: norm}
      b: {kind: rope, reads: a}
    result: {kind: rope}
"""
BAD = {
    "an unknown key": (("about:", "abuot:"), 3, "abuot is not a key of a rule; did you mean 'about'?"),
    "an unknown kind": (("kind: norm", "kind: nrom"), 5, "must be a kind of op; did you mean 'norm'?"),
    "an unknown phase": (
        ("about: a rule", "about: a rule\n    phases: [trian]"), 4,
        "must be a phase of train, prefill, decode"),
    "a cycle": (("{kind: norm}", "{kind: norm, reads: b}"), 4, "must form no cycle, but"),
    "an unknown label": (("reads: a}", "reads: c}"), 6, "must be a label of a, b"),
    "no effect": (("    result: {kind: rope}\n", ""), 2, "must have one of change, join, result, but has none"),
    "two ways to match": (
        ("    result:", "    op: {kind: norm}\n    result:"), 2,
        "must have one of op, siblings, dag"),
    "a guard without sense": (("    result:", "    when: a.hidden <\n    result:"), 7, "cannot be parsed"),
    "a guard that calls": (
        ("    result:", "    when: open(a)\n    result:"), 7,
        "cannot be parsed: a guard has numbers"),
    "a guard on a split size": (
        ("    result:", "    when: a.ffn > 1\n    result:"), 7,
        "must be a size that no split changes"),
    "a guard on a label that is not there": (
        ("    result:", "    when: c.hidden > 1\n    result:"), 7,
        "names no op of the rule"),
    "a formula that is no sum": (
        ("{kind: rope}", "{kind: rope, traffic: inputs * outputs}"), 7,
        "must be a sum of tensors"),
    "a formula of nothing": (("{kind: rope}", "{kind: rope, traffic: c.in0}"), 7, "names no tensors of the match"),
    "a product": (("result: {kind: rope}", "result: {kind: matmul}"), 7, "must be no matmul"),
    "an op by itself": (("reads: a}", "optional: true}"), 4, "every op but one must read or feed another"),
    "a name that stands twice": (("    result", "    name: two\n    result"), 7, "a key must stand once"),
    "no YAML": (("about: a rule", "about: [a rule"), 4, "must be YAML"),
    "a name in capitals": (("name: one", "name: One"), 2, "a name must be small letters"),
    "text for a number": (("about: a rule", "about: a rule\n    priority: high"), 4, "must be a whole number"),
}  # fmt: skip


def test_the_rule_that_is_broken_below_is_good():
    assert [rule.name for rule in rules_of(parse(GOOD, "x.yaml"))] == ["one"]


@pytest.mark.parametrize("what", BAD)
def test_a_mistake_is_told_by_file_and_line(what, tmp_path):
    (old, new), line, law = BAD[what]
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(law)) as caught:
        read_rules(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}:"), message
    assert "\n" not in message


def test_two_rules_of_one_name_are_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text(GOOD + GOOD.partition("\n")[2], encoding="utf-8")
    with pytest.raises(ValueError, match=r"twice.yaml:8: .*a name of its own, but 'one' stands at .*twice.yaml:2 too"):
        read_rules(path)


@pytest.mark.parametrize(
    "text", ["", "rules: 1", "[]", "rules: [1]", "rules: [{}]", "rules: {a: b}", "other: []", "\x00", "a: &a [*a]"]
)
def test_what_is_no_rule_file_is_refused_in_one_line(text, tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read_rules(path)
    assert "\n" not in str(caught.value)


def test_no_rule_sees_parallelism():
    """Split before fuse: a rule fires the same way in every shard."""
    for model in (LLAMA, MIXTRAL):
        names = []
        for tp in (1, 2, 4):
            graph = lower(build(model, SEQ), Strategy(tp=tp, fusion=frozenset(Fusion)), BF16)
            names.append(
                [op.name for k in graph.kinds for op in graph.blocks[k].ops if op.kind is not OpKind.COLLECTIVE]
            )
        assert names[0] == names[1] == names[2]


def test_ops_of_a_fused_graph_still_have_gradients(own):
    block = lower(build(QK_NORM, SEQ), Strategy(fusion=own(NORM_ROPE)), BF16).blocks[DENSE]
    forward = {op.name for op in block.of_phase(Phase.FORWARD) if op.kind is not OpKind.COLLECTIVE}
    assert {f"{name}.grad" for name in forward} <= {op.name for op in block.of_phase(Phase.BACKWARD)}


def test_an_op_is_in_one_match():
    """A second norm of the same sum is a kernel of its own."""
    graph = build(LLAMA, SEQ)
    dense = graph.blocks[DENSE]
    norm = named(dense, "post_attention_norm")
    other = norm.but(name="other_norm", outputs=("other_norm.out",))
    tensors = {"other_norm.out": dense.tensors[norm.outputs[0]]}
    both = dense.with_ops((*dense.ops, other), tensors)
    block = fuse(replace(graph, blocks={DENSE: both}), frozenset({Fusion.FUSED_RESIDUAL_NORM})).blocks[DENSE]
    assert named(block, "post_attention_norm").rides
    assert named(block, "other_norm") == other
    assert (
        block.ops == fused_by_hand(replace(graph, blocks={DENSE: both}), {Fusion.FUSED_RESIDUAL_NORM}).blocks[DENSE].ops
    )


def test_what_is_made_inside_a_kernel_is_no_longer_kept(own):
    rules = own("rules: [{name: n, about: x, chain: [activation, activation], result: {kind: activation}}]")
    plain, fused = (fuse(build(LLAMA, SEQ), f).blocks[DENSE] for f in (frozenset(), rules))
    kept = {save.tensor for save in named(plain, "mlp.act").saves}
    assert "mlp.silu.out" in kept
    assert {save.tensor for save in named(fused, "mlp.act").saves} == {"mlp.gate_proj.out", "mlp.up_proj.out"}
    assert named(fused, "mlp.act").inputs == ("mlp.gate_proj.out", "mlp.up_proj.out")


def test_an_op_that_two_matches_want_is_in_the_first(own):
    """Q and k are both rotated for the same scores."""
    text = """
rules:
  - name: n
    about: a rotation and the scores behind it
    dag: {turn: {kind: rope}, scores: {kind: scores, reads: turn}}
    change: {turn: {passes: 5}}
"""
    block = fuse(build(LLAMA, SEQ), own(text)).blocks[DENSE]
    assert [named(block, f"attention.{name}_rope").passes for name in "qk"] == [5.0, 1.0]
    each = fuse(build(LLAMA, SEQ), own(text.replace("    change", "    once: turn\n    change"))).blocks[DENSE]
    assert [named(each, f"attention.{name}_rope").passes for name in "qk"] == [5.0, 5.0]
