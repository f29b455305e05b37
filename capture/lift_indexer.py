"""Lifts an indexer: light heads that score every key, of which each query's best are attended to.

DeepSeek sparse attention (arXiv:2512.02556, section 2). transformers runs it without gradients, so what a trained
indexer adds in a model file (its target and its loss) is not there.
"""

from __future__ import annotations

from capture.lift import Lift
from capture.patterns import Product, norm, product, rotation
from capture.records import Record
from estimator.build.indexer import PART, best_keys
from estimator.build.scores import band
from estimator.op import Axis, Dim
from estimator.parts import IndexerSpec

__all__ = ["choose"]


def choose(lift: Lift, chosen: int, x: str, latent: str, rank: Dim) -> float:
    """Writes the indexer behind the numbers of chosen keys; the share of the causal scores that they leave."""
    flow, w = lift.flow, lift.w
    top = lift.need(flow.made_by(chosen, "topk"), chosen, "choice of keys")
    masked = flow.region(top.inputs[0], lambda record: record.name in {"masked_fill", "add"})
    if len(masked.leaves) != 1:
        raise lift.refuse(top.inputs[0], "is a choice among scores of several kinds")
    summed = _bmm(lift, masked.leaves[0])
    weights = _scaled(lift, summed.inputs[0], "index.scores")
    curve = flow.region(summed.inputs[1], lambda record: record.name in {"relu", "mul"})
    scores = _bmm(lift, curve.leaves[0])
    q, k = (lift.need(rotation(flow, v), v, "rotation of an indexer") for v in scores.inputs)
    query = lift.need(product(flow, q.leaves[0]), q.leaves[0], "queries of an indexer")
    normed = lift.need(norm(flow, k.leaves[0]), k.leaves[0], "norm of an indexer's keys")
    key = lift.need(product(flow, normed.x), normed.x, "keys of an indexer")
    heads, width = flow.values[scores.inputs[0]].shape[-2:]
    top_k = flow.values[top.outputs[0]].shape[-1]
    spec = IndexerSpec(num_heads=heads, head_dim=width, top_k=top_k)
    lift.facts.tell("indexer", spec, lift.block)
    if lift.known(query.x) is None or lift.names[flow.strip(query.x)] != latent:
        raise lift.refuse(query.x, "is read by an indexer, but is not the latent of the queries")
    one = Dim(float(width), Axis.LATENT)
    keys = lift.linear(key, "index.k_proj", _entry(lift, key, x), w.hidden, one, PART, detached=True)
    lift.claim("index.k_norm", *normed.records)
    keys = w.norm("index.k_norm", keys, one, PART, centred=normed.centred)
    wide = Dim(float(heads * width), Axis.LATENT)
    queries = lift.linear(query, "index.q_proj", latent, rank, wide, PART, detached=True)
    per_head = Dim(float(heads), Axis.LATENT)
    weight = lift.linear(
        weights, "index.weights_proj", _entry(lift, weights, x), w.hidden, per_head, PART, detached=True
    )
    lift.claim("index.scores", *q.records, *k.records, *curve.records)
    lift.claim_values("index.scores", scores.outputs[0], summed.outputs[0])
    lift.claim("index.top", *masked.records, flow.index_of(top.outputs[0]))
    lift.share("index.chosen", "index.top")
    lift.over_keys("index.k_norm.out")
    best_keys(w, queries, keys, weight, spec, keys=float(lift.keys))
    if flow.recording.context:
        w.ops = [op.but(visible=2.0) if op.name == "index.scores" else op for op in w.ops]
        return 2.0 * top_k / lift.keys
    return band(w.seq, top_k) / (w.seq * w.seq / 2)


def _entry(lift: Lift, found: Product, x: str) -> str:
    if lift.known(found.x) != x:
        raise lift.refuse(found.x, "is read by an indexer, but is not the input of the layer's attention")
    return x


def _bmm(lift: Lift, value: int) -> Record:
    record = lift.need(lift.flow.made_by(value, "bmm"), value, "product of an indexer")
    assert isinstance(record, Record)
    return record


def _scaled(lift: Lift, value: int, op: str) -> Product:
    """A product behind a constant factor."""
    found = lift.flow.region(value, lambda record: record.name == "mul" and len(record.inputs) == 1)
    lift.claim(op, *found.records)
    behind = lift.need(product(lift.flow, found.leaves[0]), found.leaves[0], "weights of an indexer's heads")
    assert isinstance(behind, Product)
    return behind
