"""The spaces that ship: their reference layouts are the published ones, run, and do not beat the front."""

from __future__ import annotations

import re

import numpy as np
import pytest

import spaces
from estimator.layout import even_layers
from estimator.rules import Case, check
from estimator.step import evaluate
from estimator.strategy import Fusion, RankOrder, RecomputeKind, Schedule
from search.space import Sampler, load_space, shipped_spaces
from tests.found import sweep

EXACT = [name for name in shipped_spaces() if load_space(name).options.sampler is Sampler.AUTO]
REFERENCES = [(name, reference) for name in shipped_spaces() for reference in load_space(name).references]
# Of several systems, the one that the references were published for: the front over all of them can only be better.
PART = {"capacity_deepseek_v3": ("system={cluster: dgx_h800, num_chips: 2048}",)}
QUICK = {"capacity_deepseek_v3", "llama3_8b_small", "llama3_70b"}  # seconds; the others have hundreds of millions


def published(space, name):
    """A reference layout with what follows from it: dp and micro-batches."""
    loaded = load_space(space)
    strategy = loaded.references[name]
    case = Case.of(loaded.model, strategy, loaded.system, loaded.workload)
    return strategy, int(case.dp[0]), int(case.num_micro_batches[0])


@pytest.mark.parametrize("name", shipped_spaces())
def test_a_shipped_space_says_where_it_comes_from_and_has_a_reference(name):
    head = re.match(r"(?:#.*\n)+", (spaces.SPACES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert head
    assert load_space(name).references


@pytest.mark.parametrize(("name", "reference"), REFERENCES)
def test_a_reference_is_legal_and_fits(name, reference):
    """On one of the systems, where a space has several."""
    space = load_space(name)
    strategy = space.references[reference]
    legal = [s for s in space.systems if not check(Case.of(space.model, strategy, s, space.workload))[0]]
    assert any(evaluate(space.model, strategy, system, space.workload, gate=True).feasible for system in legal)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXACT]
)
def test_the_front_has_a_point_no_worse_than_each_reference_in_every_objective(name):
    found = sweep(name, *PART.get(name, ()))
    space = found.space
    assert all(o.minimise for o in space.objectives)
    for reference, strategy in space.references.items():
        result = evaluate(space.model, strategy, space.system, space.workload)
        mine = [float(result.columns[o.column]) for o in space.objectives]
        assert any(np.all(np.less_equal(point, mine)) for point in found.front.values()), reference


@pytest.mark.parametrize(("chips", "dp", "sequences"), [(16384, 128, 16), (8192, 64, 32)])
def test_the_layout_of_llama3_405b_is_that_of_table_4(chips, dp, sequences):
    """arXiv:2407.21783, table 4: tp 8, cp 1, pp 16; dp and sequences a group; 16 M tokens a step at 8192."""
    space = load_space("llama3_405b", (f"system.num_chips={chips}",))
    strategy = space.references["published"]
    case = Case.of(space.model, strategy, space.system, space.workload)
    assert (strategy.tp, strategy.cp, strategy.pp, case.dp[0]) == (8, 1, 16, dp)
    assert space.workload.global_batch == dp * sequences
    assert space.workload.seq * space.workload.global_batch == 16 * 1024**2
    assert not check(case)[0]


def test_the_long_sequences_of_table_4_are_legal_and_fit():
    """arXiv:2407.21783, table 4: 131,072 tokens a sequence, cp 16, dp 8, 16 sequences a group."""
    long = ("workload.seq=131072", "workload.global_batch=128", "reference.published.cp=16")
    space = load_space("llama3_405b", (*long, "reference.published.context_parallel=all-gather"))
    result = evaluate(space.model, space.references["published"], space.system, space.workload, gate=True)
    assert result.feasible


def test_llama3_405b_starts_with_the_embedding_alone_and_ends_with_the_head_alone():
    """arXiv:2407.21783, section 3.3.2; and the dimensions in the order tp, cp, pp, dp."""
    strategy = load_space("llama3_405b").references["published"]
    assert strategy.layout is None
    assert even_layers(126, strategy.pp * strategy.vpp) == (0, *[1] * 126, 0)
    assert strategy.rank_order is RankOrder.TP_CP_PP_DP
    assert (strategy.zero_stage, strategy.recompute.kind) == (2, RecomputeKind.NONE)


def test_the_layouts_of_gpt3_are_those_of_the_papers():
    """arXiv:2104.04473, table 2 (model-parallel size 96 of 1,536); arXiv:2205.05198, table 3."""
    narayanan, dp, _ = published("gpt3_175b", "narayanan_2021")
    assert (narayanan.tp * narayanan.pp, dp, narayanan.micro_batch) == (96, 16, 1)
    assert narayanan.recompute.kind is RecomputeKind.FULL
    korthikanti, dp, per_group = published("gpt3_175b", "korthikanti_2022")
    assert (korthikanti.tp, korthikanti.pp, korthikanti.vpp, korthikanti.micro_batch) == (8, 8, 3, 1)
    assert (korthikanti.schedule, dp * 64, per_group) == (Schedule.INTERLEAVED, 1536, 64)
    assert korthikanti.sequence_parallel
    assert str(korthikanti.recompute) == "core_attn"
    for strategy in (narayanan, korthikanti):
        assert Fusion.FLASH_ATTENTION not in strategy.fusion  # arXiv:2205.14135 came later


def test_the_layouts_of_qwen3_are_those_of_its_recipes():
    """Megatron-Bridge: recipe qwen3_235b_a22b_pretrain_config, and the H100 preset for 256 chips."""
    recipe, dp, _ = published("qwen3_235b", "recipe")
    assert (recipe.tp, recipe.cp, recipe.pp, recipe.ep, recipe.etp, dp) == (4, 2, 16, 8, 1, 2)
    # Embedding and loss count as a layer each: 96 over 16 stages.
    assert even_layers(94, recipe.pp) == (5, *[6] * 14, 5)
    preset, dp, _ = published("qwen3_235b", "preset")
    assert (preset.tp, preset.cp, preset.pp, preset.vpp, preset.ep, preset.etp, dp) == (2, 1, 8, 4, 32, 1, 16)
    assert even_layers(94, preset.pp * preset.vpp) == (2, *[3] * 30, 2)


def test_the_layout_of_kimi_k2_is_that_of_its_report():
    """arXiv:2507.20534, sections 2.4 and 2.5: 256 chips hold a model, 67 M tokens a step."""
    space = load_space("kimi_k2")
    strategy, dp, _ = published("kimi_k2", "published")
    assert (strategy.pp * strategy.ep, dp * strategy.pp, strategy.zero_stage) == (256, 2048, 1)
    assert (strategy.schedule, strategy.offload.activations) == (Schedule.INTERLEAVED, 1)
    assert round(space.workload.seq * space.workload.global_batch / 1e6) == 67


def test_nemotron_h_trains_one_sequence_per_replica():
    """6,144 chips (arXiv:2504.03624); sequence 8192, batch 768 and tp 8 of Megatron-Bridge's recipes."""
    strategy, dp, per_group = published("nemotron_h_56b", "recipe")
    assert (strategy.tp, strategy.pp, dp, per_group) == (8, 1, 768, 1)
    assert strategy.sequence_parallel


def test_the_layouts_of_gpt_oss_are_those_of_its_preset_and_recipe():
    preset, dp, _ = published("gpt_oss_120b", "preset")
    assert (preset.tp, preset.pp, preset.ep, preset.etp, dp, str(preset.recompute)) == (
        1, 4, 8, 1, 16, "layernorm+moe_act",
    )  # fmt: skip
    recipe, dp, _ = published("gpt_oss_120b", "recipe")
    assert (recipe.tp, recipe.pp, recipe.ep, recipe.sequence_parallel, dp) == (2, 4, 16, True, 8)
