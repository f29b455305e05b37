"""From the graph of training to that of answering: nothing that only learns, one token behind a cache, its cache read.

Works on logical graphs, built and captured alike, before they are split; `grown` afterwards gives one graph several
lengths of the cache at once. Queries and keys have lengths of their own. Knows no seconds and no formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from estimator.build.indexer import latent_context
from estimator.build.layer import layer_block
from estimator.build.writer import Writer
from estimator.graph import Block, BlockKind, OpGraph
from estimator.layers import LayerSpec
from estimator.model import ModelSpec
from estimator.op import Array, Axis, Component, Dim, Op, OpKind, Tensor, smaller
from estimator.precision import Role

__all__ = ["UP_PROJECTION", "absorb", "behind_cache", "grown", "last_tokens", "seen_keys", "with_cache",
           "without_training"]  # fmt: skip

LEARNS = frozenset({"index.target", "index.loss"})
UP_PROJECTION = "attention.kv_b_proj"
LATENT, JOINT = "attention.kv_a_norm.out", "attention.kv_a_proj.out"
INDEX_KEYS = ("index.k_norm.out", "index.entries.out")  # of every token, or of every compressed entry


def without_training(graph: OpGraph) -> OpGraph:
    """Without losses and dropout; what read a dropped tensor reads what went into dropout."""

    def change(block: Block) -> Block:
        passed = {op.outputs[0]: op.inputs[0] for op in block.ops if op.kind is OpKind.DROPOUT}
        kept = [op for op in block.ops if op.kind not in {OpKind.LOSS, OpKind.DROPOUT} and op.name not in LEARNS]
        if not passed:
            return block.with_ops(tuple(kept))
        return block.with_ops(
            tuple([op.but(inputs=tuple([passed.get(name, name) for name in op.inputs])) for op in kept])
        )

    return graph.map(change)


def last_tokens(graph: OpGraph) -> OpGraph:
    """A prompt needs the words behind its last token only: the head runs on one row of each sequence."""

    def row(dim: Dim) -> Dim:
        return dim._replace(size=1.0) if dim.axis is Axis.TOKENS else dim

    def change(block: Block) -> Block:
        if block.kind is not BlockKind.HEAD:
            return block
        ops = tuple([op.but(dims=tuple([row(d) for d in op.dims])) for op in block.ops])
        tensors = {name: Tensor(tuple([row(d) for d in t.dims]), t.role) for name, t in block.tensors.items()}
        return replace(block, ops=ops, tensors=tensors)

    return graph.map(change)


# ------------------------------------------------------------------------------------------------- one token, many keys


def behind_cache(graph: OpGraph, model: ModelSpec, context: int) -> OpGraph:
    """The graph of one token that sees a cache of `context` tokens, from the graph of a sequence of one token.

    As a model's own code does it, and so as a capture of decode has it: latents are projected up all over again.
    """
    return graph.map(lambda block: _behind(block, model, context))


def _behind(block: Block, model: ModelSpec, context: int) -> Block:
    if block.kind.layer is None:
        return block
    layer, keys = block.kind.layer, Dim(float(context), Axis.KEY)
    entries = context / (layer.compression or 1)
    chosen = 0 if model.indexer is None else min(model.indexer.top_k, entries)
    over_keys = {f"{UP_PROJECTION}.out", INDEX_KEYS[0]}
    if any(op.name == UP_PROJECTION for op in block.ops):
        over_keys |= {"attention.k.out", "attention.v.out"}
    stepwise = _stepwise(block, model)

    def tensor(name: str, t: Tensor) -> Tensor:
        if name in over_keys:
            return Tensor((keys, *t.dims[1:]), t.role)
        if name == INDEX_KEYS[1]:
            return Tensor((keys._replace(size=entries), *t.dims[1:]), t.role)
        if name.startswith("index.chosen"):
            return Tensor((*t.dims[:-1], t.dims[-1]._replace(size=float(chosen))), t.role)
        dims = [d._replace(size=d.size * context) if d.axis is Axis.KEY else d for d in t.dims]
        return Tensor(tuple(dims), t.role)

    def op(o: Op) -> Op:
        if o.name in stepwise:
            return o.but(dims=stepwise[o.name][0].dims)
        if o.name == UP_PROJECTION:
            return o.but(dims=(keys, *o.dims[1:]))
        dims = tuple([d._replace(size=d.size * context) if d.axis is Axis.KEY else d for d in o.dims])
        if o.kind is OpKind.INDEX:
            return o.but(dims=dims, visible=2.0)
        if o.kind is not OpKind.SCORES:
            return o.but(dims=dims)
        if layer.compression:
            return o.but(dims=dims, visible=2.0, reach=0.0, selects=layer.indexed)
        reach = min(layer.window or layer.chunk, context)
        seen = chosen if layer.indexed else reach or context
        return o.but(
            dims=dims, visible=2.0 * seen / context, reach=0.0 if layer.indexed else float(reach), selects=layer.indexed
        )

    tensors = {name: tensor(name, t) for name, t in block.tensors.items()}
    tensors |= {name: t for _, made in stepwise.values() for name, t in made.items()}
    return replace(block, ops=tuple([op(o) for o in block.ops]), tensors=tensors)


def _stepwise(block: Block, model: ModelSpec) -> dict[str, tuple[Op, dict[str, Tensor]]]:
    """Recurrences as they run token by token: in chunks of one, and what they write besides their output."""
    if not any(op.kind is OpKind.SCAN for op in block.ops):
        return {}
    assert block.kind.layer is not None
    single = replace(
        model, mamba=model.mamba and replace(model.mamba, chunk=1),
        linear=model.linear and replace(model.linear, chunk=1),
    )  # fmt: skip
    made = layer_block(single, 1, block.kind.layer)
    scans = [op for op in made.ops if op.kind is OpKind.SCAN]
    return {op.name: (op, {name: made.tensors[name] for name in op.outputs[1:]}) for op in scans}


def seen_keys(layer: LayerSpec, model: ModelSpec, contexts: Array) -> Array:
    """Keys that a decoded token reads of so many: behind compression those of its window, and of the entries."""
    if layer.compression:
        entries = contexts / layer.compression
        if layer.indexed:
            assert model.indexer is not None
            entries = smaller(entries, float(model.indexer.top_k))
        return (smaller(contexts, float(layer.window)) if layer.window else 0.0 * contexts) + entries
    if layer.indexed:
        assert model.indexer is not None
        return smaller(contexts, float(model.indexer.top_k))
    reach = layer.window or layer.chunk
    return smaller(contexts, float(reach)) if reach else contexts


def grown(graph: OpGraph, model: ModelSpec, longest: float, contexts: np.ndarray) -> OpGraph:
    """The graph of a token behind a cache of `longest` tokens at several lengths [R] up to that.

    Splitting leaves keys alone, so that their numbers tell what they count: of attention all tokens or those that a
    layer sees (where these are all, so they are at every length), of an indexer its keys, half of them, or the best.
    """

    def change(block: Block) -> Block:
        if block.kind.layer is None:
            return block
        layer = block.kind.layer
        seen = float(np.asarray(seen_keys(layer, model, longest)))
        attended = {seen: seen_keys(layer, model, contexts), longest: contexts}
        every = float(layer.compression or 1)
        kept, lengths = longest / every, contexts / every
        best = float(model.indexer.top_k) if model.indexer is not None else 0.0
        indexed = {kept / 2.0: lengths / 2.0, min(best, kept): smaller(lengths, best), kept: lengths}

        def sized(dims: tuple[Dim, ...], known: Mapping[float, Array]) -> tuple[Dim, ...]:
            if not any(d.axis is Axis.KEY for d in dims):
                return dims
            return tuple([d._replace(size=known.get(float(d.size), d.size)) if d.axis is Axis.KEY else d for d in dims])

        def op(o: Op) -> Op:
            if o.name == UP_PROJECTION:
                rows, *others = o.dims
                return o.but(dims=(rows._replace(size=rows.size / longest * contexts), *others))
            return o.but(dims=sized(o.dims, indexed if o.component is Component.INDEXER else attended))

        tensors = {
            name: Tensor(sized(t.dims, indexed if name.startswith("index.") else attended), t.role)
            for name, t in block.tensors.items()
        }
        return replace(block, ops=tuple([op(o) for o in block.ops]), tensors=tensors)

    return graph.map(change)


# -------------------------------------------------------------------------------------------------- latents, absorbed


def absorb(graph: OpGraph, model: ModelSpec) -> OpGraph:
    """Latent attention on the latents themselves: the up-projection moves to the queries and to the output.

    The identity of DeepSeek-V2 (arXiv:2405.04434, section 2.1.2); as many parameters, none applied to cached tokens.
    """
    return graph if model.mla is None else graph.map(lambda block: _absorbed(block, model))


def _absorbed(block: Block, model: ModelSpec) -> Block:
    ops = {op.name: op for op in block.ops}
    if UP_PROJECTION not in ops:
        return block
    assert model.mla is not None
    assert block.kind.layer is not None
    w = Writer(model, 1, block.kind.layer, tensors=dict(block.tensors))
    out = latent_context(w, "attention.q_rope.out", LATENT, JOINT, model.mla, 1.0)
    scores = ops["attention.scores"]
    written = [op.but(selects=scores.selects, saves=()) if op.kind is OpKind.SCORES else op for op in w.ops]
    gone = {UP_PROJECTION, "attention.k_concat", "attention.v_split", "attention.softmax", "attention.context"}
    kept: list[Op] = []
    for op in block.ops:
        if op.name == "attention.scores":
            kept += written
        elif op.name == "attention.o_proj":
            kept.append(op.but(inputs=(out,)))
        elif op.name not in gone:
            kept.append(op)
    return replace(block, ops=tuple(kept), tensors=w.tensors)


# ------------------------------------------------------------------------------------------------------------ the cache


def with_cache(graph: OpGraph, model: ModelSpec, context: float | None) -> OpGraph:
    """What a pass leaves in the cache, and, behind one of `context` tokens, what it reads of it.

    None: a prompt, whose attention reads what was just made.
    """
    return graph.map(lambda block: _cached(block, model, context))


def _cached(block: Block, model: ModelSpec, context: float | None) -> Block:
    if block.kind.layer is None:
        return block
    tensors = dict(block.tensors)
    ops = list(block.ops)
    if context is not None:
        read = _Reading(block, context, float(np.asarray(seen_keys(block.kind.layer, model, context))), tensors)
        ops = [read.op(op) for op in block.ops]
    return replace(block, ops=(*ops, *_appended(block, tensors)), tensors=tensors)


def _appended(block: Block, tensors: dict[str, Tensor]) -> Iterator[Op]:
    """Writes of new keys and values, latents, and keys of an indexer."""
    core = {op.kind: op for op in block.ops}
    if OpKind.SCORES not in core:
        return
    if LATENT in block.tensors:
        made = [LATENT, JOINT]
        width: tuple[Dim, ...] = (block.tensors[JOINT].dims[-1],)
    else:
        made = list(dict.fromkeys((core[OpKind.SCORES].inputs[1], core[OpKind.CONTEXT].inputs[1])))
        kv = block.tensors[made[0]].dims[-1]
        width = (kv._replace(size=sum((block.tensors[name].dims[-1].size for name in made), 0.0), units=kv.units),)
    tokens = next(d for d in block.tensors["input_norm.out" if "input_norm.out" in block.tensors else block.input].dims
                  if d.axis is Axis.TOKENS)  # fmt: skip
    groups = [("attention.append", Component.ATTENTION, made, width)]
    for keys in INDEX_KEYS:
        if keys in block.tensors:
            groups.append(("index.append", Component.INDEXER, [keys], (block.tensors[keys].dims[-1],)))
    for name, part, inputs, dims in groups:
        fresh = []
        for x in inputs:  # of the new token, whatever the op that reads it sees
            fresh.append(f"{x}.new")
            tensors[fresh[-1]] = Tensor((tokens, *block.tensors[x].dims[1:]), block.tensors[x].role)
        tensors[f"{name}.out"] = Tensor((tokens, *dims), Role.CACHE)
        yield Op(name=name, kind=OpKind.ELEMENTWISE, component=part, inputs=tuple(fresh), outputs=(f"{name}.out",))


class _Reading:
    """Ops of one block that read what earlier tokens left: all of them, or the `seen` ones."""

    def __init__(self, block: Block, context: float, seen: float, tensors: dict[str, Tensor]) -> None:
        self.block, self.context, self.seen, self.tensors = block, context, seen, tensors
        assert block.kind.layer is not None
        self.compression = block.kind.layer.compression or 1
        self.entries = context / self.compression  # keys of an indexer
        for name, t in block.tensors.items():
            tensors[name] = self._of_every_sequence(name, t)

    def op(self, op: Op) -> Op:
        """One op behind the cache."""
        if op.kind is OpKind.SCORES:
            q, k, *others = op.inputs
            return op.but(inputs=(q, self._cache(k, self.seen), *others), dims=_keys(op.dims, self.seen), visible=2.0,
                          reach=0.0, selects=False)  # fmt: skip
        if op.kind is OpKind.CONTEXT:
            *others, v = op.inputs
            return op.but(inputs=(*others, self._cache(v, self.seen)), dims=_keys(op.dims, self.seen))
        if op.kind is OpKind.INDEX:
            return op.but(inputs=tuple([self._cache(x, self.entries) if x in INDEX_KEYS else x for x in op.inputs]))
        if op.name == UP_PROJECTION:  # of every cached token of every sequence
            return op.but(dims=(Dim(self.context, Axis.TOKENS), *op.dims[1:]))
        if op.kind is OpKind.SCAN:
            return self._scan(op)
        return self._conv(op) if op.kind is OpKind.CONV else op

    def _of_every_sequence(self, name: str, t: Tensor) -> Tensor:
        """Tensors with a row for each key have one of every sequence; attention's, of keys that are seen.

        The norm of an indexer's keys makes the new token's: the others are cached as it left them.
        """
        if name in INDEX_KEYS:
            return Tensor((Dim(1.0 / self.compression, Axis.TOKENS), *t.dims[1:]), t.role)
        if not any(d.axis is Axis.KEY for d in t.dims) or name.startswith("index."):
            return t
        if t.dims[0].axis is Axis.KEY:
            return Tensor((Dim(1.0, Axis.BATCH), *t.dims), t.role)
        return Tensor(_keys(t.dims, self.seen), t.role)

    def _cache(self, name: str, number: float) -> str:
        """The cached form of a tensor; keys that were just projected up from the cache are read as they are."""
        t = self.block.tensors[name]
        if t.dims[0].axis is Axis.KEY and name not in INDEX_KEYS:
            return name
        cached = f"{name}.cache"
        self.tensors[cached] = Tensor((Dim(1.0, Axis.BATCH), Dim(number, Axis.KEY), *t.dims[1:]), Role.CACHE)
        return cached

    def _scan(self, op: Op) -> Op:
        """Reads and writes one state of full precision; nothing is passed between chunks."""
        out, states, *_ = op.outputs
        self.tensors[states] = Tensor(self.tensors[states].dims, Role.FULL)
        return op.but(outputs=(out, states))

    def _conv(self, op: Op) -> Op:
        """Reads the last tokens that its taps reach."""
        width, taps = op.weights[0].dims
        state = f"{op.name}.state"
        self.tensors[state] = Tensor((Dim(1.0, Axis.BATCH), taps._replace(size=taps.size - 1.0), width))
        return op.but(inputs=(*op.inputs, state))


def _keys(dims: tuple[Dim, ...], number: float) -> tuple[Dim, ...]:
    return tuple([d._replace(size=number) if d.axis is Axis.KEY else d for d in dims])
