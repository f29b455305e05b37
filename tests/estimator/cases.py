"""Models, systems and short questions that the estimator's tests share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from estimator.build import build
from estimator.cost.table import Again, Base, PriceTable, price_table
from estimator.graph import Block, BlockKind, OpGraph
from estimator.model import MLASpec, ModelSpec, MoESpec, Norm
from estimator.model_io import load_model
from estimator.op import Op, OpKind, Phase, Traffic
from estimator.passes import lower
from estimator.precision import recipe
from estimator.step import evaluate
from estimator.strategy import Fusion, Recompute, Strategy
from estimator.workload import Workload
from hardware import catalog
from hardware.system import SystemSpec
from spaces import MODELS

PUBLISHED = ("gpt3_175b", "llama3_8b", "llama3_70b", "llama3_405b", "mixtral_8x7b", "deepseek_v3", "qwen3_32b",
             "qwen3_235b_a22b")  # fmt: skip

LLAMA = ModelSpec(
    name="tiny-llama", num_layers=8, hidden=1024, ffn=3072, num_heads=16, num_kv_heads=4, head_dim=64, vocab=8192
)
GPT = ModelSpec(
    name="tiny-gpt", num_layers=8, hidden=1024, ffn=4096, num_heads=16, num_kv_heads=16, head_dim=64, vocab=8192,
    gated_mlp=False, tied_embeddings=True, norm=Norm.LAYER, attention_bias=True, attention_output_bias=True,
    mlp_bias=True, max_positions=2048,
)  # fmt: skip
MIXTRAL = replace(LLAMA, name="tiny-mixtral", moe=MoESpec(num_experts=8, top_k=2, ffn=1536))
DEEPSEEK = ModelSpec(
    name="tiny-deepseek", num_layers=8, hidden=1024, ffn=3072, num_heads=16, num_kv_heads=16, head_dim=64, vocab=8192,
    mla=MLASpec(q_lora_rank=384, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
    moe=MoESpec(
        num_experts=16, top_k=4, ffn=512, num_shared_experts=1, shared_ffn=512, num_dense_layers=1,
        max_nodes_per_token=2, router_correction_bias=True,
    ),
    num_mtp_layers=1,
)  # fmt: skip
TINY = (LLAMA, GPT, MIXTRAL, DEEPSEEK)

SEQ = 2048
WORK = Workload(seq=SEQ, global_batch=64)
UNFUSED: frozenset[Fusion] = frozenset()
PLAIN = Strategy()
NONE, FULL = Recompute(), Recompute.parse("full")


def published(name: str) -> ModelSpec:
    return load_model(name, [MODELS])


def h100(num_chips: int) -> SystemSpec:
    return catalog.cluster("dgx_h100", num_chips)


def lowered(model: ModelSpec, strategy: Strategy = PLAIN, seq: int = SEQ) -> OpGraph:
    """The graph of one rank."""
    return lower(build(model, seq), strategy, recipe(strategy.precision))


def block(model: ModelSpec, kind: BlockKind, strategy: Strategy = PLAIN, seq: int = SEQ) -> Block:
    return lowered(model, strategy, seq).blocks[kind]


def prices(
    model: ModelSpec, strategy: Strategy = PLAIN, seq: int = SEQ, choices: tuple[Recompute, ...] = (Recompute(),),
    system: SystemSpec | None = None,
) -> PriceTable:  # fmt: skip
    graph = lowered(model, strategy, seq)
    return price_table(graph, strategy, system or h100(64), recipe(strategy.precision), choices)


def base(model: ModelSpec, kind: BlockKind, column: Base, strategy: Strategy = PLAIN, **options: object) -> float:
    """One price of one block kind."""
    table = prices(model, strategy, **options)
    return float(table.base[0, table.kinds.index(kind), column])


def again(
    model: ModelSpec, kind: BlockKind, column: Again, strategy: Strategy = PLAIN, choice: Recompute = NONE,
    seq: int = SEQ,
) -> float:  # fmt: skip
    """One price of one block kind under one recompute choice."""
    table = prices(model, strategy, seq, (choice,))
    return float(table.again[0, 0, table.kinds.index(kind), column])


def saved(model: ModelSpec, kind: BlockKind, strategy: Strategy = PLAIN, choice: Recompute = NONE,
          seq: int = SEQ) -> float:  # fmt: skip
    """Bytes a token leaves for backward in one block."""
    return again(model, kind, Again.SAVED_BYTES, strategy, choice, seq) / seq


def traffic(b: Block, *phases: Phase) -> list[tuple[Traffic, str, float]]:
    """Collectives of a block as (kind, group, payload), copies left out."""
    found = (op for op in b.of_phase(*phases) if op.collective not in {None, Traffic.COPY})
    return [(op.collective, op.group.value, float(np.asarray(op.payload).item())) for op in found]  # type: ignore[union-attr, misc]


def named(b: Block, name: str) -> Op:
    return next(op for op in b.ops if op.name == name)


def compute_ops(b: Block, *phases: Phase) -> list[Op]:
    return [op for op in b.of_phase(*phases) if op.kind is not OpKind.COLLECTIVE]


def step(model: ModelSpec, strategy: Strategy, num_chips: int, work: Workload = WORK, **options: object):
    return evaluate(model, strategy, h100(num_chips), work, **options)
