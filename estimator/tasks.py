"""What runs where, for how long and after what: a step, a trace, or a piece of either, as arrays. Runs nothing.

Built from priced operations (estimator/detail) or from measured ones; replayed by estimator/replay.py. Letters: N
tasks, E edges, S streams, D devices, L links of a device.

A *stream* runs one task at a time, in the order in which they become ready. Streams of one *device* (a rank, a server)
influence each other: a transfer takes a share of the device's compute while it runs, and transfers that load one of the
device's links beyond what it carries all slow down alike. A queue whose order is fixed is a stream with edges along it;
a link that serves one message at a time is a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

__all__ = ["CATEGORIES", "SHIELDS", "Category", "Device", "Shield", "Stream", "Tasks"]


class Category(Enum):
    """What a task is, for breakdowns. The order is that of the codes in `Tasks.category`."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    TP = "tp"
    CP = "cp"
    EP = "ep"
    PP = "pp"
    DP = "dp"
    OPTIMIZER_COMM = "optimizer_comm"
    OFFLOAD = "offload"
    HOST = "host"
    OTHER = "other"


class Shield(Enum):
    """What should hide a transfer. The order is that of the codes in `Tasks.shield`."""

    NOTHING = "nothing: it blocks"
    GEMM = "the GEMM it is cut up with"
    ATTENTION = "attention of the blocks at hand"
    PARTNER = "compute of the other micro-batch"
    NEIGHBOURS = "compute of the blocks beside it"
    BACKWARD = "the last backward passes"
    FORWARD = "the next first forward passes"
    STAGES = "other passes while it flies"
    SHARED = "shared experts"


CATEGORIES = tuple(Category)
SHIELDS = tuple(Shield)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A queue of one device. `computes`: transfers beside it slow it down."""

    device: int
    name: str
    computes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A rank or a server, and how many like it it stands for.

    `base_bytes` lives all the time (weights, gradients, states); `capacity_bytes`: what may be allocated at most.
    """

    name: str
    num_ranks: int = 1
    base_bytes: float = 0.0
    capacity_bytes: float = float("inf")
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """N tasks in any order; edges make the order.

    seconds [N]: alone on its stream and links. launch_s [N]: host time to launch it, 0 where none is modelled; launches
    of a device follow one another in the order in which its tasks start. gates [N]: the host cannot launch it before
    its inputs are there (a blocking receive). takes [N]: share of the device's compute that it takes while it runs.
    loads [N, L]: share of each link that it uses when alone. alloc_bytes, free_bytes [N]: allocated on its device when
    it starts, given back when it ends. before, after [E]: `after` starts once `before` has ended. micro_batch, chunk
    [N]: -1 where none. name [N]: index into `names`; scope [N]: index into `scopes` (the pass or iteration it is of).
    """

    devices: tuple[Device, ...]
    streams: tuple[Stream, ...]
    names: tuple[str, ...]
    scopes: tuple[str, ...]
    stream: np.ndarray
    seconds: np.ndarray
    category: np.ndarray
    before: np.ndarray
    after: np.ndarray
    name: np.ndarray
    scope: np.ndarray
    micro_batch: np.ndarray
    chunk: np.ndarray
    shield: np.ndarray
    launch_s: np.ndarray
    gates: np.ndarray
    takes: np.ndarray
    loads: np.ndarray
    alloc_bytes: np.ndarray
    free_bytes: np.ndarray
    device: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        wrong = np.flatnonzero((self.stream < 0) | (self.stream >= len(self.streams)))
        if len(wrong):
            i, msg = int(wrong[0]), f"a task must be on one of {len(self.streams)} streams, but task "
            raise ValueError(f"{msg}{i} is on {self.stream[i]}; add the stream or count from 0")
        owner = np.array([stream.device for stream in self.streams], dtype=np.int64)
        object.__setattr__(self, "device", owner[self.stream] if len(owner) else np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.seconds)

    @classmethod
    def of(
        cls, *, devices: Sequence[Device], streams: Sequence[Stream], stream: Sequence[int] | np.ndarray,
        seconds: Sequence[float] | np.ndarray, edges: Sequence[tuple[int, int]] | np.ndarray = (),
        category: Sequence[Category] = (), names: Sequence[str] = (), **columns: Sequence[float] | np.ndarray,
    ) -> Tasks:  # fmt: skip
        """A small graph by hand: what is left out is neutral. `names`: one per task.

        >>> rank = Device(name="rank 0")
        >>> chain = Tasks.of(devices=[rank], streams=[Stream(device=0, name="compute", computes=True)],
        ...                  stream=[0, 0], seconds=[1.0, 2.0], edges=[(0, 1)])
        >>> len(chain), chain.after.tolist()
        (2, [1])
        """
        n, num_links = len(seconds), max((len(device.links) for device in devices), default=0)
        pairs = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
        codes = [CATEGORIES.index(c) for c in category] or [CATEGORIES.index(Category.OTHER)] * n
        texts = tuple(names) or tuple(f"task {i}" for i in range(n))

        def whole(name: str, default: int) -> np.ndarray:
            return np.asarray(columns.pop(name, np.full(n, default)), dtype=np.int64)

        def real(name: str, *shape: int) -> np.ndarray:
            return np.asarray(columns.pop(name, np.zeros((n, *shape))), dtype=np.float64).reshape(n, *shape)

        made = cls(
            devices=tuple(devices), streams=tuple(streams), names=texts, scopes=("",),
            stream=np.asarray(stream, dtype=np.int64), seconds=np.asarray(seconds, dtype=np.float64),
            category=np.array(codes, dtype=np.int64), before=pairs[:, 0].copy(), after=pairs[:, 1].copy(),
            name=np.arange(n), scope=whole("scope", 0), micro_batch=whole("micro_batch", -1),
            chunk=whole("chunk", -1), shield=whole("shield", 0), launch_s=real("launch_s"),
            gates=np.asarray(columns.pop("gates", np.zeros(n)), dtype=np.bool_), takes=real("takes"),
            loads=real("loads", num_links), alloc_bytes=real("alloc_bytes"), free_bytes=real("free_bytes"),
        )  # fmt: skip
        if columns:
            raise TypeError(f"unknown columns {sorted(columns)}; Tasks has {list(cls.__dataclass_fields__)}")
        return made
