"""DeepSeek sparse attention (arXiv:2512.02556, section 2): an indexer scores all keys, attention sees the best.

The indexer learns from attention and gives no gradient to what it reads: its scores are held against attention's
weights on the chosen keys (Eq. 4). Its own work runs on a rank's tokens, not split by heads; what it chose is gathered
where tensor-parallel ranks share tokens. Ignores rotations of its queries and keys (64 of 128 columns).
"""

from __future__ import annotations

from estimator.build.scores import band, core, heads
from estimator.build.writer import Writer
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor
from estimator.parts import IndexerSpec, MLASpec
from estimator.precision import Role
from estimator.strategy import Module

__all__ = ["PART", "best_keys", "choose", "choose_keys", "latent_context", "reads_latents"]

# Query tokens at a time: scores of a long sequence would fill a chip; assumption, as in passes/fuse/loss.py.
CHUNKS = 16.0
UP = frozenset({Module.MLA_UP_PROJ.value})
PART = Component.INDEXER


def choose_keys(w: Writer, x: str, query_latent: str, rank: Dim, indexer: IndexerSpec) -> float:
    """Queries from attention's query latent, one head of keys, and the choice; the share of scores that it leaves."""
    width = Dim(float(indexer.head_dim), Axis.LATENT)
    k = w.linear("index.k_proj", x, w.hidden, width, PART, detached=True)
    k = w.norm("index.k_norm", k, width, PART, centred=True)
    return choose(w, x, query_latent, rank, k, indexer, keys=float(w.seq), attended=_attended(w))


def _attended(w: Writer) -> int:
    """Width over which attention multiplies queries and keys, by which its weights are formed once more."""
    mla, indexer = w.model.mla, w.model.indexer
    assert mla is not None
    assert indexer is not None
    return mla.kv_lora_rank + mla.qk_rope_head_dim if reads_latents(w.seq, mla, indexer) else mla.qk_head_dim


def choose(
    w: Writer, x: str, query_latent: str, rank: Dim, k: str, indexer: IndexerSpec, *, keys: float, attended: int
) -> float:  # fmt: skip
    """Scores of `keys` keys, the best `top_k`, and the loss that teaches the indexer."""
    queries = Dim(float(indexer.num_heads * indexer.head_dim), Axis.LATENT)
    q = w.linear("index.q_proj", query_latent, rank, queries, PART, detached=True)
    weights = w.linear("index.weights_proj", x, w.hidden, Dim(float(indexer.num_heads), Axis.LATENT), PART,
                       detached=True)  # fmt: skip
    chosen = best_keys(w, q, k, weights, indexer, keys=keys)
    share = band(keys, float(min(indexer.top_k, keys))) / (keys * keys / 2)
    # What attention gives the chosen keys, all heads together; then scores of these keys with their gradients.
    reads, best = (q, k, weights), w.tensors[chosen].dims[-1]._replace(axis=Axis.KEY)
    target, loss = (w.tensor(f"index.{name}.out", best, role=Role.FULL) for name in ("target", "loss"))
    every = Dim(float(w.model.num_heads), Axis.HEADS, units=w.model.num_heads)
    w.ops.append(
        Op(name="index.target", kind=OpKind.INDEX, component=PART, inputs=(chosen,), outputs=(target,), detached=True,
           dims=(w.tokens, Dim(keys, Axis.KEY), every, Dim(float(attended), Axis.HEAD)), visible=share)
    )  # fmt: skip
    w.ops.append(_scores(w, "index.loss", (*reads, target), (loss,), keys, indexer, share))
    w.ops[-1] = w.ops[-1].but(saves=tuple(Save(name, Role.ACTIVATION) for name in reads) + (Save(loss, Role.FULL),))
    return share


def best_keys(w: Writer, q: str, k: str, weights: str, indexer: IndexerSpec, *, keys: float) -> str:
    """Scores of `keys` keys, and the numbers of the best of every query."""
    some, half = Dim(w.seq / CHUNKS, Axis.TOKENS), Dim(keys / 2.0, Axis.KEY)
    best = Dim(float(min(indexer.top_k, keys)), Axis.KEY)
    w.tensors["index.scores.chunk"] = Tensor((some, half), Role.FULL)
    w.tensors["index.chosen.chunk"] = Tensor((some, best), Role.INDEX)
    reads = (q, k, weights)
    w.ops.append(_scores(w, "index.scores", reads, ("index.scores.chunk",), keys, indexer, 1.0).but(detached=True))
    w.memory_op("index.top", OpKind.TOPK, ("index.scores.chunk",), ("index.chosen.chunk",), PART, passes=2.0 * CHUNKS)
    w.ops[-1] = w.ops[-1].but(detached=True)
    chosen = w.tensor("index.chosen.out", best._replace(axis=Axis.SHARED), role=Role.INDEX)
    w.memory_op("index.chosen", OpKind.ELEMENTWISE, ("index.chosen.chunk",), (chosen,), PART)
    w.ops[-1] = w.ops[-1].but(detached=True)
    return chosen


def _scores(
    w: Writer, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], keys: float, indexer: IndexerSpec,
    share: float,
) -> Op:  # fmt: skip
    dims = (w.tokens, Dim(keys, Axis.KEY), Dim(float(indexer.num_heads), Axis.LATENT),
            Dim(float(indexer.head_dim), Axis.HEAD))  # fmt: skip
    return Op(name=name, kind=OpKind.INDEX, component=PART, dims=dims, inputs=inputs, outputs=outputs, visible=share)


def reads_latents(seq: int, mla: MLASpec, indexer: IndexerSpec) -> bool:
    """Whether attention over chosen latents, which all heads share, takes less than all keys of every head, masked.

    Kernels that read chosen keys need heads that share them (section 2.1 of the report); on short sequences the masked
    form is the faster, and the report uses it there.
    """
    shared = band(seq, indexer.top_k) * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)
    return shared < seq * seq / 2 * (mla.qk_head_dim + mla.v_head_dim)


def latent_context(w: Writer, q: str, kv: str, kv_a: str, mla: MLASpec, share: float) -> str:
    """Attention whose keys and values are the latents themselves: the up-projection moves to queries and outputs."""
    model, part = w.model, Component.ATTENTION
    every, lora = Dim(float(model.num_heads), Axis.HEADS, units=model.num_heads), float(mla.kv_lora_rank)
    wide = mla.kv_lora_rank + mla.qk_rope_head_dim
    absorbed = w.blocked("attention.k_b_proj", q, every, float(mla.qk_nope_head_dim), lora, part, modules=UP)
    q_all = w.tensor("attention.q.out", heads(model, wide))
    w.memory_op("attention.q_concat", OpKind.ELEMENTWISE, (absorbed, q), (q_all,), part, modules=UP)
    latent = w.tensor("attention.latent.out", Dim(float(wide), Axis.SHARED))
    w.memory_op("attention.latent", OpKind.ELEMENTWISE, (kv, kv_a), (latent,), part)
    context = core(w, q_all, latent, latent, qk=wide, value=mla.kv_lora_rank, visible=share, selects=True)
    return w.blocked("attention.v_b_proj", context, every, lora, float(mla.v_head_dim), part, modules=UP)
