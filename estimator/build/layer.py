"""A layer: a norm, a mixer of tokens and a residual; a norm, an MLP and a residual; or one of the two.

Parallel blocks read one norm and share one residual (GPT-J, Command-R); hyper-connections take the residual's place.
"""

from __future__ import annotations

from collections.abc import Callable

from estimator.build.attention import attention
from estimator.build.hyper import gathered, spread
from estimator.build.mlp import experts, mlp
from estimator.build.scans import gated_delta_net, mamba
from estimator.build.writer import Writer
from estimator.graph import Block, BlockKind
from estimator.layers import LayerSpec, Mixer, Mlp
from estimator.model import ModelSpec
from estimator.op import Component, OpKind

__all__ = ["layer_block"]

Half = Callable[[Writer, str], str]
MIXERS: dict[Mixer, tuple[str, Half]] = {
    Mixer.ATTENTION: ("attention", attention),
    Mixer.LINEAR: ("linear", gated_delta_net),
    Mixer.MAMBA: ("mamba", mamba),
}
MLPS: dict[Mlp, Half] = {Mlp.DENSE: mlp, Mlp.MOE: experts}


def layer_block(model: ModelSpec, seq: int, layer: LayerSpec) -> Block:
    """The block of one layer."""
    w = Writer(model, seq, layer)
    x = w.tensor("x", w.stream)
    if model.parallel_block and layer.num_halves == 2:
        _parallel(w, x)
    else:
        if layer.mixer is not Mixer.NONE:
            name, mixer = MIXERS[layer.mixer]
            x = _branch(w, x, "input_norm", name, mixer)
        if layer.mlp is not Mlp.NONE:
            _branch(w, x, "post_attention_norm", "mlp", MLPS[layer.mlp])
    return w.block(BlockKind.of(layer), "x")


def _branch(w: Writer, x: str, norm: str, name: str, half: Half) -> str:
    if w.model.hyper is None:
        y = half(w, w.norm(norm, x, w.hidden, centred=w.centred))
        return w.residual(f"{name}.residual", x, w.hidden_dropout(name, y, Component.RESIDUAL))
    entry, weights = gathered(w, f"{name}.hyper", x, w.model.hyper)
    y = w.hidden_dropout(name, half(w, w.norm(norm, entry, w.hidden, centred=w.centred)), Component.HYPER)
    return spread(w, f"{name}.hyper", x, y, weights)


def _parallel(w: Writer, x: str) -> None:
    name, mixer = MIXERS[w.layer.mixer]
    normed = w.norm("input_norm", x, w.hidden, centred=w.centred)
    y = mixer(w, normed)
    if w.layer.mlp is Mlp.DENSE:  # both halves end in partial sums over tp, which are added before they are reduced
        w.ops[-1] = w.ops[-1].but(partial=True)
    z = w.hidden_dropout("mlp", MLPS[w.layer.mlp](w, normed), Component.RESIDUAL)
    y = w.hidden_dropout(name, y, Component.RESIDUAL)
    out = w.tensor(f"{name}.residual.out", w.hidden)
    w.memory_op(f"{name}.residual", OpKind.ELEMENTWISE, (x, y, z), (out,), Component.RESIDUAL)
