"""What stands before and behind the layers: embedding, positions, head, and what multi-token prediction adds."""

from __future__ import annotations

from estimator.build.hyper import joined
from estimator.build.writer import Writer
from estimator.graph import Block, BlockKind
from estimator.model import ModelSpec
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor, Weight
from estimator.precision import Role

__all__ = ["cross_entropy", "embedding", "head", "mtp", "positions", "tied_head"]


def embedding(model: ModelSpec, seq: int) -> Block:
    """Look-up of words."""
    w = Writer(model, seq)
    w.tensors["ids"] = Tensor((w.tokens,), Role.INDEX)
    out = w.tensor("embed.out", w.hidden)
    table = Weight("embed.weight", (_vocabulary(model), w.hidden), linear=False)
    w.ops.append(
        Op(name="embed", kind=OpKind.EMBEDDING, component=Component.EMBEDDING, inputs=("ids",), outputs=(out,),
           saves=(Save("ids", Role.INDEX),), weights=(table,))
    )  # fmt: skip
    if not model.max_positions:
        out = w.hidden_dropout("embed", out, Component.EMBEDDING)
    if model.hyper is not None:  # every stream begins as a copy
        w.memory_op("embed.streams", OpKind.ELEMENTWISE, (out,), (w.tensor("streams", w.stream),), Component.HYPER)
    return w.block(BlockKind.EMBEDDING, "ids")


def positions(model: ModelSpec, seq: int) -> Block:
    """Learned positions, added to the embedding.

    A block of their own, for a head tied to the embedding shares the table of words but not that of positions.
    """
    w = Writer(model, seq)
    x, out = w.tensor("x", w.hidden), w.tensor("positions.out", w.hidden)
    table = Weight("positions.weight", (Dim(float(model.max_positions), Axis.POSITIONS), w.hidden), linear=False)
    w.ops.append(
        Op(name="positions", kind=OpKind.ELEMENTWISE, component=Component.EMBEDDING, inputs=(x,), outputs=(out,),
           weights=(table,))
    )  # fmt: skip
    w.hidden_dropout("positions", out, Component.EMBEDDING)
    return w.block(BlockKind.POSITIONS, "x")


def _vocabulary(model: ModelSpec) -> Dim:
    return Dim(float(model.vocab), Axis.VOCAB, units=model.vocab_multiple)


def _head_ops(w: Writer, x: str) -> None:
    """Final norm, vocabulary projection (never in fp8), cross entropy."""
    vocab = _vocabulary(w.model)
    if w.model.hyper is not None:
        x = joined(w, x, w.model.hyper)
    normed = w.norm("final_norm", x, w.hidden, centred=w.centred)
    cross_entropy(w, w.linear("lm_head", normed, w.hidden, vocab, Component.HEAD, save_as=Role.ACTIVATION))


def cross_entropy(w: Writer, logits: str) -> None:
    """The loss of every token."""
    w.tensors["loss.out"] = Tensor((w.tokens,), Role.FULL)
    w.memory_op("loss", OpKind.LOSS, (logits,), ("loss.out",), Component.HEAD, saves=(Save(logits, Role.FULL),),
                passes=4.0)  # fmt: skip


def head(model: ModelSpec, seq: int) -> Block:
    """Norm, projection to the vocabulary, loss."""
    w = Writer(model, seq)
    _head_ops(w, w.tensor("x", w.stream))
    if model.tied_embeddings:
        tied_head(w)
    return w.block(BlockKind.HEAD, "x")


def tied_head(w: Writer) -> None:
    """The head multiplies with the table of words."""
    shared = Weight("embed.weight", (_vocabulary(w.model), w.hidden), linear=False)
    w.ops = [op.but(weights=(shared,)) if op.name == "lm_head" else op for op in w.ops]


def mtp(model: ModelSpec, seq: int) -> Block:
    """What multi-token prediction adds to a layer (DeepSeek-V3, arXiv:2412.19437, Eqs. 21 to 24).

    Norms and projection before it, the head again behind it; the layer itself follows in the sequence. Embedding and
    head weights are shared with the main model; a pipeline rank without them keeps a copy (layout.py). Of several
    streams each is projected, and the embedding added to all.
    """
    w = Writer(model, seq)
    x, ahead = w.tensor("x", w.stream), w.tensor("ahead", w.hidden)
    both = Dim(2.0 * model.hidden, Axis.HIDDEN)
    e = w.norm("mtp.embed_norm", ahead, w.hidden, centred=w.centred)
    if model.hyper is not None:
        return _mtp_of_streams(w, x, e, model.hyper.streams)
    h = w.norm("mtp.hidden_norm", x, w.hidden, centred=w.centred)
    joined = w.tensor("mtp.concat.out", both)
    w.memory_op("mtp.concat", OpKind.ELEMENTWISE, (h, e), (joined,), Component.MTP)
    w.linear("mtp.proj", joined, both, w.hidden, Component.MTP)
    return _mtp_head(w)


def _mtp_of_streams(w: Writer, x: str, e: str, streams: int) -> Block:
    rows = Dim(w.tokens.size * streams, Axis.TOKENS)
    w.tensors["mtp.rows"], w.tensors["mtp.hidden_proj.out"] = (Tensor((rows, w.hidden)) for _ in range(2))
    h = w.norm("mtp.hidden_norm", x, w.stream, centred=w.centred)
    w.ops[-1] = w.ops[-1].but(weights=())
    w.weight("mtp.hidden_norm.weight", w.hidden)
    w.ops[-1] = w.ops[-1].but(outputs=(h, "mtp.rows"))
    e = w.linear("mtp.embed_proj", e, w.hidden, w.hidden, Component.MTP)
    weight = Weight("mtp.hidden_proj.weight", (w.hidden, w.hidden))
    w.ops.append(
        Op(name="mtp.hidden_proj", kind=OpKind.MATMUL, component=Component.MTP, dims=(rows, w.hidden, w.hidden),
           inputs=("mtp.rows",), outputs=("mtp.hidden_proj.out",), saves=(Save("mtp.rows", Role.LINEAR_INPUT),),
           weights=(weight,))
    )  # fmt: skip
    out = w.tensor("mtp.streams", w.stream)
    w.memory_op("mtp.join", OpKind.ELEMENTWISE, ("mtp.hidden_proj.out", e), (out,), Component.MTP)
    return _mtp_head(w)


def _mtp_head(w: Writer) -> Block:
    _head_ops(w, w.tensor("mtp.layer.out", w.stream))
    w.ops = [op.but(weights=()) if op.name == "lm_head" else op for op in w.ops]
    return w.block(BlockKind.MTP, "x")
