"""Measures the operators of a plan on this machine's device: rows of the tables that calibration reads.

Kernels are called as training calls them: results are allocated anew, operands are random numbers, the matrix product's
layouts are those of forward and both gradients. Each time is the median of repeats (capture/samples.py); what cannot be
trusted is left out and counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from capture.device import Device, clock, torch_dtype
from capture.measure_plan import STREAMS, Attention, Pilot, Plan, Product, Stream, Traffic, width
from capture.ranks import BACKENDS, agreed, in_ranks
from capture.samples import PATIENCE_S, Patience, Sample, sampled, watch
from hardware.units import US

if TYPE_CHECKING:
    import torch

__all__ = ["Measured", "measure", "pilot"]

HEADERS = {
    "gemm": ("dtype", "m", "n", "k", "latency_us", "framework", "version", "layout", "spread"),
    "attention": ("batch", "seq", "heads", "kv_heads", "head_dim", "latency_us", "framework", "version",
                  "kernel_source", "dtype", "pass", "spread"),
    "streams": ("op", "dtype", "bytes", "latency_us", "framework", "version", "spread"),
    "collectives": ("gpu", "collective", "gpus", "nodes", "bytes", "time_us", "source", "version", "spread"),
}  # fmt: skip
Row = tuple[object, ...]
WAYS = FORWARD, BACKWARD = "forward", "backward"
POOL = 2**16 + 1  # numbers; odd, so that rows of operands differ
PATIENT = 0.2  # of the budget, for waiting until others leave the machine alone; an assumption
ENDING_S = 3.0  # in which ranks end; an assumption
LAST_S = 1.0  # of the last sample; an assumption
GRACE_S = 60.0  # beyond a plan's seconds, before ranks that do not answer are given up


@dataclass(slots=True, kw_only=True)
class Measured:
    """Rows by table, what was left out of each because it could not be trusted, and the seconds that it took."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    distrusted: dict[str, int] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)
    not_reached: int = 0
    took_s: float = 0.0

    def add(self, table: str, sample: Sample, row: Callable[[float], Row]) -> bool:
        """Adds a row, where its sample can be trusted; whether it can."""
        rows = self.rows.setdefault(table, [])
        if sample.trusted:
            rows.append((*row(sample.seconds / US), round(sample.spread, 3)))
        return sample.trusted

    def merge(self, other: Measured) -> None:
        """Adds what others measured."""
        for table, rows in other.rows.items():
            self.rows.setdefault(table, []).extend(rows)
        for table, count in other.distrusted.items():
            self.distrusted[table] = self.distrusted.get(table, 0) + count
        self.unsupported += other.unsupported
        self.not_reached += other.not_reached


def pilot(device: Device, dtypes: Sequence[str]) -> Pilot:
    """A glance at how fast the device is, on sizes that take milliseconds, once others leave it alone."""
    tell = clock(device.kind)
    Patience(left_s=PATIENCE_S, load=watch(device.kind, 1)).wait()
    size = 1024 if device.kind == "cpu" else 4096
    flops = {}
    for name in dtypes:
        probe = Product(dtype=name, m=size, n=size, k=size, layout="nt")
        flops[name] = 2.0 * size**3 / _glance(_product(probe, device.kind), tell)
    core = Attention(dtype=dtypes[0], batch=1, seq=size, heads=8, head_dim=64)
    stream = Stream(dtype=dtypes[0], op="add", nbytes=3 * 2**24)
    return Pilot(
        flops_per_s=flops,
        attention_flops_per_s=2.0 * core.seq**2 * core.heads * core.head_dim
        / _glance(_attention(core, device.kind, FORWARD), tell),
        bytes_per_s=stream.nbytes / _glance(_stream(stream, device.kind), tell),
    )  # fmt: skip


def _glance(run: Callable[[], object], tell: Callable[[Callable[[], object], int], float]) -> float:
    tell(run, 2)
    return min(tell(run, 3) / 3 for _ in range(3))


def measure(device: Device, plan: Plan) -> Measured:
    """Everything in the plan, or as much of it as its seconds allow."""
    start = time.time()
    until = start + plan.seconds
    if device.ranks == 1:
        found = _operators(None, device, plan, until - plan.talking_s)
    else:  # all ranks at once, as they train
        found = in_ranks(
            _operators, device, plan, until - plan.talking_s - ENDING_S, ranks=device.ranks, kind=device.kind,
            threads=device.threads, limit_s=plan.seconds + GRACE_S,
        )  # fmt: skip
    if plan.traffic:
        ranks = max(t.ranks for t in plan.traffic)
        threads = max(1, device.threads * device.ranks // ranks)
        found.merge(
            in_ranks(_collectives, device, plan, until - ENDING_S, ranks=ranks, kind=device.kind, threads=threads,
                     limit_s=until - time.time() + GRACE_S)
        )  # fmt: skip
    found.took_s = time.time() - start
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One thing to time, and the row that its seconds become. `prepare` makes its tensors when its turn comes."""

    table: str
    prepare: Callable[[], Callable[[], object]]
    row: Callable[[float], Row]


def _rounds(
    jobs: Sequence[_Job], found: Measured, take: Callable[[Callable[[], object]], Sample],
    over: Callable[[], bool], agree: Callable[[int], int],
) -> None:  # fmt: skip
    """Every job, then once more those whose samples could not be trusted: others may have left the machine by then."""
    again: list[_Job] = []

    def trusted(job: _Job) -> bool:
        return bool(agree(int(found.add(job.table, take(job.prepare()), job.row))))

    for job in jobs:
        if over():
            found.not_reached += 1
        elif not trusted(job):
            again.append(job)
    for job in again:
        if over() or not trusted(job):
            found.distrusted[job.table] = found.distrusted.get(job.table, 0) + 1


def _operators(rank: int | None, device: Device, plan: Plan, until: float) -> Measured:
    """Products, attention and streams in turns until a time of day, so that an early end leaves some of each."""
    found, agree = Measured(), agreed(rank)
    patience = Patience(left_s=PATIENT * plan.seconds, load=watch(device.kind, device.ranks))
    take = partial(sampled, clock=clock(device.kind), patience=patience, agree=agree)
    jobs = [
        job for item in _in_turns(plan.products, plan.attentions, plan.streams) for job in _jobs(item, device)
    ]  # fmt: skip
    _rounds(jobs, found, take, partial(_past, until - LAST_S, agree), agree)
    return found


def _jobs(item: object, device: Device) -> list[_Job]:
    kind, stamp = device.kind, (device.framework, device.version)
    if isinstance(item, Product):
        return [_Job(table="gemm", prepare=partial(_product, item, kind), row=partial(_product_row, item, stamp))]
    if isinstance(item, Attention):
        return [
            _Job(table="attention", prepare=partial(_attention, item, kind, way),
                 row=partial(_attention_row, item, way, kind, stamp))
            for way in WAYS
        ]  # fmt: skip
    assert isinstance(item, Stream)
    return [_Job(table="streams", prepare=partial(_stream, item, kind), row=partial(_stream_row, item, stamp))]


def _collectives(rank: int, device: Device, plan: Plan, until: float) -> Measured:
    """Collectives of growing groups, until a time of day; ranks that are in none wait."""
    import torch.distributed as dist

    found, everyone = Measured(), agreed(rank)
    sizes = sorted({t.ranks for t in plan.traffic})
    for n in sizes:
        group = dist.new_group(list(range(n)))
        mine = [t for t in plan.traffic if t.ranks == n]
        ends = time.time() + (until - LAST_S - time.time()) / (len(sizes) - sizes.index(n))
        if rank < n:
            had = _supported(mine, rank, group, device.kind, found)
            agree = agreed(rank, group)
            patience = Patience(left_s=PATIENT * plan.talking_s, load=watch(device.kind, n))
            take = partial(sampled, clock=clock(device.kind), patience=patience, agree=agree)
            jobs = [
                _Job(table="collectives", prepare=partial(_traffic, t, rank, group, device.kind),
                     row=partial(_traffic_row, t, device))
                for t in mine
                if t.collective in had
            ]  # fmt: skip
            _rounds(jobs, found, take, partial(_past, ends, agree), agree)
        everyone(0)
    return found


def _past(ends: float, agree: Callable[[int], int]) -> bool:
    return bool(agree(int(time.time() > ends)))


def _supported(items: Sequence[Traffic], rank: int, group: Any, kind: str, found: Measured) -> set[str]:  # noqa: ANN401
    """Collectives that the backend has, by trying the smallest; every rank of the group is told the same."""
    smallest = {t.collective: t for t in sorted(items, key=lambda t: -t.nbytes)}
    had = set()
    for name, item in smallest.items():
        try:
            _traffic(item, rank, group, kind)()
            had.add(name)
        except RuntimeError as error:
            text = f"{name}: {str(error).splitlines()[0]}"
            found.unsupported += [] if text in found.unsupported else [text]
    return had


def _in_turns(*lists: Sequence[object]) -> Iterator[object]:
    """All items, each list spread evenly over the whole."""
    placed = [((i + 0.5) / len(items), n, item) for n, items in enumerate(lists) for i, item in enumerate(items)]
    yield from (item for _, _, item in sorted(placed, key=lambda p: p[:2]))


def _numbers(shape: tuple[int, ...], dtype: str, kind: str) -> torch.Tensor:
    """Normal numbers, the same ones again and again: making as many as an operand has would outlast its product."""
    import torch

    some = torch.randn(POOL, device=kind).to(torch_dtype(dtype))
    elements = math.prod(shape)
    return some.repeat(-(-elements // POOL))[:elements].view(shape)


def _product(p: Product, kind: str) -> Callable[[], object]:
    import torch

    left = _numbers((p.k, p.m) if p.layout == "tn" else (p.m, p.k), p.dtype, kind)
    right = _numbers((p.n, p.k) if p.layout == "nt" else (p.k, p.n), p.dtype, kind)
    a = left.t() if p.layout == "tn" else left
    b = right.t() if p.layout == "nt" else right
    return partial(torch.mm, a, b)


def _attention(a: Attention, kind: str, way: str) -> Callable[[], object]:
    """Forward alone, as training runs it (it keeps what backward reads), or backward alone."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    shape = (a.batch, a.heads, a.seq, a.head_dim)
    q, k, v = (_numbers(shape, a.dtype, kind).requires_grad_() for _ in range(3))
    forward = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
    if way == FORWARD:
        return forward
    out = forward()
    gradient = torch.randn_like(out)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    return backward


def _stream(s: Stream, kind: str) -> Callable[[], object]:
    import torch
    from torch.nn import functional

    dtype, line = torch_dtype(s.dtype), 1024
    elements = s.nbytes // STREAMS[s.op] // width(s.dtype)
    x, y = (_numbers((max(elements // line, 1), line), s.dtype, kind) for _ in range(2))
    weight = torch.ones(line, dtype=dtype, device=kind)
    runs: dict[str, Callable[[], object]] = {
        "copy": x.clone,
        "add": partial(torch.add, x, y),
        "silu": partial(functional.silu, x),
        "rms_norm": partial(functional.rms_norm, x, (line,), weight, 1e-5),
        "softmax": partial(functional.softmax, x, dim=-1),
    }
    return runs[s.op]


def _traffic(t: Traffic, rank: int, group: Any, kind: str) -> Callable[[], object]:  # noqa: ANN401 - of torch
    import torch
    import torch.distributed as dist

    n, elements = t.ranks, max(t.nbytes // 4 // t.ranks, 1) * t.ranks
    whole, part = torch.zeros(elements, device=kind), torch.zeros(elements // n, device=kind)
    other = torch.zeros(elements, device=kind)

    def hop() -> None:
        """The first rank sends to the second, the others watch."""
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)

    runs: dict[str, Callable[[], object]] = {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "all_gather": partial(_gather(dist), whole, part, group=group),
        "reduce_scatter": partial(_scatter(dist), part, whole, group=group),
        "all_to_all": partial(dist.all_to_all_single, other, whole, group=group),
        "p2p": hop,
    }
    return runs[t.collective]


def _gather(dist: Any) -> Callable[..., object]:  # noqa: ANN401 - a module
    """Torch 2.13 gave it another name."""
    found: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return found


def _scatter(dist: Any) -> Callable[..., object]:  # noqa: ANN401 - a module
    found: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return found


def _product_row(p: Product, stamp: tuple[str, str], us: float) -> Row:
    return p.dtype, p.m, p.n, p.k, us, *stamp, p.layout


def _attention_row(a: Attention, way: str, kind: str, stamp: tuple[str, str], us: float) -> Row:
    return a.batch, a.seq, a.heads, a.heads, a.head_dim, us, *stamp, f"sdpa_{kind}", a.dtype, way


def _stream_row(s: Stream, stamp: tuple[str, str], us: float) -> Row:
    return s.op, s.dtype, s.nbytes, us, *stamp


def _traffic_row(t: Traffic, device: Device, us: float) -> Row:
    return device.name, t.collective, t.ranks, 1, t.nbytes, us, BACKENDS[device.kind], device.version
