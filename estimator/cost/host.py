"""Host seconds of one launch in a block: what keeps a device waiting where its kernels are short. Knows no passes."""

from __future__ import annotations

from estimator.graph import Block
from estimator.op import OpKind, Phase
from estimator.passes.shard import CORE_KINDS
from hardware.system import SystemSpec

__all__ = ["launch_seconds"]

ONCE = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD)
"""Phases in which every op of a layer is launched once, recompute aside."""


def launch_seconds(block: Block, system: SystemSpec) -> float:
    """Of each kernel of a block, were it launched by itself.

    The chip's own launch, or what software takes for a layer, spread evenly over the launches of its forward and
    backward: so a layer takes its figure where nothing is captured, and what CUDA graphs capture costs nothing.
    """
    known = system.software
    if known is None:
        return system.chip.launch_s
    launched = [
        op for phase in ONCE for op in block.of_phase(phase) if op.kind is not OpKind.COLLECTIVE and not op.rides
    ]
    if not any(op.kind in CORE_KINDS for op in launched):
        return system.chip.launch_s
    routed = any(op.kind is OpKind.GROUPED_MATMUL for op in launched)
    layer = known.routed_layer_s if routed else known.dense_layer_s
    return max(system.chip.launch_s, layer / len(launched))
