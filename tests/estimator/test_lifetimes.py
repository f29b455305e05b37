"""When tensors of a block come and go: bytes of every op, counted by hand."""

from __future__ import annotations

import pytest

from estimator.detail.lifetimes import lifetimes
from estimator.graph import Block, BlockKind
from estimator.op import Axis, Component, Dim, Op, OpKind, Phase, Save, Tensor
from estimator.precision import Role, recipe

FP8 = recipe("fp8")  # activations take 2 bytes, inputs of GEMMs 1
X, H, Y, OUT = 1.0, 10.0, 100.0, 1000.0  # elements
KEPT_AS_INPUT, KEPT_AS_IT_IS = Role.LINEAR_INPUT, Role.ACTIVATION
F, R, B, W = Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.WEIGHT_GRAD


def op(name, kind, inputs, outputs, phase=F, saves=()):
    return Op(
        name=name, kind=kind, component=Component.MLP, inputs=inputs, outputs=outputs, phase=phase,
        saves=tuple(Save(tensor, role) for tensor, role in saves),
    )  # fmt: skip


def block(*extra, keeps=()):
    """GEMM, activation, GEMM with their backward; gradients go by the names of their tensors."""
    elements = {"x": X, "h": H, "y": Y, "out": OUT}
    return Block(
        kind=BlockKind.DENSE,
        input="x",
        tensors={name: Tensor((Dim(size, Axis.HIDDEN),)) for name, size in elements.items()},
        ops=(
            op("up", OpKind.MATMUL, ("x",), ("h",), saves=[("x", KEPT_AS_INPUT)]),
            op("act", OpKind.ACTIVATION, ("h",), ("y",), saves=[("h", KEPT_AS_IT_IS), *keeps]),
            op("down", OpKind.MATMUL, ("y",), ("out",), saves=[("y", KEPT_AS_INPUT)]),
            *extra,
            op("down.grad", OpKind.MATMUL, ("out",), ("y",), B),
            op("down.weight_grad", OpKind.MATMUL, ("out",), ("y",), W),
            op("act.grad", OpKind.ACTIVATION, ("y",), ("h",), B),
            op("up.grad", OpKind.MATMUL, ("h",), ("x",), B),
            op("up.weight_grad", OpKind.MATMUL, ("h",), ("x",), W),
        ),
    )


def test_what_is_kept_lives_to_its_last_backward_reader_and_gradients_to_theirs():
    lives = lifetimes(block(), FP8, splits=False)
    assert lives == {
        (F, "up"): [1 * X + 2 * H, 0.0],
        (F, "act"): [1 * Y, 0.0],
        (F, "down"): [2 * OUT, 2 * OUT],  # handed on: the next block counts it
        (B, "down.grad"): [2 * OUT + 2 * Y, 0.0],
        (W, "down.weight_grad"): [0.0, 1 * Y + 2 * OUT],
        (B, "act.grad"): [2 * H, 2 * H + 2 * Y],
        (B, "up.grad"): [2 * X, 2 * X],
        (W, "up.weight_grad"): [0.0, 1 * X + 2 * H],
    }


def test_gradients_wait_for_split_weight_gradients_in_the_width_of_a_gemm():
    lives = lifetimes(block(), FP8, splits=True)
    assert lives[B, "down.grad"] == [2 * OUT + 2 * Y + 1 * OUT, 2 * OUT]
    assert lives[W, "down.weight_grad"] == [0.0, 1 * Y + 1 * OUT]
    assert lives[B, "up.grad"] == [2 * X + 1 * H, 2 * X + 2 * H]
    assert lives[W, "up.weight_grad"] == [0.0, 1 * X + 1 * H]


def test_what_runs_again_is_made_anew_for_its_backward_readers_and_keeps_its_input():
    lives = lifetimes(block(op("act", OpKind.ACTIVATION, ("h",), ("y",), R)), FP8, splits=False)
    assert lives[F, "act"] == [2 * Y, 0.0]
    assert lives[F, "down"] == [2 * OUT, 2 * OUT + 2 * Y]
    assert lives[R, "act"] == [2 * Y, 0.0]
    assert lives[W, "down.weight_grad"] == [0.0, 2 * Y + 2 * OUT]
    assert lives[B, "act.grad"] == [2 * H, 2 * H + 2 * Y]


@pytest.mark.parametrize("splits", [False, True])
def test_a_tensor_wanted_in_two_widths_is_stored_twice(splits):
    lives = lifetimes(block(keeps=[("h", KEPT_AS_INPUT)]), FP8, splits=splits)
    assert lives[F, "up"] == [1 * X + (2 + 1) * H, 0.0]


@pytest.mark.parametrize("splits", [False, True])
def test_every_byte_that_comes_goes(splits):
    lives = lifetimes(block(op("act", OpKind.ACTIVATION, ("h",), ("y",), R)), FP8, splits=splits)
    assert sum(born for born, _ in lives.values()) == sum(dead for _, dead in lives.values())
