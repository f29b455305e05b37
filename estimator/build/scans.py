"""Mixers that carry a state: Mamba-2 and the gated delta net, as products within chunks and a recurrence over them.

All heads of a rank run over its whole sequence; context parallelism spreads heads (passes/collectives.py). What decides
the sizes of a scan is in its multiply-adds per token and head. Ignores decays, steps and skips: vectors.
"""

from __future__ import annotations

from estimator.build.writer import Writer
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor, Weight
from estimator.parts import LinearAttentionSpec, MambaSpec
from estimator.precision import Role

__all__ = ["conv", "delta_scan", "gated_delta_net", "gated_norm", "mamba", "mamba_scan"]


def mamba(w: Writer, x: str) -> str:
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 7 and Figure 6).

    One projection to gate, x, B, C and steps; a convolution over x, B and C; the scan; a gated norm; the projection
    out. Groups split over tp with their heads, as Megatron-Core asks (rules.py, `mamba_groups`).
    """
    spec = w.model.mamba
    assert spec is not None
    part = Component.MAMBA
    inner, convolved, steps = (_heads(n, spec.num_heads) for n in (spec.inner, spec.conv_width, spec.num_heads))
    width = _heads(spec.inner + spec.conv_width + spec.num_heads, spec.num_heads)
    w.linear("mamba.in_proj", x, w.hidden, width, part)
    gate, xbc, dt = w.split(("mamba.gate", inner), ("mamba.xbc", convolved), ("mamba.dt", steps))
    xbc = conv(w, "mamba.conv", xbc, convolved, spec.conv, part, bias=spec.conv_bias)
    y = gated_norm(w, "mamba.norm", mamba_scan(w, spec, xbc, dt), gate, inner, inner, part)
    return w.linear("mamba.out_proj", y, inner, w.hidden, part)


def mamba_scan(w: Writer, spec: MambaSpec, xbc: str, dt: str) -> str:
    """The recurrence over x, B and C with its steps."""
    part, inner, steps = Component.MAMBA, _heads(spec.inner, spec.num_heads), _heads(spec.num_heads, spec.num_heads)
    # Q tokens of a chunk, N state, P head: C B^T once a group, (C B^T) X, B^T X into the state, C times the state
    # (arXiv:2405.21060, section 6). Blocks on the diagonal are formed whole.
    q, n, p = spec.chunk, spec.state, spec.head_dim
    per_head = q * n * spec.groups / spec.num_heads + q * p + 2 * n * p
    # Backward forms the convolution's output again and keeps only its input, as Mamba's fused kernel does. The state
    # after each chunk is written in fp32, passed on to the next, and left in the activation's dtype.
    states = Dim(float(spec.num_heads * n * p), Axis.HEADS, units=spec.num_heads)
    y = _scan(w, "mamba.scan", (xbc, dt), inner, spec.num_heads, per_head, part, chunk=q, keeps=(dt,),
              states={"mamba.states": (states, Role.FULL), "mamba.passed": (states, Role.ACTIVATION)})  # fmt: skip
    for name in ("decay", "step_bias", "skip"):
        w.weight(f"mamba.{name}", steps)
    return y


def gated_delta_net(w: Writer, x: str) -> str:
    """Gated delta net (Yang 2024, arXiv:2412.06464, section 3.3) with Qwen3.5's four projections."""
    spec = w.model.linear
    assert spec is not None
    part, keys, heads = Component.LINEAR_ATTENTION, spec.num_key_heads, spec.num_value_heads
    convolved, value = _heads(2 * spec.key_width + spec.value_width, keys), _heads(spec.value_width, keys)
    number = _heads(heads, keys)
    qkv = w.linear("linear.qkv_proj", x, w.hidden, convolved, part)
    gate = w.linear("linear.gate_proj", x, w.hidden, value, part)
    beta = w.linear("linear.beta_proj", x, w.hidden, number, part)
    decay = w.linear("linear.decay_proj", x, w.hidden, number, part)
    qkv = conv(w, "linear.conv", qkv, convolved, spec.conv, part)
    y = delta_scan(w, spec, qkv, beta, decay)
    y = gated_norm(w, "linear.norm", y, gate, value, Dim(float(spec.value_head_dim), Axis.HEAD), part)
    return w.linear("linear.out_proj", y, value, w.hidden, part)


def delta_scan(w: Writer, spec: LinearAttentionSpec, qkv: str, beta: str, decay: str) -> str:
    """The gated delta rule over queries, keys and values."""
    part, keys, heads = Component.LINEAR_ATTENTION, spec.num_key_heads, spec.num_value_heads
    value, number = _heads(spec.value_width, keys), _heads(heads, keys)
    # C tokens of a chunk, k and v widths of a head: K K^T, its inverse times K and times V, Q K^T, that times the new
    # values; the state read for values and for outputs, and written. Ignores the triangular inverse, C^2/6 a token.
    c, k, v = spec.chunk, spec.key_head_dim, spec.value_head_dim
    per_head = c * (3 * k + 2 * v) + 3 * k * v
    states = Dim(float(heads * k * v), Axis.HEADS, units=heads)
    y = _scan(w, "linear.scan", (qkv, beta, decay), value, heads, per_head, part, chunk=c,
              keeps=(qkv, beta, decay),
              states={"linear.states": (states, Role.ACTIVATION)}, units=keys)  # fmt: skip
    inverse = w.tensor("linear.inverse", _heads(heads * c, keys))  # the C x C triangle of every chunk and head
    w.ops[-1] = w.ops[-1].but(saves=(*w.ops[-1].saves, Save(inverse, Role.ACTIVATION)),
                              outputs=(*w.ops[-1].outputs, inverse))  # fmt: skip
    for name in ("decay", "step_bias"):
        w.weight(f"linear.{name}", number)
    return y


def _heads(size: int, units: int) -> Dim:
    return Dim(float(size), Axis.HEADS, units=units)


def conv(w: Writer, name: str, x: str, width: Dim, taps: int, part: Component, *, bias: bool = False) -> str:
    """Depthwise and causal, with its activation function. Keeps its input; backward forms the output again."""
    out = w.tensor(f"{name}.out", width)
    w.memory_op(name, OpKind.CONV, (x,), (out,), part, saves=(Save(x, Role.ACTIVATION),))
    w.weight(f"{name}.weight", width, Dim(float(taps), Axis.HEAD))
    if bias:
        w.weight(f"{name}.bias", width)
    return out


def _scan(
    w: Writer, name: str, inputs: tuple[str, ...], width: Dim, heads: int, per_head: float, part: Component, *,
    chunk: int, states: dict[str, tuple[Dim, Role]], keeps: tuple[str, ...], units: int = 0,
) -> str:  # fmt: skip
    """The recurrence, which `keeps` some of its inputs."""
    out = w.tensor(f"{name}.out", width)
    chunks = Dim(w.seq / chunk, Axis.TOKENS)
    for state, (dim, role) in states.items():
        w.tensors[state] = Tensor((chunks, dim), role)
    dims = (w.tokens, Dim(float(heads), Axis.HEADS, units=units or heads), Dim(float(per_head), Axis.HEAD))
    w.ops.append(
        Op(name=name, kind=OpKind.SCAN, component=part, dims=dims, inputs=inputs, outputs=(out, *states),
           saves=tuple(Save(x, Role.ACTIVATION) for x in keeps), role=Role.ACTIVATION)
    )  # fmt: skip
    return out


def gated_norm(w: Writer, name: str, x: str, gate: str, width: Dim, weight: Dim, part: Component) -> str:
    """RMSNorm of x times silu(gate), in one pass over both."""
    out = w.norm(name, x, width, part)
    last = w.ops[-1]
    w.ops[-1] = last.but(inputs=(x, gate), saves=(*last.saves, Save(gate, Role.ACTIVATION)),
                         weights=(Weight(f"{name}.weight", (weight,), linear=False),))  # fmt: skip
    return out
