"""Small patterns in a flow: a product with a weight, a norm, a rotation, a (gated) activation. Writes no op.

Each pattern gives what it found, with the records it is made of, or None. They look at operations and at what values
depend on, never at names of modules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from capture.flow import Flow, Region, Source
from capture.records import Record, Value

__all__ = [
    "Activation",
    "Grouped",
    "NormFound",
    "Product",
    "activation",
    "dropout",
    "grouped",
    "norm",
    "product",
    "rotation",
]

POINTWISE = frozenset(
    """silu gelu relu sigmoid tanh mul add sub clamp pow neg softplus exp square hardswish leaky_relu
mish relu_ clamp_min clamp_max""".split()
)
CURVES = frozenset("silu gelu relu sigmoid tanh hardswish leaky_relu mish softplus".split())
# Of x: by halves or pairs, as two rotated parts, as complex numbers; or scaled by position alone.
ROTATIONS: tuple[dict[str, int], ...] = (
    {"mul": 2, "add": 1, "neg": 1, "cat": 1}, {"mul": 4, "add": 1, "sub": 1, "cat": 1},
    {"mul": 2, "add": 1, "neg": 1, "stack": 1}, {"mul": 4, "add": 1, "sub": 1, "stack": 1},
    {"mul": 1, "view_as_complex": 1, "view_as_real": 1}, {"mul": 1}, {},
)  # fmt: skip
JOINING = frozenset("cat copy_ alias_of".split())  # one more `cat`, or writing into a new tensor, joins parts
ROTATING = frozenset("mul add sub neg cat stack copy_ alias_of view_as_complex view_as_real".split())


@dataclass(frozen=True, slots=True)
class Product:
    """y = x W + b: `k` x `n` of weight; `out` is the value of y."""

    x: int
    out: int
    weight: Value
    bias: Value | None
    k: int
    n: int
    records: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grouped:
    """A product of every expert with its rows."""

    x: int
    out: int
    weight: Value
    bias: Value | None
    experts: int
    k: int
    n: int
    records: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NormFound:
    """A norm of x; `gate`: a value whose silu it is multiplied with, before or behind."""

    x: int
    weight: Value | None
    bias: Value | None
    centred: bool
    width: int  # over how many elements
    gate: int | None
    records: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Activation:
    """A curve of one value, or that times another. `curved` are the records up to the product of the two."""

    gate: int
    up: int | None
    curved: tuple[int, ...]
    rest: tuple[int, ...]


def product(flow: Flow, value: int) -> Product | None:
    """A matrix product with a weight, its bias added inside or behind."""
    at, records, bias = flow.strip(value), [], None
    record = flow.record_of(at)
    if record is not None and record.name in {"add", "add_"} and len(record.inputs) == 2:
        sides = [v for v in record.inputs if flow.is_data(v)]
        rest = [v for v in record.inputs if flow.source(v) is Source.TRAINED]
        if len(sides) == len(rest) == 1:
            bias, records = flow.parameter(rest[0]), [flow.index_of(at)]
            at = flow.strip(sides[0])
            record = flow.record_of(at)
    if record is None or record.name not in {"mm", "addmm", "bmm"}:
        return None
    operands = record.inputs
    if record.name == "addmm":
        bias, operands = flow.parameter(record.inputs[0]), record.inputs[1:]
    if len(operands) != 2 or flow.source(operands[1]) is not Source.TRAINED or not flow.is_data(operands[0]):
        return None
    weight = flow.parameter(operands[1])
    if weight is None:
        return None
    k, n = flow.values[operands[1]].shape[-2:]
    return Product(flow.strip(operands[0]), at, weight, bias, k, n, (*records, flow.index_of(at)))


def grouped(flow: Flow, value: int) -> Grouped | None:
    """A grouped product, with biases of each row's expert added behind."""
    at, records, bias = flow.strip(value), [], None
    record = flow.record_of(at)
    if record is not None and record.name in {"add", "add_"} and len(record.inputs) == 2:
        for side, other in (record.inputs, record.inputs[::-1]):
            looked_up = flow.made_by(other, "index")
            if looked_up is not None and flow.source(looked_up.inputs[0]) is Source.TRAINED:
                bias = flow.parameter(looked_up.inputs[0])
                records = [flow.index_of(at), flow.index_of(looked_up.outputs[0])]
                at = flow.strip(side)
                record = flow.record_of(at)
                break
    if record is None or record.name not in {"_grouped_mm", "grouped_mm_fallback"}:
        return None
    weight = flow.parameter(record.inputs[1])
    if weight is None:
        return None
    experts, k, n = flow.values[record.inputs[1]].shape
    return Grouped(flow.strip(record.inputs[0]), at, weight, bias, experts, k, n, (*records, flow.index_of(at)))


def norm(flow: Flow, value: int) -> NormFound | None:
    """native_layer_norm, or x / sqrt(mean(x^2) + eps) with or without weight, bias and gate."""
    at = flow.strip(value)
    record = flow.record_of(at)
    if record is None:
        return None
    if record.name in {"native_layer_norm", "_fused_rms_norm"}:
        weight, bias = ([flow.parameter(v) for v in record.inputs[1:]] + [None, None])[:2]
        width = flow.values[record.inputs[0]].shape[-1]
        return NormFound(flow.strip(record.inputs[0]), weight, bias, record.name == "native_layer_norm", width, None,
                         (flow.index_of(at),))  # fmt: skip
    records: list[int] = []
    gate = weight = None
    for _ in range(3):  # gate and weight in either order, then the core
        record = flow.record_of(at)
        if record is None or record.name != "mul" or len(record.inputs) != 2:
            return None
        core = _root_mean_square(flow, record)
        if core is not None:
            x, inner, width = core
            early = _gated(flow, x)
            if early is not None and gate is None:
                x, gate, more = early
                inner += more
            x, less_mean = _centred(flow, x)
            everything = (*records, flow.index_of(at), *inner, *less_mean)
            return NormFound(flow.strip(x), weight, None, bool(less_mean), width, gate, everything)
        records.append(flow.index_of(at))
        sides = sorted(record.inputs, key=flow.is_data)
        if not flow.is_data(sides[0]):
            if weight is not None or flow.source(sides[0]) is not Source.TRAINED:
                return None
            weight, at = flow.parameter(sides[0]), flow.strip(sides[1])
            continue
        found = _gated(flow, at)
        if gate is not None or found is None:
            return None
        x, gate, more = found
        records += more
        at = flow.strip(x)
    return None


def _root_mean_square(flow: Flow, record: Record) -> tuple[int, tuple[int, ...], int] | None:
    """Of x * rsqrt(mean(x^2) + eps): x, the records inside, and the width of the mean."""
    for x, scale in (record.inputs, record.inputs[::-1]):
        root = flow.made_by(scale, "rsqrt")
        added = flow.made_by(root.inputs[0], "add") if root is not None else None
        mean = flow.made_by(added.inputs[0], "mean") if added is not None else None
        square = flow.made_by(mean.inputs[0], "pow", "square", "mul") if mean is not None else None
        if root is None or added is None or mean is None or square is None:
            continue
        inside = tuple(flow.index_of(r.outputs[0]) for r in (root, added, mean, square))
        width = flow.values[mean.inputs[0]].shape[-1]
        if flow.strip(square.inputs[0]) == flow.strip(x):
            return x, inside, width
        one, two = (flow.made_by(v, "sub") for v in (x, square.inputs[0]))  # the mean was taken away twice
        if one and two and [flow.strip(v) for v in one.inputs] == [flow.strip(v) for v in two.inputs]:
            return x, (*inside, flow.index_of(two.outputs[0])), width
    return None


def _centred(flow: Flow, value: int) -> tuple[int, tuple[int, ...]]:
    """Of x - mean(x): x and the records; of anything else the value itself."""
    less = flow.made_by(value, "sub")
    mean = flow.made_by(less.inputs[1], "mean") if less is not None and len(less.inputs) == 2 else None
    if less is None or mean is None or flow.strip(mean.inputs[0]) != flow.strip(less.inputs[0]):
        return value, ()
    return less.inputs[0], tuple(flow.index_of(r.outputs[0]) for r in (less, mean))


def _gated(flow: Flow, value: int) -> tuple[int, int, tuple[int, ...]] | None:
    """Of x * silu(gate): x, gate, the records."""
    times = flow.made_by(value, "mul")
    if times is None or len(times.inputs) != 2:
        return None
    for x, curve in (times.inputs, times.inputs[::-1]):
        silu = flow.made_by(curve, "silu")
        if silu is not None and flow.is_data(x):
            return x, flow.strip(silu.inputs[0]), tuple(flow.index_of(r.outputs[0]) for r in (times, silu))
    return None


def rotation(flow: Flow, value: int) -> Region | None:
    """What lies between a value and what it was rotated, scaled by position or put together from.

    None where the arithmetic is none of the rotations in use.
    """

    def allowed(record: Record) -> bool:
        if record.name == "mul":
            return any(flow.source(v) is Source.CONSTANT for v in record.inputs) or len(record.inputs) == 1
        if record.name in {"add", "sub"}:  # of two rotated halves; a sum of streams is not one
            return all(flow.is_data(v) for v in record.inputs) and len(record.inputs) == 2
        return record.name in ROTATING

    found = flow.region(value, allowed)
    roots: list[int] = []
    for leaf in found.leaves:
        if flow.root(leaf) not in roots:
            roots.append(flow.root(leaf))
    found.leaves = roots
    counts = Counter(flow.records[i].name for i in found.records if i not in flow.passed)
    arithmetic = {name: counts[name] for name in ROTATING - JOINING if counts[name]}
    known = [r for r in ROTATIONS if {name: n for name, n in r.items() if name not in JOINING} == arithmetic]
    return found if any(r.get("cat", 0) <= counts["cat"] <= r.get("cat", 0) + 1 for r in known) else None


def dropout(flow: Flow, value: int) -> tuple[int, float, tuple[int, ...]] | None:
    """Of x times a random mask: x, the share left out, and the record."""
    times = flow.made_by(value, "mul")
    for x, mask in () if times is None or len(times.inputs) != 2 else (times.inputs, times.inputs[::-1]):
        drawn = flow.made_by(mask, "div_", "bernoulli_", "bernoulli")
        drawn = flow.made_by(drawn.inputs[0], "bernoulli_") if drawn is not None and drawn.name == "div_" else drawn
        if times is not None and drawn is not None and flow.is_data(x):
            kept = next(a for a in drawn.arguments if isinstance(a, float))
            return x, round(1.0 - kept, 9), (flow.index_of(times.outputs[0]),)
    return None


def activation(flow: Flow, value: int) -> Activation | None:
    """A curve, or a product of a curve with another value; clamps and shifts belong to it."""
    found = _pointwise(flow, value)
    if not found.names & (CURVES | {"pow"}) or not 1 <= len(found.leaves) <= 2:
        return None
    if len(found.leaves) == 1:
        return Activation(found.leaves[0], None, tuple(found.records), ())
    last = flow.made_by(value, "mul")
    if last is None or len(last.inputs) != 2:
        return None
    for curved, plain in (last.inputs, last.inputs[::-1]):
        one, other = _pointwise(flow, curved), _pointwise(flow, plain)
        if one.names & CURVES and not other.names & CURVES and len(one.leaves) == len(other.leaves) == 1:
            rest = tuple(i for i in found.records if i not in one.records)
            return Activation(one.leaves[0], other.leaves[0], tuple(one.records), rest)
    return None


def _pointwise(flow: Flow, value: int) -> Region:
    return flow.region(value, lambda record: record.name in POINTWISE, parts=False)
