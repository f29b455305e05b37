"""Records of a run -> the logical graph that a model file gives: blocks of semantic ops, each distinct layer once.

Forward only: the passes derive backward, and the recorded backward is a cross-check (tests). Every record that the
result depends on is taken up by an op, or refused; the ops tell which records they stand for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from math import lcm
from typing import Any

from capture.flow import PART, SAME, Flow, UnknownOp
from capture.lift import Facts, Lift
from capture.lift_attention import attention
from capture.lift_mlp import experts, mlp
from capture.lift_scans import gated_delta_net, mamba
from capture.patterns import dropout, norm, product
from capture.records import Record, Recording, Ref
from capture.unknown import price_as_memory
from estimator.build.ends import cross_entropy, embedding, positions, tied_head
from estimator.captured import CapturedGraph, CapturedModel, Origin
from estimator.graph import Block, BlockKind, OpGraph
from estimator.graph_file import digest_of
from estimator.layers import LayerSpec, Mixer, Mlp
from estimator.model import ModelSpec, Norm, QKNorm
from estimator.op import Axis, Component, Dim, OpKind, Phase, Save
from estimator.precision import Role

__all__ = ["canonicalise", "lift_all"]

LOSS = frozenset("_log_softmax nll_loss_forward constant_pad_nd sum div mul neg tanh".split())
HALVES: Mapping[str, tuple[str, Callable[[Lift, int], str]]] = {
    "attention": ("attention", attention),
    "gated_delta_rule": ("linear", gated_delta_net),
    "mamba2_scan": ("mamba", mamba),
    "mamba2_step": ("mamba", mamba),
    "_grouped_mm": ("mlp", experts),
    "": ("mlp", mlp),
}  # what a branch contains -> how it is called and lifted
MIXERS = {"attention": Mixer.ATTENTION, "linear": Mixer.LINEAR, "mamba": Mixer.MAMBA}


def canonicalise(
    recording: Recording, name: str, notes: Sequence[str] = (), *, allow_unknown: bool = False
) -> CapturedModel:  # fmt: skip
    """The model that a recording shows: its sizes, and its graph. UnknownOp names what has no place in it."""
    return lift_all(Flow(recording), name, notes, allow_unknown=allow_unknown)


def lift_all(flow: Flow, name: str, notes: Sequence[str] = (), *, allow_unknown: bool = False) -> CapturedModel:
    """The same of a flow, which knows afterwards what op stands for which record."""
    recording, facts = flow.recording, Facts()
    sizes = _common_sizes(flow, name)
    keys = _tokens(flow)
    tokens = 1 if recording.context else keys
    kinds = sorted({place.kind for place in recording.layers})
    blocks, unknown = [embedding(sizes, tokens)], list[str]()
    if sizes.max_positions:
        blocks.append(positions(sizes, tokens))
    layer_of: dict[int, LayerSpec] = {}
    for kind in kinds:
        block, layer, missing = _layer(flow, sizes, facts, (tokens, keys), kind, allow_unknown)
        if layer in layer_of.values():
            raise ValueError(f"{name}: two kinds of layers both read as {layer.name!r}; what sets them apart has no "
                             "canonical form yet")  # fmt: skip
        layer_of[kind] = layer
        blocks.append(block)
        unknown += missing
    blocks.append(_head(flow, sizes, facts, tokens))
    _check_taken_up(flow)
    layers = tuple(layer_of[place.kind] for place in recording.layers)
    if unknown:
        notes = (*notes, f"priced as memory-bound, for nothing is known of them: {', '.join(unknown)}")
    model = _model(sizes, facts, layers, notes)
    sequence = (*(block.kind for block in blocks if not block.kind.is_layer and block.kind is not BlockKind.HEAD),
                *(BlockKind.of(layer) for layer in layers), BlockKind.HEAD)  # fmt: skip
    graph = OpGraph(name=name, blocks={block.kind: block for block in blocks}, sequence=sequence)
    _check_parameters(flow, graph)
    origins = _origins(flow)
    modules, bases = _modules(recording, origins)
    chosen = 0 if model.indexer is None else model.indexer.top_k
    found = CapturedGraph(
        graph=graph, chosen_keys=chosen, tokens=keys, phase=recording.phase, digest="", origins=origins,
        modules=modules, bases=bases, gradients=_places(recording.of_phase(Phase.BACKWARD)), unknown=tuple(unknown),
    )  # fmt: skip
    known = {f.name: getattr(model, f.name) for f in fields(ModelSpec)}
    return CapturedModel(**known, captured=replace(found, digest=digest_of(model, found)))


def _common_sizes(flow: Flow, name: str) -> ModelSpec:
    """What ops of all layers are written with: widths of embedding and heads, and whether norms subtract the mean."""
    recording = flow.recording
    table, num_positions, hidden_dropout = _look_up(flow, recording.entry[recording.layers[0].kind])
    vocab, hidden = flow.values[table.inputs[0]].shape
    heads, kv_heads, sinks, attention_dropout = 1, 1, False, 0.0
    for record in flow.records:
        if record.op == "capture.attention":
            named = {key: ref.value for key, ref in record.arguments if isinstance(ref, Ref)}
            heads, kv_heads = flow.values[named["query"]].shape[1], flow.values[named["key"]].shape[1]
            sinks, attention_dropout = "s_aux" in named, float(dict(record.arguments).get("dropout", 0.0))
            break
    final = norm(flow, _logits(flow).x)
    if final is None:
        raise flow.unknown(_logits(flow).x, "is read by the head, but no norm stands there")
    return ModelSpec(
        name=name, num_layers=len(recording.layers), hidden=hidden, ffn=1, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=1, vocab=vocab, norm=Norm.LAYER if final.centred else Norm.RMS, attention_sinks=sinks,
        tied_embeddings=recording.tied, max_positions=num_positions, hidden_dropout=hidden_dropout,
        attention_dropout=attention_dropout,
    )  # fmt: skip


def _tokens(flow: Flow) -> int:
    """So many tokens that every recurrence has whole chunks, and that chosen keys are fewer than half of all."""
    options = [dict(record.arguments) for record in flow.records if record.op.startswith("capture.")]
    chosen = [flow.values[ref.value].shape[-1] for given in options if isinstance(ref := given.get("indices"), Ref)]
    return lcm(
        *(int(given["chunk"]) for given in options if {"chunk", "state"} <= given.keys()),
        *(4 * number for number in chosen),
    )


def _look_up(flow: Flow, entry: int) -> tuple[Record, int, float]:
    """What enters the first layer: the look-up of words, the learned positions added to it, the share dropped."""
    outer = dropout(flow, entry)
    value, share = (entry, 0.0) if outer is None else outer[:2]
    found = flow.region(value, lambda record: record.name in {"mul", "add"})
    record = flow.record_of(found.leaves[0]) if len(found.leaves) == 1 else None
    if record is None or record.name != "embedding" or flow.strip(record.inputs[1]) != flow.recording.ids:
        raise flow.unknown(entry, "enters the first layer, but is no look-up of words")
    flow.claim("embedding/embed", flow.index_of(found.leaves[0]))
    positions = 0
    for i in found.records:
        if flow.records[i].name == "add":
            table = next((flow.made_by(v, "embedding") for v in flow.records[i].inputs if not flow.is_data(v)), None)
            if table is None or positions:
                raise flow.refused(flow.records[i], "is added to the words, but is no look-up of positions")
            positions = flow.values[table.inputs[0]].shape[0]
            flow.claim("positions/positions", i, flow.index_of(table.outputs[0]))
    flow.claim("embedding/embed", *found.records)
    if outer is not None:
        flow.claim("positions/positions.dropout" if positions else "embedding/embed.dropout", *outer[2])
    return record, positions, share


def _layer(
    flow: Flow, sizes: ModelSpec, facts: Facts, lengths: tuple[int, int], kind: int, allow_unknown: bool
) -> tuple[Block, LayerSpec, list[str]]:  # fmt: skip
    """Branch by branch along the residual stream."""
    recording = flow.recording
    entry, result = flow.strip(recording.entry[kind]), recording.result[kind]
    window, chunk = _mask(flow, flow.live([result], frozenset({recording.entry[kind], entry})))
    mask = LayerSpec(window=window, chunk=chunk)
    place = next(place.scope for place in recording.layers if place.kind == kind)
    lift = Lift(flow, sizes, facts, place, *lengths, mask)
    x = lift.w.tensor("x", lift.w.hidden)
    lift.names[entry] = x
    parts: list[str] = []
    unknown: list[str] = []
    for total, stream, branch in _branches(flow, entry, result):
        if (sides := _side_by_side(flow, lift, branch)) is not None:
            parts += _parallel(lift, total, stream, branch, sides)
            continue
        word = _word(flow, lift, branch)
        name, half = HALVES[word]
        before = list(lift.w.ops), dict(lift.w.tensors), dict(lift.names), dict(flow.claims)
        try:
            y = _half(lift, name, half, branch)
        except UnknownOp:
            if not allow_unknown:
                raise
            lift.w.ops, lift.w.tensors, lift.names, flow.claims = before
            y, ops = price_as_memory(lift, name, branch)
            unknown += [f"{place}/{op}" for op in ops]
            word = "attention" if HALVES[word][0] in MIXERS else ""  # no recurrence and no experts that are known
        lift.claim_values(f"{name}.residual", total)
        lift.names[total] = lift.w.residual(f"{name}.residual", lift.names[stream], y)
        parts.append(word)
    layer = _layer_spec(flow, lift, parts, result)
    return lift.w.block(BlockKind.of(layer), x), layer, unknown


def _word(flow: Flow, lift: Lift, branch: int) -> str:
    """What a branch contains that tells its kind."""
    inside = {flow.records[i].name for i in flow.live([branch], frozenset(lift.names))}
    return next(word for word in HALVES if not word or word in inside)


def _side_by_side(flow: Flow, lift: Lift, branch: int) -> tuple[int, int] | None:
    """A mixer and an MLP that are added up before they join the stream."""
    record = flow.made_by(branch, "add")
    sides = [v for v in record.inputs if flow.is_data(v)] if record is not None else []
    if len(sides) != 2:
        return None
    mixers = [v for v in sides if HALVES[_word(flow, lift, v)][0] in MIXERS]
    return None if len(mixers) != 1 else (mixers[0], next(v for v in sides if v != mixers[0]))


def _parallel(lift: Lift, total: int, stream: int, branch: int, sides: tuple[int, int]) -> list[str]:
    """Both halves read the same stream and share a residual (GPT-J, Phi)."""
    words = [_word(lift.flow, lift, side) for side in sides]
    y = HALVES[words[0]][1](lift, sides[0])
    if not words[1]:  # partial sums of a dense MLP, added before they are reduced
        lift.w.ops[-1] = lift.w.ops[-1].but(partial=True)
    z = HALVES[words[1]][1](lift, sides[1])
    name = HALVES[words[0]][0]
    out = lift.w.tensor(f"{name}.residual.out", lift.w.hidden)
    inputs = (lift.names[stream], y, z)
    lift.w.memory_op(f"{name}.residual", OpKind.ELEMENTWISE, inputs, (out,), Component.RESIDUAL)
    lift.claim_values(f"{name}.residual", total, lift.flow.strip(branch))
    lift.names[total] = out
    lift.facts.tell("parallel_block", True, lift.block)
    return words


def _half(lift: Lift, name: str, half: Callable[[Lift, int], str], branch: int) -> str:
    """A branch, with a norm behind it where there is one (Gemma 2, OLMo 2)."""
    dropped = dropout(lift.flow, branch)
    if dropped is not None:
        y = _half(lift, name, half, dropped[0])
        lift.claim(f"{name}.dropout", *dropped[2])
        return lift.w.dropout(f"{name}.dropout", y, f"{name}.dropout.out", Component.RESIDUAL)
    try:
        behind = norm(lift.flow, branch)
        if behind is None or behind.gate is not None:
            return half(lift, branch)
    except LookupError as error:  # an op with fewer inputs or sizes than its pattern has
        raise lift.refuse(branch, f"ends a branch that no pattern fits ({type(error).__name__} {error})") from error
    return lift.norm(behind, f"{name}.output_norm", half(lift, behind.x), lift.w.hidden, Component.NORM)


def _branches(flow: Flow, entry: int, result: int) -> list[tuple[int, int, int]]:
    """(sum, stream, branch) of every residual addition, in order."""
    found: list[tuple[int, int, int]] = []
    at = flow.strip(result)
    while at != entry:
        record = flow.record_of(at)
        sides = [v for v in record.inputs if flow.is_data(v)] if record is not None else []
        on_stream = [v for v in sides if _on_stream(flow, v, entry)]
        if record is None or record.name not in {"add", "add_"} or len(sides) != 2 or not on_stream:
            raise flow.unknown(at, "leaves a layer, but is no sum of the stream and a branch")
        stream = on_stream[0]
        branch = sides[1] if stream == sides[0] else sides[0]
        found.append((at, flow.strip(stream), branch))
        at = flow.strip(stream)
    return found[::-1]


def _on_stream(flow: Flow, value: int, entry: int) -> bool:
    """Whether sums alone lead from the layer's input to the value."""
    todo = [flow.strip(value)]
    while todo:
        at = todo.pop()
        if at == entry:
            return True
        record = flow.record_of(at)
        if record is not None and record.name in {"add", "add_"} and len(record.inputs) == 2:
            todo += [flow.strip(v) for v in record.inputs if flow.is_data(v)]
    return False


def _mask(flow: Flow, live: set[int]) -> tuple[int, int]:
    """Window and chunk of the mask that the layer's attention reads."""
    for i in sorted(live):
        if flow.records[i].op == "capture.attention":
            named = {key: ref.value for key, ref in flow.records[i].arguments if isinstance(ref, Ref)}
            mask = flow.record_of(flow.root(named["mask"])) if "mask" in named else None
            if mask is not None and mask.op == "capture.mask":
                options = dict(mask.arguments)
                if "refused" in options:
                    raise flow.refused(flow.records[i], options["refused"])
                return int(options["window"]), int(options["chunk"])
    return 0, 0


def _layer_spec(flow: Flow, lift: Lift, parts: list[str], result: int) -> LayerSpec:
    mixers = [HALVES[word][0] for word in parts if HALVES[word][0] in MIXERS]
    mlps = [Mlp.MOE if word else Mlp.DENSE for word in parts if HALVES[word][0] == "mlp"]
    if len(mixers) > 1 or len(mlps) > 1:
        raise flow.unknown(result, f"ends a layer of {len(mixers)} mixers and {len(mlps)} MLPs; one of each has a form")
    mixer = MIXERS[mixers[0]] if mixers else Mixer.NONE
    attends = mixer is Mixer.ATTENTION
    rotates = not attends or lift.traits.get("rope", True)
    return LayerSpec(
        mixer=mixer, mlp=mlps[0] if mlps else Mlp.NONE, window=lift.layer.window if attends else 0,
        chunk=lift.layer.chunk if attends else 0, rope=rotates or bool(lift.model.max_positions),
        indexed=lift.traits.get("indexed", False),
    )  # fmt: skip


def _logits(flow: Flow) -> Any:  # noqa: ANN401 - a Product
    """The product with the vocabulary."""
    found = flow.region(flow.recording.output, lambda record: record.name in LOSS)
    outs = {flow.strip(leaf): product(flow, leaf) for leaf in found.leaves if leaf != flow.recording.ids}
    products = [p for p in outs.values() if p is not None]
    if len(products) != 1 or len(outs) != 1:
        raise flow.unknown(flow.recording.output, "is no loss of one product with the vocabulary")
    return products[0]


def _head(flow: Flow, sizes: ModelSpec, facts: Facts, tokens: int) -> Block:
    lift = Lift(flow, sizes, facts, "head", tokens, tokens)
    w, found = lift.w, _logits(flow)
    last = flow.strip(flow.recording.result[flow.recording.layers[-1].kind])
    lift.names[last] = w.tensor("x", w.hidden)
    final = lift.need(norm(flow, found.x), found.x, "norm before the head")
    if flow.strip(final.x) not in {flow.strip(v) for v in flow.recording.result.values()}:
        raise flow.unknown(final.x, "is read by the last norm, but no layer ends there")
    x = lift.norm(final, "final_norm", "x", w.hidden, Component.NORM)
    vocab = Dim(float(sizes.vocab), Axis.VOCAB, units=sizes.vocab_multiple)
    logits = lift.linear(found, "lm_head", x, w.hidden, vocab, Component.HEAD, save_as=Role.ACTIVATION)
    if flow.recording.phase == "train":
        region = flow.region(flow.recording.output, lambda record: record.name in LOSS)
        if not {"_log_softmax", "nll_loss_forward"} <= region.names:
            raise flow.unknown(flow.recording.output, "is the last value of training, but no cross entropy")
        if "tanh" in region.names:  # logits are kept within a cap (Gemma 2)
            capped = w.tensor("logit_cap.out", vocab, role=Role.LOGITS)
            w.memory_op("logit_cap", OpKind.ACTIVATION, (logits,), (capped,), Component.HEAD,
                        saves=(Save(capped, Role.ACTIVATION),))  # fmt: skip
            lift.claim("logit_cap", *(i for i in region.records if flow.records[i].name == "tanh"))
            logits = capped
        lift.claim("loss", *region.records)
        cross_entropy(w, logits)
    if flow.recording.tied:
        tied_head(w)
    return w.block(BlockKind.HEAD, "x")


def _model(sizes: ModelSpec, facts: Facts, layers: tuple[LayerSpec, ...], notes: Sequence[str]) -> ModelSpec:
    known = dict(facts.known)
    known.setdefault("head_dim", 1)
    moe = known.get("moe")
    known.setdefault("ffn", moe.ffn if moe is not None else 1)  # no layer has a dense MLP
    if "qk_norm" in known:
        known["qk_norm"] = QKNorm(known["qk_norm"])
    return replace(sizes, layers=layers, notes=tuple(notes), **known)


def _check_taken_up(flow: Flow) -> None:
    """UnknownOp for the first record that the output depends on and that no op stands for."""
    live = flow.live([flow.recording.output, *flow.recording.result.values()])
    for i in sorted(live - flow.claims.keys()):
        record = flow.records[i]
        looked_through = record.name in SAME | PART | {"alias_of"} or i in flow.passed
        if flow.is_data(record.outputs[0]) and not looked_through:
            raise flow.refused(record, "the result depends on it, but no op of the canonical graph stands for it")


def _check_parameters(flow: Flow, graph: OpGraph) -> None:
    """ValueError where the graph has more or fewer parameters than the model it was captured from."""
    buffers = sum(
        weight.elements for kind in graph.sequence for weight in graph.blocks[kind].weights
        if weight.name == "router.correction_bias"
    )  # fmt: skip
    have, want = graph.num_parameters(), flow.recording.num_parameters
    if want not in (have, have - buffers):  # corrections of a router are buffers in most models
        raise UnknownOp(f"{flow.recording.architecture} has {want:,} parameters, but its canonical graph {have:,.0f}")


def _origins(flow: Flow) -> dict[str, tuple[Origin, ...]]:
    """Per op the places of the records that it stands for."""
    owned: dict[str, list[Record]] = {}
    for i, owner in flow.claims.items():
        if flow.records[i].name not in SAME | PART or owner not in owned:
            owned.setdefault(owner, []).append(flow.records[i])
    owned = {op: owned[owner] for op, owner in flow.shared.items() if owner in owned} | owned
    return {owner: _places(records) for owner, records in owned.items()}


def _modules(
    recording: Recording, origins: Mapping[str, tuple[Origin, ...]]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Classes of the modules that ops stand in, and of those around them; and what these classes extend."""
    paths = {place.scope for places in origins.values() for place in places}
    paths |= {path.rsplit(".", n)[0] for path in paths for n in range(1, path.count(".") + 1)}
    modules = {path: recording.modules[path] for path in sorted(paths) if path in recording.modules}
    return modules, {name: recording.bases[name] for name in sorted(set(modules.values())) if recording.bases[name]}


def _places(records: Iterable[Record]) -> tuple[Origin, ...]:
    """Records by the place that called them, in order of first call."""
    found: dict[tuple[str, str, str], Counter[str]] = {}
    for record in records:
        found.setdefault((record.scope, record.module, record.line), Counter())[record.op] += 1
    return tuple(Origin(tuple(sorted(ops.items())), *place) for place, ops in found.items())
