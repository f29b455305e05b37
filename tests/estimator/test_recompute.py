"""What runs again, and what that frees."""

from __future__ import annotations

import itertools

import pytest

from estimator.cost.table import Again
from estimator.graph import BlockKind
from estimator.op import Component, OpKind, Phase, Traffic
from estimator.passes import recompute
from estimator.strategy import Fusion, Module, Recompute, RecomputeKind, Strategy
from tests.estimator.cases import (
    DEEPSEEK,
    FULL,
    GPT,
    LLAMA,
    MIXTRAL,
    NONE,
    PLAIN,
    SEQ,
    TINY,
    UNFUSED,
    again,
    lowered,
    prices,
    saved,
)

FLASH = Strategy(fusion=frozenset({Fusion.FLASH_ATTENTION}))


def selective(*modules):
    return Recompute(kind=RecomputeKind.SELECTIVE, modules=frozenset(modules))


def reruns(model, kind, choice, strategy=PLAIN):
    b = recompute(lowered(model, strategy), choice).blocks[kind]
    return {op.name for op in b.of_phase(Phase.RECOMPUTE)}


def freed(model, kind, choice, strategy=PLAIN):
    """Bytes a token that recompute no longer keeps."""
    return saved(model, kind, strategy) - saved(model, kind, strategy, choice)


def test_none_runs_nothing_again():
    assert recompute(lowered(LLAMA), NONE) == lowered(LLAMA)


@pytest.mark.parametrize("choice", [FULL, Recompute.parse("block")])
def test_full_runs_every_forward_op_of_a_layer_again(choice):
    graph = lowered(DEEPSEEK, Strategy(tp=2, ep=4, sequence_parallel=True))
    for kind in (BlockKind.DENSE, BlockKind.MOE):
        b = recompute(graph, choice).blocks[kind]
        again_names = [op.name for op in b.of_phase(Phase.RECOMPUTE)]
        assert again_names == [op.name for op in b.of_phase(Phase.FORWARD)]
        assert any(op.kind is OpKind.COLLECTIVE for op in b.of_phase(Phase.RECOMPUTE))


def test_embedding_and_heads_never_run_again():
    graph = recompute(lowered(DEEPSEEK), FULL)
    assert not list(graph.blocks[BlockKind.EMBEDDING].of_phase(Phase.RECOMPUTE))
    assert not list(graph.blocks[BlockKind.HEAD].of_phase(Phase.RECOMPUTE))
    mtp = list(graph.blocks[BlockKind.MTP].of_phase(Phase.RECOMPUTE))
    assert mtp
    assert all(op.component is not Component.HEAD for op in mtp)


def test_norms_free_their_outputs_and_statistics():
    assert freed(LLAMA, BlockKind.DENSE, selective(Module.LAYERNORM)) == 2 * 2 * LLAMA.hidden + 2 * 4


def test_an_activation_frees_its_output():
    assert freed(LLAMA, BlockKind.DENSE, selective(Module.MLP_ACTIVATION)) == 2 * LLAMA.ffn
    assert freed(LLAMA, BlockKind.DENSE, selective(Module.MLP_ACTIVATION), FLASH) == 2 * 2 * LLAMA.ffn


def test_an_mlp_frees_all_but_its_input():
    assert freed(LLAMA, BlockKind.DENSE, selective(Module.MLP)) == 6 * LLAMA.ffn
    assert freed(GPT, BlockKind.DENSE, selective(Module.MLP)) == 4 * GPT.ffn


def test_an_mlp_frees_its_hidden_layers_also_where_its_activation_is_formed_again_anyway():
    """Block-scaled fp8 keeps gate and up at one byte each, and nothing else behind the norm."""
    assert freed(LLAMA, BlockKind.DENSE, selective(Module.MLP), Strategy(precision="fp8_block")) == 2 * LLAMA.ffn


def test_the_unfused_core_frees_its_square_and_keeps_its_output_for_the_projection():
    """Korthikanti 2022, arXiv:2205.05198, Eq. 6: 5as/h goes, 34 stays (less dropout: tests/estimator/test_build.py)."""
    s = Strategy(fusion=UNFUSED)
    assert freed(LLAMA, BlockKind.DENSE, selective(Module.CORE_ATTENTION), s) == 2 * LLAMA.num_heads * SEQ


def test_the_fused_core_frees_its_statistics_only():
    assert freed(LLAMA, BlockKind.DENSE, selective(Module.CORE_ATTENTION)) == 4 * LLAMA.num_heads


def test_mla_up_projections_free_queries_keys_and_values():
    mla, a = DEEPSEEK.mla, DEEPSEEK.num_heads
    qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    want = 2 * a * (2 * qk + mla.v_head_dim)
    assert freed(DEEPSEEK, BlockKind.MOE, selective(Module.MLA_UP_PROJ)) == want


def test_latents_stay_for_the_up_projections_unless_their_norms_run_again():
    mla = DEEPSEEK.mla
    both = freed(DEEPSEEK, BlockKind.MOE, selective(Module.MLA_UP_PROJ, Module.LAYERNORM))
    apart = sum(freed(DEEPSEEK, BlockKind.MOE, selective(m)) for m in (Module.MLA_UP_PROJ, Module.LAYERNORM))
    assert both == apart
    norms = freed(DEEPSEEK, BlockKind.MOE, selective(Module.LAYERNORM))
    # four norms: input, after attention (kept by the router in fp32 and by the MLP in bf16), two latents
    assert norms == (2 + 4 + 2) * DEEPSEEK.hidden + 2 * (mla.q_lora_rank + mla.kv_lora_rank) + 4 * 4


def test_experts_free_rows_and_hidden_layers():
    moe = MIXTRAL.moe
    rows = moe.top_k * (2 * MIXTRAL.hidden + 3 * 2 * moe.ffn)
    router = 4 * moe.num_experts + 4 * moe.top_k
    assert freed(MIXTRAL, BlockKind.MOE, selective(Module.MOE)) == rows + router
    assert freed(MIXTRAL, BlockKind.MOE, selective(Module.MOE_ACTIVATION)) == moe.top_k * 2 * moe.ffn


@pytest.mark.parametrize("module", list(Module))
@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_every_module_runs_its_own_ops_again_and_no_others(module, model):
    graph = lowered(model)
    for kind in (k for k in graph.kinds if k.is_layer):
        named = {op.name for op in graph.blocks[kind].of_phase(Phase.FORWARD) if module.value in op.modules}
        assert reruns(model, kind, selective(module)) == named


def test_recomputed_experts_send_their_rows_again():
    graph = recompute(lowered(MIXTRAL, Strategy(ep=8)), selective(Module.MOE))
    sent = [op for op in graph.blocks[BlockKind.MOE].of_phase(Phase.RECOMPUTE) if op.collective is Traffic.ALL_TO_ALL]
    assert len(sent) == 2


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_block"])
@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_more_recompute_never_keeps_more_and_never_takes_less_time(model, precision):
    subsets = [frozenset(c) for size in range(3) for c in itertools.combinations(Module, size + 1)]
    choices = (NONE, FULL, *(selective(*chosen) for chosen in subsets))
    table = prices(model, Strategy(precision=precision), choices=choices)
    kept, seconds = table.again[0, :, :, Again.SAVED_BYTES], table.again[0, :, :, Again.R_COMP]
    for i, less in enumerate(choices):
        for j, more in enumerate(choices):
            if more is FULL or (less is not FULL and less.modules <= more.modules):
                assert (kept[j] <= kept[i]).all(), (str(less), str(more))
                assert (seconds[j] >= seconds[i] * (1 - 1e-12)).all()  # sums of the same prices in another order


def test_what_recompute_brings_back_is_alive_while_its_block_runs():
    """Kept plus working set of one block are what they were without recompute: nothing is freed for nothing."""
    for choice in (FULL, selective(Module.MLP), selective(Module.LAYERNORM)):
        kept = [again(LLAMA, BlockKind.DENSE, Again.SAVED_BYTES, choice=c) for c in (NONE, choice)]
        live = [again(LLAMA, BlockKind.DENSE, Again.LIVE_BYTES, choice=c) for c in (NONE, choice)]
        assert kept[0] + live[0] == kept[1] + live[1]


def test_recomputed_flops_are_the_forwards():
    """Full recompute runs 2N FLOPs a token again, against 6N of forward and backward."""
    flops = again(LLAMA, BlockKind.DENSE, Again.FLOPS, choice=FULL) / SEQ
    layer = LLAMA.hidden * (16 + 2 * 4 + 16) * 64 + 3 * LLAMA.hidden * LLAMA.ffn
    assert flops == 2 * layer + SEQ * LLAMA.num_heads * 2 * LLAMA.head_dim


def test_a_name_that_no_module_has_is_an_error():
    with pytest.raises(ValueError, match="recompute must name one of"):
        Recompute.parse(["layer_norm"])
