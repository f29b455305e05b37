"""Chooses which operators to measure within a budget of seconds, from how fast a pilot says the device is. No torch.

Shapes are those of training. Each kind gets a share of the budget and takes shapes in an order that scatters over all
sizes, so that a short budget thins the grid instead of cutting it off. Refuses a budget that is too short for the fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from capture.samples import LEAST_S, REPEATS
from hardware.dtype import DType
from hardware.units import KIB, MIB

__all__ = ["Attention", "Pilot", "Plan", "Product", "Stream", "Traffic", "make_plan"]

S = TypeVar("S")

SHARES = {"gemm": 0.4, "attention": 0.3, "streams": 0.1, "collectives": 0.2}
"""Of the budget. Products first: most of a step's seconds are theirs."""
START_S = {"cpu": 12.0, "cuda": 25.0}  # of a group of processes, until it can talk, and its end; an assumption
RETRIED = 1.4  # samples that are taken again, as a factor; an assumption
WARM_UP = 3  # calls before a sample's repeats
LARGEST = 0.03  # of a kind's seconds that one shape may take
FEWEST = {"gemm": 16, "attention": 30, "streams": 16, "collectives": 16}
"""Shapes that the fits need (capture/fit_*.py), with the quarter that they hold out."""
MOST = {"gemm": 120, "attention": 60, "streams": 45, "collectives": 60}
"""Shapes beyond which a fit of a few parameters gains nothing; an assumption."""

LAYOUTS = ("nt", "nn", "tn")
"""Which operand is transposed: forward, gradient of the input, gradient of the weight."""
STREAMS = {"copy": 2, "add": 3, "silu": 2, "rms_norm": 2, "softmax": 2}
"""Operations bound by memory, and tensors that each reads and writes."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """[m, k] times [k, n]."""

    dtype: str
    m: int
    n: int
    k: int
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal attention over whole sequences, one way or back."""

    dtype: str
    batch: int
    seq: int
    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """An operation bound by memory; `nbytes` are read and written."""

    dtype: str
    op: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A collective over `ranks`; `nbytes` of the whole buffer, as nccl-tests count it."""

    collective: str
    nbytes: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilot:
    """How fast the device is, roughly: FLOP/s by format, and bytes per second of memory and between ranks."""

    flops_per_s: dict[str, float]
    attention_flops_per_s: float
    bytes_per_s: float
    wire_bytes_per_s: float = 1e9  # an assumption: nothing is sent before the plan is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured until `seconds` are over, the last `talking_s` of them collectives."""

    kind: str
    seconds: float
    expected_s: float
    talking_s: float
    products: tuple[Product, ...]
    attentions: tuple[Attention, ...]
    streams: tuple[Stream, ...]
    traffic: tuple[Traffic, ...]
    left_out: tuple[str, ...] = field(default=())

    def told(self) -> str:
        """One line for people."""
        kinds = {
            f"products ({', '.join(dict.fromkeys(p.dtype for p in self.products))})": self.products,
            "shapes of attention, both ways": self.attentions, "streams": self.streams, "collectives": self.traffic,
        }  # fmt: skip
        parts = [f"{len(items)} {name}" for name, items in kinds.items() if items]
        more = "".join(f"; {text}" for text in self.left_out)
        return f"{', '.join(parts)}: about {self.expected_s:.0f} s, {self.seconds:.0f} s at most{more}"


def make_plan(kind: str, seconds: float, dtypes: Sequence[str], pilot: Pilot, ranks: int) -> Plan:
    """The shapes that fit into the budget. ValueError where too few of a kind do.

    `ranks` of collectives; fewer than two measure none. The first of `dtypes` is attention's and the streams'.
    """
    main = dtypes[0]
    talks = ranks > 1
    room = seconds - (START_S[kind] if talks else 0.0)
    shares = {name: share for name, share in SHARES.items() if talks or name != "collectives"}
    given = {name: max(room, 0.0) * share / sum(shares.values()) for name, share in shares.items()}

    def product_s(p: Product) -> float:
        return 2.0 * p.m * p.n * p.k / pilot.flops_per_s[p.dtype]

    def attention_s(a: Attention) -> float:  # forward and, at 2.5 times its FLOPs, backward: arXiv:2307.08691
        return 3.5 * 2.0 * a.batch * a.seq**2 * a.heads * a.head_dim / pilot.attention_flops_per_s

    products, spent_on_products = _fitting("gemm", _products(dtypes), product_s, given["gemm"])
    attentions, spent_on_attention = _fitting("attention", _attentions(main), attention_s, given["attention"], each=2)
    streams, spent_on_streams = _fitting(
        "streams", _streams(main, kind), lambda s: s.nbytes / pilot.bytes_per_s, given["streams"]
    )
    traffic: tuple[Traffic, ...] = ()
    talking_s = 0.0
    if talks:
        traffic, talking_s = _fitting(
            "collectives", _traffic(ranks), lambda t: 2.0 * t.nbytes / pilot.wire_bytes_per_s, given["collectives"]
        )
        talking_s += START_S[kind]
    _refuse_short(seconds, {"gemm": products, "attention": attentions, "streams": streams}, len(dtypes))
    if talks:
        _refuse_short(seconds, {"collectives": traffic}, 1)
    return Plan(
        kind=kind, seconds=seconds,
        expected_s=spent_on_products + spent_on_attention + spent_on_streams + talking_s,
        talking_s=given["collectives"] + START_S[kind] if talks else 0.0,
        products=products, attentions=attentions, streams=streams, traffic=traffic,
        left_out=() if talks else ("no collectives: there is one rank",),
    )  # fmt: skip


def _refuse_short(seconds: float, chosen: dict[str, Sequence[object]], num_dtypes: int) -> None:
    for name, items in chosen.items():
        needed = FEWEST[name] * (num_dtypes if name == "gemm" else 1)
        if len(items) < needed:
            more = seconds * needed / max(len(items), 1)
            raise ValueError(
                f"--seconds must be enough for {needed} {name} shapes, but {seconds:g} s are for {len(items)} here; "
                f"give about {max(more, seconds + 10):.0f}"
            )


def _fitting(
    name: str, items: Sequence[S], seconds: Callable[[S], float], room: float, *, each: int = 1
) -> tuple[tuple[S, ...], float]:
    """The first items that fit into `room` seconds, scattered over the grid, and what they take."""
    chosen: list[S] = []
    spent = 0.0
    for item in _scattered(items):
        cost = RETRIED * (REPEATS * max(seconds(item), each * LEAST_S) + WARM_UP * seconds(item))
        if len(chosen) == MOST[name] or cost > max(LARGEST * room, 2.0 * each * REPEATS * LEAST_S):
            continue
        if spent + cost <= room:
            chosen.append(item)
            spent += cost
    return tuple(chosen), spent


def _scattered(items: Sequence[S]) -> list[S]:
    """All items, neighbours far apart: by multiples of the golden ratio (Knuth vol. 3, 6.4)."""
    golden = 0.6180339887498949
    return [item for _, item in sorted(((i * golden % 1.0, i), item) for i, item in enumerate(items))]


def _products(dtypes: Sequence[str]) -> list[Product]:
    rows, widths = (256, 512, 1024, 2048, 4096, 8192), (512, 1024, 1536, 2048, 4096, 8192, 16384)
    grid = itertools.product(rows, widths, widths)
    shapes = [(m, n, k, LAYOUTS[i % len(LAYOUTS)]) for i, (m, n, k) in enumerate(grid)]
    return [Product(dtype=d, m=m, n=n, k=k, layout=layout) for m, n, k, layout in shapes for d in dtypes]


def _attentions(dtype: str) -> list[Attention]:
    grid = itertools.product((256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8), (4, 8, 16, 32), (64, 128))
    return [Attention(dtype=dtype, batch=b, seq=s, heads=h, head_dim=d) for s, b, h, d in grid]


def _streams(dtype: str, kind: str) -> list[Stream]:
    """Tensors of training's sizes. On a CPU below 32 MiB, from where on glibc maps each anew (mallopt(3)).

    Such a tensor takes five times as long per byte, for its pages are zeroed first; no curve of one rate holds both.
    """
    sizes = (2**e for e in (range(18, 25) if kind == "cpu" else range(18, 31)))
    return [Stream(dtype=dtype, op=op, nbytes=STREAMS[op] * size) for size in sizes for op in STREAMS]


def _traffic(ranks: int) -> list[Traffic]:
    """Collectives are fitted from 1 MiB on: most sizes lie there."""
    groups = sorted({n for n in (2, 4, 8) if n <= ranks} | {ranks})
    sizes = [int(16 * KIB), int(256 * KIB), *(int(2**e * MIB) for e in range(9))]
    grid = itertools.product(sizes, COLLECTIVES, groups)
    return [Traffic(collective=c, nbytes=v, ranks=n) for v, c, n in grid if c != "p2p" or n == 2]


def width(dtype: str) -> int:
    """Bytes of an element."""
    return int(DType(dtype).nbytes)
