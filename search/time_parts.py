"""Where the seconds of one evaluation go, in the words of people who look for what is wrong with it. Prices no step."""

from __future__ import annotations

from collections.abc import Mapping

from estimator.op import OpKind
from estimator.result import StepResult
from search.commands.ops import price_ops
from search.commands.point import Point
from search.configuration import Configuration

__all__ = ["seconds_by_part"]

PARTS: Mapping[str, tuple[str, ...]] = {
    "bubble": ("bubble_s",),
    "tp": ("exposed_comm_tp_s",),
    "cp": ("exposed_comm_cp_s",),
    "ep": ("exposed_comm_ep_s",),
    "pp": ("exposed_comm_pp_s",),
    "dp": ("exposed_comm_dp_s", "optimizer_comm_s"),
    "offload": ("exposed_offload_s",),
    "host": ("exposed_host_s", "fixed_host_s"),
    "optimizer": ("optimizer_s",),
    "jitter": ("jitter_s",),
}
"""Columns of a result beside the kernels of its passes."""
PRODUCTS = frozenset({OpKind.MATMUL.value, OpKind.GROUPED_MATMUL.value, OpKind.BLOCK_MATMUL.value})
ATTENTION = frozenset(
    {k.value for k in (OpKind.ATTENTION, OpKind.SCORES, OpKind.SOFTMAX, OpKind.CONTEXT, OpKind.SCAN, OpKind.INDEX)}
)


def seconds_by_part(config: Configuration, result: StepResult) -> dict[str, float]:
    """The step, in parts that sum to it: kernels by kind, then what they wait for.

    A step knows its kernels' seconds as a whole. They are shared out like those of one micro-batch on all layers.
    """
    shares = _kernel_shares(config)
    kernels = {name: float(result.columns["compute_s"]) * share for name, share in shares.items()}
    rest = {name: sum(float(result.columns[c]) for c in columns) for name, columns in PARTS.items()}
    return kernels | rest


def _kernel_shares(config: Configuration) -> dict[str, float]:
    if config.system.segments:
        return {"kernels": 1.0}
    point = Point(
        name="", model=config.model, system=config.system, workload=config.workload, strategy=config.strategy
    )  # fmt: skip
    seconds = {"matrix products": 0.0, "attention": 0.0, "memory-bound": 0.0}
    for op in price_ops(point):
        if op.source != "link":
            kind = "matrix products" if op.kind in PRODUCTS else "attention" if op.kind in ATTENTION else "memory-bound"
            seconds[kind] += op.times * op.seconds
    total = sum(seconds.values())
    return {kind: value / total for kind, value in seconds.items()}
