"""Space files: what they mean, what a resolved one keeps, and the one line that each mistake earns."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import spaces
from estimator.model_io import load_model
from estimator.strategy import (
    Chunks,
    ContextParallel,
    Fusion,
    LayoutRule,
    Module,
    Recompute,
    RecomputeKind,
    Schedule,
    Strategy,
)
from estimator.workload import Workload
from hardware.catalog import cluster
from search.axes import AXES, OPEN, axis_values
from search.space import Keep, Sampler, SpaceError, load_space, parse_space, shipped_spaces
from search.structures import enumerate_space
from search.yaml_lines import parse_document

HEAD = """\
name: small
model: llama3_8b
system: {cluster: dgx_h100, num_chips: 64}
workload: {seq: 8192, global_batch: 128}
"""


def axis(text: str, name: str = "tp"):
    return parse_space(f"{HEAD}strategy: {{{name}: {text}}}\n", "x.yaml").axes[name]


def refusal(text: str, overrides: tuple[str, ...] = ()) -> str:
    """The message of a space that must be refused: one line."""
    with pytest.raises(SpaceError) as caught:
        parse_space(text, "x.yaml", overrides=overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_bare_space_is_a_point_with_the_defaults_of_a_strategy():
    space = parse_space(HEAD, "x.yaml")
    assert space.is_point
    assert space.raw_size == 1
    assert space.strategy() == Strategy()
    assert space.model == load_model("llama3_8b", [spaces.MODELS])
    assert space.system == cluster("dgx_h100", 64)
    assert space.workload == Workload(seq=8192, global_batch=128)
    assert [(o.column, o.minimise) for o in space.objectives] == [("step_time_s", True), ("peak_memory_bytes", True)]


def test_axes_come_in_canonical_order_whatever_the_file_says():
    space = parse_space(f"{HEAD}strategy: {{zero_stage: 1, overlap: {{dp: 1}}, tp: 2}}\n", "x.yaml")
    assert list(space.axes) == [a.name for a in AXES]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("8", (8,)),
        ("[4, 1, 4, 2]", (4, 1, 2)),
        ("{range: [2, 5]}", (2, 3, 4, 5)),
        ("{range: [1, 8, 3]}", (1, 4, 7)),
        ("{powers_of_two: [2, 16]}", (2, 4, 8, 16)),
        ("[1, {range: [6, 8]}, {powers_of_two: [8, 16]}]", (1, 6, 7, 8, 16)),
        ("[1.0, 2e0]", (1, 2)),
        ("010", (10,)),
    ],
)
def test_an_axis_is_a_value_a_list_or_a_spread(text, values):
    got = axis(text)
    assert got == values
    assert all(type(value) is int for value in got)


def test_yaml_1_1_traps_are_defused():
    assert axis("[25e6, 1_000]", "bucket_bytes") == (25_000_000, 1_000)
    assert axis("[1f1b]", "schedule") == (Schedule.ONE_F_ONE_B,)
    assert axis("[off, none, no, null]", "recompute") == (Recompute(),)
    assert axis("[on, off]", "sequence_parallel") == (True, False)
    assert parse_document("1:30", "x").value == "1:30"


def test_structure_values_are_enums_and_sets():
    modules = Recompute.parse(["layernorm", "mla_up_proj"])
    assert modules.modules == {Module.LAYERNORM, Module.MLA_UP_PROJ}
    assert axis("[none, [layernorm, mla_up_proj], mla_up_proj+layernorm]", "recompute") == (Recompute(), modules)
    assert axis("[ring, ulysses]", "context_parallel") == (ContextParallel.RING, ContextParallel.ULYSSES)
    assert axis("[fused_loss, fused_norm]", "fusion") == (frozenset({Fusion.FUSED_LOSS, Fusion.FUSED_NORM}),)
    assert axis("[[], [fused_loss]]", "fusion") == (frozenset(), frozenset({Fusion.FUSED_LOSS}))
    assert axis("[4, 4, 3]", "layout") == ((4, 4, 3),)
    assert axis("null", "layout") == (None,)


def test_layers_by_chunk_are_a_list_and_several_a_list_of_lists():
    assert axis("[2, 0, 1]", "recompute_per_chunk") == ((2, 0, 1),)
    assert axis("[[2, 0], null, [1, 1]]", "recompute_per_chunk") == ((2, 0), None, (1, 1))
    assert axis("null", "recompute_per_chunk") == (None,)


def test_layouts_are_words_numbers_or_strings_of_megatron_and_several_a_list_of_them():
    assert axis("auto", "layout") == (LayoutRule.AUTO,)
    assert axis("even", "layout") == (None,)
    assert axis("Et*9|(t*8|)*2t*7L", "layout") == ((9, 8, 8, 7),)
    told = axis("[even, auto, [9, 8, 8, 7], null, 'Et*9|(t*8|)*2t*7L', Et*16|t*16L]", "layout")
    assert told == (None, LayoutRule.AUTO, (9, 8, 8, 7), (16, 16))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et*8|(t*8|*2t*8L", "brackets of a pipeline layout must match"),
        ("[even, Et*8|t*8]", "strategy.layout.1: a pipeline layout must start with E and end with m and L"),
        ("ato", "must be a word, a string of Megatron or layers per chunk; got 'ato'"),
        ("Exx|tL", "is written with E t m L | * ( ) and numbers"),
        ("[]", "must be a word, a string of Megatron or layers per chunk"),
        ("true", "must be a word, a string of Megatron or layers per chunk"),
        ("[8, auto]", "strategy.layout.0: must be a word"),
        ("[8, 1.5]", "strategy.layout.1: must be a whole number"),
        ("Et*16|t*16mL", "must hold the model's MTP layers (m) 0 times"),
    ],
)
def test_a_layout_that_says_nothing_is_refused_at_its_key(text, message):
    assert message in refusal(f"{HEAD}strategy: {{layout: {text}}}\n")


def test_pieces_are_one_number_or_one_for_each_place():
    assert axis("8", "tp_chunks") == (Chunks.parse("8"),)
    assert axis("{mlp_out: 1}", "tp_chunks") == (Chunks(mlp_out=1),)
    assert axis("[2, {attention_in: 1, mlp_in: 3}, {powers_of_two: [4, 8]}]", "tp_chunks") == (
        Chunks.parse("2"), Chunks(attention_in=1, mlp_in=3), Chunks(), Chunks.parse("8"),
    )  # fmt: skip


def test_buckets_of_experts_are_bytes_or_none_of_their_own():
    assert axis("[null, 25e6, 0]", "expert_bucket_bytes") == (None, 25_000_000, 0)


FREE = ("fusion", "recompute_per_chunk", "tp_chunks", "expert_bucket_bytes", "layout")


@pytest.mark.parametrize("name", FREE)
def test_an_axis_may_be_left_to_a_sampler(name):
    space = parse_space(f"{HEAD}strategy: {{{name}: search}}\n", "x.yaml")
    assert space.axes[name] == (OPEN,)
    assert space.open_axes == (name,)
    assert not space.is_point
    again = parse_space(space.resolved_yaml(), "resolved.yaml")
    assert again == space
    assert pickle.loads(pickle.dumps(space)).axes[name][0] is OPEN
    for refused in (space.strategy, space.refuse_open, lambda: enumerate_space(space)):
        with pytest.raises(SpaceError) as caught:
            refused()
        remedy = "'search' leaves it to a sampler: use --sampler nsga2, or give values"
        assert str(caught.value) == f"small: strategy.{name}: {remedy}"


def test_every_axis_left_to_a_sampler_is_named():
    space = parse_space(f"{HEAD}strategy: {{layout: search, tp_chunks: search, tp: [1, 2]}}\n", "x.yaml")
    assert space.open_axes == ("tp_chunks", "layout")
    with pytest.raises(SpaceError, match=r"small: strategy\.tp_chunks, strategy\.layout: 'search' leaves"):
        space.strategy()


def test_references_of_an_open_axis_take_the_default():
    text = f"{HEAD}strategy: {{layout: search, fusion: search, zero_stage: 1}}\nreference: {{ours: {{pp: 4}}}}\n"
    assert parse_space(text, "x.yaml").references["ours"] == Strategy(pp=4, zero_stage=1)


def test_other_axes_are_not_left_to_a_sampler():
    assert {a.name for a in AXES if a.may_search} == set(FREE)
    assert "must be a whole number; got 'search'" in refusal(f"{HEAD}strategy: {{tp: search}}\n")


def test_overlap_flags_are_axes_of_their_own():
    space = parse_space(f"{HEAD}strategy: {{overlap: {{dp: [0, 1], ep: true}}}}\n", "x.yaml")
    assert (space.axes["overlap_dp"], space.axes["overlap_ep"], space.axes["overlap_tp"]) == ((0, 1), (1,), (0,))


def test_raw_size_is_the_product_of_axes_and_systems():
    text = HEAD.replace("num_chips: 64", "num_chips: [64, 128, 64]") + "strategy: {tp: [1, 2, 4], pp: [1, 2]}\n"
    space = parse_space(text, "x.yaml")
    assert [s.num_chips for s in space.systems] == [64, 128]
    assert space.raw_size == 12
    assert not space.is_point
    with pytest.raises(SpaceError, match="got tp \\(3 values\\), pp \\(2 values\\)"):
        space.strategy()
    with pytest.raises(SpaceError, match="a configuration has one; got 2"):
        _ = space.system


def test_references_take_what_the_space_fixes():
    text = (
        f"{HEAD}strategy: {{tp: [1, 2], zero_stage: 3}}\nreference: {{ours: {{pp: 4, recompute: [mlp, layernorm]}}}}\n"
    )
    point = parse_space(text, "x.yaml").references["ours"]
    assert point == Strategy(pp=4, zero_stage=3, recompute=Recompute.parse("layernorm+mlp"))


def test_objectives_have_the_direction_of_their_column_unless_told():
    given = parse_space(f"{HEAD}objectives: [mfu, num_gpus]\n", "x.yaml").objectives
    assert [(o.column, o.minimise) for o in given] == [("mfu", False), ("num_gpus", True)]
    told = parse_space(f"{HEAD}objectives: {{num_gpus: max}}\n", "x.yaml").objectives
    assert [(o.column, o.minimise) for o in told] == [("num_gpus", False)]


def test_overrides_go_over_the_file_and_under_nothing():
    text = f"{HEAD}strategy: {{tp: [1, 2]}}\nconstraints: ['tp <= 8']\n"
    sets = ("strategy.tp=4", "search.seed=7", "search.keep=all", "constraints.0='tp <= 4'", "system.num_chips=[8, 16]")
    space = parse_space(text, "x.yaml", overrides=(*sets, "strategy.tp=[2, 8]"))
    assert space.axes["tp"] == (2, 8)
    assert (space.options.seed, space.options.keep, space.options.sampler) == (7, Keep.ALL, Sampler.AUTO)
    assert space.constraints[0].expression.text == "tp <= 4"
    assert [s.num_chips for s in space.systems] == [8, 16]


@pytest.mark.parametrize("name", shipped_spaces())
def test_a_resolved_space_loads_back_to_an_equal_one(name):
    space = load_space(name)
    text = space.resolved_yaml()
    again = parse_space(text, "resolved.yaml")
    assert again == space
    assert again.resolved_yaml() == text


RICH = f"""{HEAD}
strategy:
  layout: [auto, null, [8, 8, 8, 8], "Et*9|(t*8|)*2t*7L"]
  fusion: [[], [fused_loss, flash_attention]]
  recompute: [none, [layernorm, mlp], block]
  recompute_per_chunk: [null, [2, 0, 0, 1]]
  tp_chunks: [4, {{attention_in: 1}}]
  expert_bucket_bytes: [null, 0, 1e8]
  sequence_parallel: [false, true]
objectives: {{mfu: maximise, num_gpus: minimise}}
constraints: ["schedule in ['1f1b', 'gpipe']", 'mfu >= 0.4']
search: {{sampler: tpe, keep: all, block_size: 10, max_candidates: 1e6, workers: 2, seed: 3}}
reference: {{a: {{pp: 4, fusion: none}}, off: {{layout: null, context_parallel: ulysses}}}}
"""


def test_every_kind_of_value_survives_resolving():
    text = RICH.replace("num_chips: 64", "num_chips: [64, 128]").replace("name: small", "name: '1e5'")
    space = parse_space(text, "x.yaml")
    assert space.name == "1e5"
    assert parse_space(space.resolved_yaml(), "resolved.yaml") == space


def test_a_resolved_space_needs_no_catalogue(monkeypatch):
    text = parse_space(RICH, "x.yaml").resolved_yaml()
    for name in ("systems.cluster", "systems.system_from_mapping", "space.load_model"):
        monkeypatch.delattr(f"search.{name}")
    assert parse_space(text, "resolved.yaml").model.name == "llama3_8b"


def test_a_space_travels_to_other_processes():
    space = load_space("llama3_8b_small")
    assert pickle.loads(pickle.dumps(space)) == space
    assert copy.deepcopy(space) == space


@given(st.data())
def test_any_one_point_survives_resolving(data):
    values = {
        "tp": st.integers(1, 64), "bucket_bytes": st.integers(0, 10**12), "schedule": st.sampled_from(list(Schedule)),
        "recompute": st.sets(st.sampled_from([m.value for m in Module]), min_size=1).map(list).map(Recompute.parse),
        "fusion": st.frozensets(st.sampled_from(list(Fusion))), "overlap_ep": st.integers(0, 1),
        "tp_chunks": st.builds(Chunks, mlp_in=st.integers(1, 9)), "expert_bucket_bytes": st.none() | st.integers(0, 9),
        "recompute_per_chunk": st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
        "layout": st.sampled_from([None, LayoutRule.AUTO, (4, 0, 9), (32,)]),
    }  # fmt: skip
    space = parse_space(HEAD, "x.yaml")
    axes = {name: (data.draw(values[name]),) if name in values else old for name, old in space.axes.items()}
    changed = type(space)(
        name=space.name, model=space.model, systems=space.systems, workload=space.workload, axes=axes,
        objectives=space.objectives,
    )  # fmt: skip
    again = parse_space(changed.resolved_yaml(), "resolved.yaml")
    assert again == changed
    assert axis_values(again.strategy()) == {name: value for name, (value,) in axes.items()}


def test_routing_is_balanced_unless_the_workload_says_how_skewed_it_is():
    assert parse_space(HEAD, "x.yaml").workload.routing_skew == 0
    text = HEAD.replace("llama3_8b", "mixtral_8x7b").replace("128}", "128, routing_skew: 0.3}")
    space = parse_space(text, "x.yaml")
    assert space.workload.routing_skew == 0.3
    assert parse_space(space.resolved_yaml(), "resolved.yaml") == space
    message = refusal(text, ("workload.routing_skew=1.8",))
    assert "workload.routing_skew: routing_skew (1.8) must be at most sqrt(num_experts / top_k - 1) = 1.732" in message


def test_shipped_spaces_load_by_name():
    assert shipped_spaces() == [
        "capacity_deepseek_v3", "deepseek_v3", "deepseek_v3_wide", "gpt3_175b", "gpt_oss_120b", "kimi_k2",
        "llama3_405b", "llama3_70b", "llama3_70b_wide", "llama3_8b_small", "nemotron_h_56b", "qwen3_235b",
    ]  # fmt: skip
    assert shipped_spaces(answers=True) == ["deepseek_v3_decode", "llama3_70b_decode"]
    space = load_space("deepseek_v3")
    assert (space.system.num_chips, space.workload.seq, space.workload.global_batch) == (2048, 4096, 15360)
    published = space.references["published"]
    assert (published.tp, published.pp, published.ep, published.micro_batch, published.zero_stage) == (1, 16, 64, 1, 1)
    assert published.schedule is Schedule.DUALPIPE
    assert str(published.recompute) == "layernorm+mla_up_proj"
    assert (published.overlap.tp, published.overlap.ep, published.overlap.pp, published.overlap.dp) == (0, 1, 1, 1)


@pytest.mark.parametrize("name", shipped_spaces())
def test_references_of_shipped_spaces_lie_in_the_space(name):
    space = load_space(name)
    for reference in space.references.values():
        outside = {k: v for k, v in axis_values(reference).items() if v not in space.axes[k]}
        idle = {"recompute_layers": 0} if reference.recompute.kind is not RecomputeKind.BLOCK else {}
        idle |= {"bucket_bytes": Strategy().bucket_bytes} if reference.zero_stage == 3 else {}
        assert outside.items() <= idle.items()


def test_an_unknown_space_names_the_nearest():
    with pytest.raises(SpaceError, match="did you mean 'deepseek_v3'"):
        load_space("deepseek_v33")


def test_a_model_path_starts_at_the_space_and_then_here(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    content = (spaces.MODELS / "llama3_8b.yaml").read_text()
    (tmp_path / "here" / "mine.yaml").write_text(content.replace("name: llama3_8b", "name: here"))
    space = tmp_path / "there" / "space.yaml"
    space.write_text(HEAD.replace("model: llama3_8b", "model: mine.yaml"))
    monkeypatch.chdir(tmp_path / "here")
    assert load_space(space).model.name == "here"
    (tmp_path / "there" / "mine.yaml").write_text(content.replace("name: llama3_8b", "name: beside"))
    assert load_space(space).model.name == "beside"


def test_a_model_may_be_described_in_place():
    text = HEAD.replace("llama3_8b", "{name: tiny, num_layers: 2, hidden: 64, ffn: 128, num_heads: 4, num_kv_heads: 2, "
                        "head_dim: 16, vocab: 1000}")  # fmt: skip
    assert parse_space(text, "x.yaml").model.num_layers == 2
    assert "x.yaml:2: model:" in refusal(text.replace("hidden: 64", "hiden: 64"))


MISTAKES = [
    ("strategy: {tpp: 2}", "x.yaml:5: strategy.tpp: unknown key 'tpp'; did you mean 'tp'"),
    ("strateg: {}", "x.yaml:5: strateg: unknown key 'strateg'; did you mean 'strategy'"),
    ("strategy: {overlap: {dpp: 1}}", "x.yaml:5: strategy.overlap.dpp: unknown key 'dpp'; did you mean 'pp'"),
    ("search: {sampel: auto}", "did you mean 'sampler'"),
    ("strategy: {dp: 8}", "dp is what remains"),
    ("strategy:\n  tp: [1,\n    two]", "x.yaml:7: strategy.tp.1: must be a whole number; got 'two'; accepted 1 to"),
    ("strategy: {tp: true}", "strategy.tp: must be a whole number; got True"),
    ("strategy: {tp: '8'}", "must be a whole number; got '8'"),
    ("strategy: {tp: 1.5}", "must be a whole number; got 1.5"),
    ("strategy: {tp: .nan}", "must be a whole number; got nan"),
    ("strategy: {tp: .inf}", "must be a whole number; got inf"),
    ("strategy: {tp: 0}", "must be at least 1 and at most 1000000; got 0"),
    ("strategy: {tp: -2}", "must be at least 1"),
    ("strategy: {tp: 1e30}", "at most 1000000"),
    ("strategy: {tp: null}", "must be a whole number; got None"),
    ("strategy: {tp: []}", "strategy.tp: a list must not be empty"),
    ("strategy: {tp: [[1]]}", "strategy.tp.0: must be a whole number; got [1]"),
    ("strategy: {tp: {range: [1, 1e12]}}", "at most 100000 values, but this has 1000000000000"),
    ("strategy: {tp: [{range: [1, 60000]}, {range: [60001, 120000]}]}", "at most 100000 values"),
    ("strategy: {tp: {range: [5, 1]}}", "strategy.tp.range: the first bound must not exceed the last; got [5, 1]"),
    ("strategy: {tp: {range: [1, 5, 0]}}", "a step must be at least 1; got 0"),
    ("strategy: {tp: {range: 5}}", "must be a list of bounds; got 5"),
    ("strategy: {tp: {powers_of_two: [1, 12]}}", "must be a power of two; got 12"),
    ("strategy: {tp: {powers_of_two: [0, 8]}}", "must be a power of two; got 0"),
    ("strategy: {tp: {rnge: [1, 5]}}", "a mapping must hold one of range, powers_of_two"),
    ("strategy: {schedule: dualpip}", "did you mean 'dualpipe'"),
    ("strategy: {schedule: [1f1b, 3]}", "strategy.schedule.1: must be a known name; got 3"),
    ("strategy: {precision: fp9}", "must be a known name; did you mean 'fp8'"),
    ("strategy: {sequence_parallel: 1}", "must be true or false; got 1"),
    ("strategy: {overlap: {dp: 2}}", "strategy.overlap.dp: must be at least 0 and at most 1; got 2"),
    ("strategy: {overlap: 1}", "strategy.overlap: must be a mapping; got 1"),
    ("strategy: {zero_stage: 4}", "at most 3; got 4"),
    ("strategy: {recompute: [layernorm, mlp]}", "ambiguous"),
    ("strategy: {recompute: [[]]}", "a list must not be empty"),
    ("strategy: {recompute: layernom}", "did you mean 'layernorm'"),
    ("strategy: {recompute: full+mlp}", "must be a known name"),
    ("strategy: {recompute: true}", "must be a kind or module names; got True"),
    ("strategy: {fusion: 3}", "must be a list of names; got 3"),
    ("strategy: {layout: [4, -1]}", "strategy.layout.1: must be at least 0"),
    ("strategy: {layout: 4}", "must be a word, a string of Megatron or layers per chunk; got 4"),
    ("strategy: {recompute_per_chunk: 2}", "must be null or recomputed layers per chunk; got 2"),
    ("strategy: {recompute_per_chunk: [2, -1]}", "strategy.recompute_per_chunk.1: must be at least 0"),
    ("strategy: {tp_chunks: 0}", "strategy.tp_chunks: must be at least 1 and at most 1024; got 0"),
    ("strategy: {tp_chunks: {mlp_ni: 2}}", "strategy.tp_chunks.mlp_ni: unknown key 'mlp_ni'; did you mean 'mlp_in'"),
    ("strategy: {tp_chunks: [2, {mlp_in: 0}]}", "strategy.tp_chunks.1.mlp_in: must be at least 1"),
    ("strategy: {expert_bucket_bytes: -1}", "strategy.expert_bucket_bytes: must be at least 0"),
    ("strategy: {redundant_experts: -1}", "strategy.redundant_experts: must be at least 0"),
    ("strategy: {tp_chunks: [4, search]}", "strategy.tp_chunks.1: must be a whole number; got 'search'"),
    (
        "reference: {a: {layout: search}}",
        "reference.a.layout: must be a word, a string of Megatron or layers per chunk; got 'search'",
    ),
    ("strategy: 3", "x.yaml:5: strategy: must be a mapping; got 3"),
    ("objectives: [step_time]", "did you mean 'step_time_s'"),
    ("objectives: []", "must name 1 to 4 columns; got []"),
    ("objectives: [mfu, hfu, mfu_bf16, num_gpus, jitter_s]", "must name 1 to 4 columns"),
    ("objectives: [mfu, mfu]", "a column must appear once"),
    ("objectives: {mfu: up}", "objectives.mfu: must be a known name; got 'up'"),
    ("constraints: 'tp < 8'", "constraints: must be a list"),
    ("constraints: ['tpp < 8']", "x.yaml:5: constraints.0: a name must be known; did you mean 'tp'"),
    ("constraints: [8]", "constraints.0: must be an expression; got 8"),
    ("search: {sampler: best}", "search.sampler: must be a known name; got 'best'; accepted auto"),
    ("search: {seed: -1}", "search.seed: must be at least 0"),
    ("search: {seed: null}", "search.seed: must be a whole number"),
    ("search: {workers: 0}", "search.workers: must be at least 1"),
    ("reference: {a: {tp: [1, 2]}}", "reference.a.tp: must be a whole number; got [1, 2]"),
    ("reference: {a: {tpp: 1}}", "reference.a.tpp: unknown key"),
    ("reference: {a: {}}", "reference.a: must hold at least one key"),
    ("reference: {../a: {tp: 1}}", "a name must be letters"),
    ("name: other", "x.yaml:5: name: a key must appear once; got it again after x.yaml:1"),
    ("strategy: {tp: 1, tp: 2}", "strategy.tp: a key must appear once"),
    ("strategy:\n\ttp: 1", "x.yaml:6: must be YAML"),
    ("strategy: {tp: 1", "must be YAML"),
    ("strategy: {tp: !!python/name:os.system }", "tags are not read"),
    ("strategy: {tp: \0}", "x.yaml:5: must be YAML; got character #x00"),
    ("---\nname: second", "must hold one document"),
    ("strategy: {<<: {tp: 1}}", "merge keys (<<) are not read"),
    ("strategy: {[1]: 2}", "a key must be text"),
    ("strategy: {tp: *none}", "an alias must follow its complete anchor"),
    ("strategy: &a {tp: *a}", "an alias must follow its complete anchor"),
    (f"strategy: {{tp: {'[' * 40}{']' * 40}}}", "values must nest at most 32 deep"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_each_mistake_in_a_section_earns_one_line_with_its_place(text, message):
    got = refusal(f"{HEAD}{text}\n")
    assert message in got
    assert got.startswith("x.yaml:")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: small", "name: ../up", "x.yaml:1: name: must be letters"),
        ("name: small", "name: 8", "name: must be letters"),
        ("model: llama3_8b", "", "model: is required, but absent"),
        ("model: llama3_8b", "model: llama3_8", "x.yaml:2: model: model 'llama3_8' is neither"),
        ("model: llama3_8b", "model: 8", "must be a name, a path or a mapping; got 8"),
        ("dgx_h100", "dgx_h10", "x.yaml:3: system: unknown cluster 'dgx_h10'"),
        ("num_chips: 64", "num_chips: 0", "system.num_chips: must be at least 1"),
        ("num_chips: 64", "num_chips: []", "system.num_chips: must have 1 to"),
        ("num_chips: 64", "num_chips: [64, true]", "system.num_chips.1: must be a whole number; got True"),
        ("num_chips: 64", "chips: 64", "x.yaml:3: system: unknown key"),
        ("{cluster: dgx_h100, num_chips: 64}", "[]", "system: a list must not be empty"),
        ("{cluster: dgx_h100, num_chips: 64}", "8", "system: must be a name or a mapping; got 8"),
        ("{cluster: dgx_h100, num_chips: 64}", "{spec: {name: 3}}", "spec.chip is required"),
        ("seq: 8192", "seq: 0", "workload.seq: must be at least 1"),
        ("seq: 8192", "seq: [1, 2]", "workload.seq: must be a whole number; got [1, 2]"),
        ("seq: 8192, ", "", "workload.seq: is required, but absent"),
        (
            "seq: 8192",
            "seq: 8192, routing_skew: -1",
            "workload.routing_skew: routing_skew must be a number of at least",
        ),
        ("seq: 8192", "seq: 8192, routing_skew: high", "workload.routing_skew: must be a number; got 'high'"),
        ("seq: 8192", "seq: 8192, routing_skw: 1", "did you mean 'routing_skew'"),
        ("seq: 8192", "sequence: 8192", "workload.sequence: unknown key 'sequence'; did you mean 'seq'"),
    ],
)
def test_each_mistake_in_the_head_earns_one_line_with_its_place(old, new, message):
    assert message in refusal(HEAD.replace(old, new))


@pytest.mark.parametrize("text", ["", "# nothing\n", "[1, 2]", "text", "8"])
def test_a_space_must_be_a_mapping(text):
    assert "a space must be a mapping" in refusal(text)


def test_a_bomb_of_aliases_is_refused_before_it_goes_off():
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "at most 100000 values, aliases written out" in refusal("\n".join(lines))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.tpp=2", "--set: strategy.tpp: unknown key 'tpp'; did you mean 'tp'"),
        ("strategy.tp=0", "--set: strategy.tp: must be at least 1"),
        ("strategy.tp", "--set strategy.tp: an override must be KEY=VALUE"),
        ("=2", "must be KEY=VALUE"),
        ("strategy..tp=2", "must be KEY=VALUE"),
        ("strategy.tp=[1", "--set strategy.tp:2: must be YAML"),
        ("model.hidden=2", "a single value has no key 'hidden'"),
        ("constraints.x=1", "a list is entered by an index; got 'x'"),
    ],
)
def test_a_wrong_override_says_so(override, message):
    assert message in refusal(f"{HEAD}constraints: ['tp < 9']\n", (override,))


def test_files_that_are_no_text_are_refused(tmp_path):
    with pytest.raises(SpaceError, match="got a directory"):
        load_space(tmp_path)
    with pytest.raises(SpaceError, match="No such file"):
        load_space(tmp_path / "absent.yaml")
    with pytest.raises(SpaceError, match="must be readable"):
        load_space("nul\0.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: a\nmodel: \xff\xfe\n")
    with pytest.raises(SpaceError, match=r"binary\.yaml:2: must be UTF-8; got byte 0xff"):
        load_space(binary)
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(SpaceError, match="at most 1048576 bytes"):
        load_space(huge)


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(SpaceError, match="must be readable"):
        load_space(tmp_path / "loop.yaml")


def test_an_override_that_is_not_utf_8_is_refused():
    assert "must be UTF-8" in refusal(HEAD, ("strategy.tp=\udcff",))


@given(st.text(max_size=200))
def test_no_text_does_more_than_be_refused(text):
    with pytest.raises(SpaceError):
        parse_space(text, "x.yaml")


def test_one_recompute_module_each_is_written_as_it_is_read():
    """A flat list of modules could be one choice, and is refused."""
    space = parse_space(f"{HEAD}strategy: {{recompute: [[mlp], [layernorm]]}}\n")
    assert parse_space(space.resolved_yaml()) == space
