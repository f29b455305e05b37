"""Collects the ops and tensors of one block while it is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from estimator.graph import Block, BlockKind
from estimator.layers import LayerSpec
from estimator.model import ModelSpec, Norm
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor, Weight
from estimator.precision import Role
from estimator.strategy import Module

__all__ = ["Writer"]

NORMS = frozenset({Module.LAYERNORM.value})


@dataclass(slots=True)
class Writer:
    """Collects the ops and tensors of one block."""

    model: ModelSpec
    seq: int
    layer: LayerSpec = field(default_factory=LayerSpec)
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, name: str, *dims: Dim, role: Role = Role.ACTIVATION) -> str:
        """A tensor of all tokens; its name."""
        self.tensors[name] = Tensor((self.tokens, *dims), role)
        return name

    @property
    def tokens(self) -> Dim:
        """Of one sequence."""
        return Dim(float(self.seq), Axis.TOKENS)

    @property
    def centred(self) -> bool:
        """Whether the model's norms subtract the mean."""
        return self.model.norm is Norm.LAYER

    @property
    def hidden(self) -> Dim:
        """Width of a layer's input."""
        return Dim(float(self.model.hidden), Axis.HIDDEN)

    @property
    def stream(self) -> Dim:
        """Width of what one layer hands to the next: as many streams as hyper-connections keep."""
        streams = 1 if self.model.hyper is None else self.model.hyper.streams
        return Dim(float(self.model.hidden * streams), Axis.HIDDEN)

    def linear(
        self, name: str, x: str, k: Dim, n: Dim, component: Component, *, modules: frozenset[str] = frozenset(),
        bias: bool = False, save_as: Role = Role.LINEAR_INPUT, role: Role | None = None, detached: bool = False,
    ) -> str:  # fmt: skip
        """A product y = x W (+ b): keeps x for the weight gradient. `detached`: no gradient goes on to x."""
        out = self.tensor(f"{name}.out", n, role=Role.LOGITS if component is Component.HEAD else Role.ACTIVATION)
        role = role or save_as
        weights = [Weight(f"{name}.weight", (k, n), linear=role is Role.LINEAR_INPUT)]
        if bias:
            weights.append(Weight(f"{name}.bias", (n,), linear=False))
        self.ops.append(
            Op(name=name, kind=OpKind.MATMUL, component=component, dims=(self.tokens, k, n), inputs=(x,),
               outputs=(out,), saves=(Save(x, save_as),), weights=tuple(weights), modules=modules, role=role,
               detached=detached)
        )  # fmt: skip
        return out

    def norm(
        self, name: str, x: str, width: Dim, component: Component = Component.NORM, *, centred: bool = False
    ) -> str:
        """RMSNorm, or LayerNorm where centred, as Hugging Face writes it: fp32 inside. Fusion has its kernel."""
        out = self.tensor(f"{name}.out", width)
        scale = self.tensor(f"{name}.rstd", role=Role.FULL)
        weights = [Weight(f"{name}.weight", (width,), linear=False)]
        if centred:
            weights.append(Weight(f"{name}.bias", (width,), linear=False))
        self.ops.append(
            Op(name=name, kind=OpKind.NORM, component=component, inputs=(x,), outputs=(out,),
               saves=(Save(x, Role.FULL), Save(x, Role.ACTIVATION), Save(scale, Role.FULL)), weights=tuple(weights),
               modules=NORMS, passes=3.0)
        )  # fmt: skip
        return out

    def memory_op(
        self, name: str, kind: OpKind, inputs: tuple[str, ...], outputs: tuple[str, ...], component: Component,
        saves: tuple[Save, ...] = (), modules: frozenset[str] = frozenset(), passes: float = 1.0,
    ) -> None:  # fmt: skip
        """An op that streams its tensors."""
        self.ops.append(Op(name=name, kind=kind, component=component, inputs=inputs, outputs=outputs, saves=saves,
                           modules=modules, passes=passes))  # fmt: skip

    def weight(self, name: str, *dims: Dim) -> None:
        """A small parameter of the last op, whose arithmetic is left out."""
        last = self.ops[-1]
        self.ops[-1] = last.but(weights=(*last.weights, Weight(name, dims, linear=False)))

    def split(self, *parts: tuple[str, Dim]) -> tuple[str, ...]:
        """Names the parts of what the last op wrote: views, which take no time and no memory beside it."""
        names = tuple(self.tensor(name, dim) for name, dim in parts)
        self.ops[-1] = self.ops[-1].but(outputs=(*self.ops[-1].outputs, *names))
        return names

    def blocked(self, name: str, x: str, blocks: Dim, k: float, n: float, component: Component, *,
                modules: frozenset[str] = frozenset()) -> str:  # fmt: skip
        """A block-diagonal product: every block of columns, such as a head, has a weight of its own."""
        inner, width = Dim(k, Axis.HEAD), Dim(n, Axis.HEAD)
        out = self.tensor(f"{name}.out", Dim(blocks.size * n, blocks.axis, blocks.units))
        weight = Weight(f"{name}.weight", (blocks, inner, width))
        self.ops.append(
            Op(name=name, kind=OpKind.BLOCK_MATMUL, component=component, dims=(self.tokens, blocks, inner, width),
               inputs=(x,), outputs=(out,), saves=(Save(x, Role.LINEAR_INPUT),), weights=(weight,), modules=modules)
        )  # fmt: skip
        return out

    def dropout(self, name: str, x: str, out: str, component: Component, modules: frozenset[str] = frozenset()) -> str:
        """`out` is x with elements left out at random; backward finds the same ones by a mask (torch.nn.Dropout)."""
        self.tensors[out] = self.tensors[x]
        mask = f"{name}.mask"
        self.tensors[mask] = Tensor(self.tensors[x].dims, Role.MASK)
        self.memory_op(name, OpKind.DROPOUT, (x,), (out, mask), component, (Save(mask, Role.MASK),), modules)
        return out

    def hidden_dropout(self, name: str, x: str, component: Component) -> str:
        """What a model with dropout of hidden states makes of `x` before it is added to the stream."""
        if not self.model.hidden_dropout:
            return x
        return self.dropout(f"{name}.dropout", x, f"{name}.dropout.out", component)

    def residual(self, name: str, x: str, y: str) -> str:
        """The sum of two streams."""
        out = self.tensor(f"{name}.out", self.hidden)
        self.memory_op(name, OpKind.ELEMENTWISE, (x, y), (out,), Component.RESIDUAL)
        return out

    def block(self, kind: BlockKind, entry: str) -> Block:
        """What has been written."""
        return Block(kind=kind, ops=tuple(self.ops), tensors=self.tensors, input=entry)
