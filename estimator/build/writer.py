"""Collects the ops and tensors of one block while it is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from estimator.graph import Block, BlockKind
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
        """Width of the residual stream."""
        return Dim(float(self.model.hidden), Axis.HIDDEN)

    def linear(
        self, name: str, x: str, k: Dim, n: Dim, component: Component, *, modules: frozenset[str] = frozenset(),
        bias: bool = False, save_as: Role = Role.LINEAR_INPUT, role: Role | None = None,
    ) -> str:  # fmt: skip
        """A product y = x W (+ b): keeps x for the weight gradient."""
        out = self.tensor(f"{name}.out", n, role=Role.LOGITS if component is Component.HEAD else Role.ACTIVATION)
        role = role or save_as
        weights = [Weight(f"{name}.weight", (k, n), linear=role is Role.LINEAR_INPUT)]
        if bias:
            weights.append(Weight(f"{name}.bias", (n,), linear=False))
        self.ops.append(
            Op(name=name, kind=OpKind.MATMUL, component=component, dims=(self.tokens, k, n), inputs=(x,),
               outputs=(out,), saves=(Save(x, save_as),), weights=tuple(weights), modules=modules, role=role)
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

    def residual(self, name: str, x: str, y: str) -> str:
        """The sum of two streams."""
        out = self.tensor(f"{name}.out", self.hidden)
        self.memory_op(name, OpKind.ELEMENTWISE, (x, y), (out,), Component.RESIDUAL)
        return out

    def block(self, kind: BlockKind, entry: str) -> Block:
        """What has been written."""
        return Block(kind=kind, ops=tuple(self.ops), tensors=self.tensors, input=entry)
