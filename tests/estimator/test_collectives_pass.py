"""Which communication a split makes necessary, and how many bytes it carries."""

from __future__ import annotations

from collections import Counter

import pytest

from estimator.graph import BlockKind
from estimator.op import Phase, Traffic
from estimator.strategy import ContextParallel, Strategy
from tests.estimator.cases import DEEPSEEK, GPT, LLAMA, MIXTRAL, SEQ, block, named, traffic

BSH = SEQ * LLAMA.hidden * 2  # bytes of one micro-batch's hidden states in bf16
F, B = Phase.FORWARD, Phase.BACKWARD
AR, AG, RS, A2A, RING = (
    Traffic.ALL_REDUCE, Traffic.ALL_GATHER, Traffic.REDUCE_SCATTER, Traffic.ALL_TO_ALL, Traffic.RING
)  # fmt: skip


def of_group(b, group, *phases):
    return Counter((kind, payload) for kind, name, payload in traffic(b, *phases) if name == group)


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=lambda m: m.name)
def test_a_layer_all_reduces_twice_forward_and_twice_backward(model):
    """Shoeybi 2019, arXiv:1909.08053, figure 4: q, k, v share an input and so do gate and up."""
    b = block(model, BlockKind.DENSE, Strategy(tp=4))
    assert of_group(b, "tp", F) == {(AR, BSH): 2}
    assert of_group(b, "tp", B) == {(AR, BSH): 2}


def test_sequence_parallelism_gathers_and_scatters_instead_and_gathers_again_in_backward():
    """Korthikanti 2022, arXiv:2205.05198, section 4.2.2: g and its dual; gathered inputs are not kept."""
    b = block(LLAMA, BlockKind.DENSE, Strategy(tp=4, sequence_parallel=True))
    assert of_group(b, "tp", F) == {(AG, BSH): 2, (RS, BSH): 2}
    assert of_group(b, "tp", B) == {(AG, BSH): 2 + 2, (RS, BSH): 2}


def test_the_embedding_sums_its_looked_up_rows():
    assert of_group(block(LLAMA, BlockKind.EMBEDDING, Strategy(tp=4)), "tp", F) == {(AR, BSH): 1}
    b = block(LLAMA, BlockKind.EMBEDDING, Strategy(tp=4, sequence_parallel=True))
    assert of_group(b, "tp", F) == {(RS, BSH): 1}


def test_a_vocabulary_parallel_loss_exchanges_three_numbers_a_token():
    assert of_group(block(LLAMA, BlockKind.HEAD, Strategy(tp=4)), "tp", F) == {(AR, SEQ * 3 * 4): 1}


def test_a_ring_passes_the_keys_and_values_of_the_whole_sequence_and_twice_that_back():
    kv = SEQ * 2 * LLAMA.num_kv_heads * LLAMA.head_dim * 2
    b = block(LLAMA, BlockKind.DENSE, Strategy(cp=4, context_parallel=ContextParallel.RING))
    assert of_group(b, "cp", F) == {(RING, kv): 1}
    assert of_group(b, "cp", B) == {(RING, kv): 2}


def test_an_all_gather_of_keys_and_values_is_gathered_again_and_scattered_in_backward():
    kv = SEQ * 2 * LLAMA.num_kv_heads * LLAMA.head_dim * 2
    b = block(LLAMA, BlockKind.DENSE, Strategy(cp=4, context_parallel=ContextParallel.ALL_GATHER))
    assert of_group(b, "cp", F) == {(AG, kv): 1}
    assert of_group(b, "cp", B) == {(AG, kv): 1, (RS, kv): 1}


def test_ulysses_exchanges_a_ranks_share_of_queries_keys_values_and_output():
    """Jacobs 2023, arXiv:2309.14509, section 3.2."""
    a, g, d = LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_dim
    share = SEQ / 4 * (2 * a + 2 * g) * d * 2
    b = block(LLAMA, BlockKind.DENSE, Strategy(cp=4, context_parallel=ContextParallel.ULYSSES))
    assert of_group(b, "cp", F) == {(A2A, share): 1}
    assert of_group(b, "cp", B) == {(A2A, share): 1}


def test_tensor_parallelism_divides_the_keys_and_values_of_a_ring():
    kv = SEQ * 2 * LLAMA.num_kv_heads * LLAMA.head_dim * 2
    b = block(LLAMA, BlockKind.DENSE, Strategy(tp=2, cp=4))
    assert of_group(b, "cp", F) == {(RING, kv / 2): 1}


@pytest.mark.parametrize(("precision", "dispatch_bytes"), [("bf16", 2), ("fp8", 2), ("fp8_block", 1)])
def test_routed_rows_travel_to_their_experts_and_back(precision, dispatch_bytes):
    rows = SEQ * DEEPSEEK.moe.top_k * DEEPSEEK.hidden
    b = block(DEEPSEEK, BlockKind.MOE, Strategy(ep=8, precision=precision))
    want = Counter([(A2A, rows * dispatch_bytes), (A2A, rows * 2)])
    assert of_group(b, "ep", F) == want
    assert of_group(b, "ep", B) == want


def test_sequence_parallel_ranks_send_their_own_tokens_only():
    rows = SEQ / 2 * MIXTRAL.moe.top_k * MIXTRAL.hidden * 2
    b = block(MIXTRAL, BlockKind.MOE, Strategy(tp=2, ep=8, sequence_parallel=True))
    assert of_group(b, "ep", F) == {(A2A, rows): 2}


def test_an_expert_tensor_group_gathers_rows_and_keeps_them():
    """Rows arrive over ep, are gathered over etp and kept whole, so backward only scatters and gathers gradients."""
    rows = SEQ * MIXTRAL.moe.top_k * MIXTRAL.hidden * 2
    b = block(MIXTRAL, BlockKind.MOE, Strategy(ep=4, etp=2))
    assert of_group(b, "ep", F) == {(A2A, rows): 2}
    assert of_group(b, "etp", F) == {(AG, 2 * rows): 1, (RS, 2 * rows): 1}
    assert of_group(b, "etp", B) == {(AG, 2 * rows): 1, (RS, 2 * rows): 1}


def test_rows_leave_before_the_experts_and_return_before_they_are_combined():
    names = [op.name for op in block(MIXTRAL, BlockKind.MOE, Strategy(ep=8)).of_phase(F)]
    order = ["dispatch", "dispatch.all_to_all", "experts.gate", "experts.down", "combine.all_to_all", "combine"]
    assert [name for name in names if name in order] == order


def test_node_limits_and_fanout_reach_the_all_to_all():
    op = named(block(DEEPSEEK, BlockKind.MOE, Strategy(ep=8)), "dispatch.all_to_all")
    assert (op.fanout, op.max_domains) == (DEEPSEEK.moe.top_k, DEEPSEEK.moe.max_nodes_per_token)


def test_an_all_reduce_is_followed_by_nothing_in_backward_and_a_copy_by_an_all_reduce():
    b = block(LLAMA, BlockKind.DENSE, Strategy(tp=4))
    copies = [op for op in b.of_phase(F) if op.collective is Traffic.COPY]
    sums = [op.name for op in b.of_phase(B) if op.collective is AR]
    assert sorted(f"{op.name}.grad" for op in copies) == sorted(sums)
