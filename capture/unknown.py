"""What no pattern knows, when the user allows it: an op that streams its tensors for every record. Told, not silent."""

from __future__ import annotations

from capture.flow import PART, SAME
from capture.lift import Lift
from estimator.op import Axis, Component, Dim, OpKind, Tensor, Weight

__all__ = ["price_as_memory"]

COMPONENTS = {"attention": Component.ATTENTION, "mlp": Component.MLP, "linear": Component.LINEAR_ATTENTION,
              "mamba": Component.MAMBA}  # fmt: skip


def price_as_memory(lift: Lift, name: str, branch: int) -> tuple[str, list[str]]:
    """The tensor that a branch ends in, and the names of its ops. Widths are split over no axis."""
    flow, w = lift.flow, lift.w
    made: dict[int, str] = dict(lift.names)
    ops: list[str] = []
    seen: set[str] = set()
    for i in sorted(flow.live([branch], frozenset(lift.names))):
        record = flow.records[i]
        if not any(flow.is_data(v) for v in record.outputs):
            continue
        if record.name in SAME | PART | {"alias_of"}:
            if (known := made.get(record.inputs[0])) is not None:
                made |= dict.fromkeys(record.outputs, known)
            continue
        op = f"{name}.unknown{len(ops)}.{record.name}"
        outs = []
        for j, value in enumerate(record.outputs):
            out = f"{op}.out{j or ''}"
            width = flow.values[value].elements / lift.rows
            w.tensors[out] = Tensor((w.tokens, Dim(width, Axis.LATENT)), lift.role_of(value))
            made[value] = out
            outs.append(out)
        inputs = tuple(dict.fromkeys(made[v] for v in record.inputs if v in made))
        w.memory_op(op, OpKind.ELEMENTWISE, inputs, tuple(outs), COMPONENTS[name])
        for value in record.inputs:
            found = flow.parameter(value) if not flow.is_data(value) else None
            if found is not None and found.trained and found.parameter not in seen:
                seen.add(found.parameter)
                dims = tuple(Dim(float(size), Axis.LATENT) for size in found.shape)
                last = w.ops[-1]
                weight = Weight(f"{op}.{found.parameter.rpartition('.')[2]}", dims, linear=False)
                w.ops[-1] = last.but(weights=(*last.weights, weight))
        lift.claim(op, i)
        ops.append(op)
    return made[flow.strip(branch)], ops
