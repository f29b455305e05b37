"""Small traces by hand, and the shipped fine ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from capture.traces.recognise import read_all
from capture.traces.records import KINDS, Group, Kind, RankTrace, Topology

NAN = float("nan")


def trace(rank, events, *, world=None, edges=(), machine=None, job="", epoch_ns=0, source=None):
    """A RankTrace of (kind, stream, name, start_s, end_s, {column: value}); texts where the table has texts."""
    events = sorted(events, key=lambda event: event[3]) if not edges else list(events)
    tables = {key: {} for key in ("stream", "name", "transaction", "tensor", "group")}

    def index(key, value):
        return -1 if value is None else tables[key].setdefault(value, len(tables[key]))

    def column(key, default, dtype=np.int64):
        return np.array([event[5].get(key, default) for event in events], dtype=dtype)

    sequence = {}
    columns = {
        "stream": [index("stream", e[1]) for e in events], "name": [index("name", e[2]) for e in events],
        "transaction": [index("transaction", e[5].get("transaction")) for e in events],
        "tensor": [index("tensor", e[5].get("tensor")) for e in events],
        "group": [index("group", e[5].get("group", "world" if e[0] is Kind.COLLECTIVE else None)) for e in events],
        "sequence": [
            e[5].get("sequence", sequence.update(n=sequence.get("n", -1) + 1) or sequence["n"])
            if e[0] is Kind.COLLECTIVE else -1 for e in events
        ],
    }  # fmt: skip
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return RankTrace(
        source=source or f"rank{rank}.jsonl", format="test", rank=rank, world=world, machine=machine, job=job,
        epoch_ns=epoch_ns, names=tuple(tables["name"]), streams=tuple(tables["stream"]),
        groups=tuple(Group(name=n, size=world or 0) for n in tables["group"]),
        transactions=tuple(tables["transaction"]), tensors=tuple(tables["tensor"]), topology=Topology.UNKNOWN,
        kind=np.array([KINDS.index(e[0]) for e in events], dtype=np.int64),
        start_s=np.array([e[3] for e in events], dtype=np.float64), end_s=np.array([e[4] for e in events], np.float64),
        posted_s=column("posted", NAN, np.float64), iteration=column("iteration", 0),
        nbytes=column("nbytes", NAN, np.float64), peer=column("peer", -1), before=pairs[:, 0], after=pairs[:, 1],
        memory_s=np.zeros(0), memory_bytes=np.zeros(0),
        **{key: np.array(values, dtype=np.int64) for key, values in columns.items()},
    )  # fmt: skip


def shifted(traces, offsets_s):
    """The same job recorded by clocks that are fast by these seconds, on machines that nobody names."""
    return [
        replace(t, epoch_ns=t.epoch_ns + round(o * 1e9), machine=None) for t, o in zip(traces, offsets_s, strict=True)
    ]


def compute(name, start, end, **columns):
    return (Kind.COMPUTE, "compute", name, start, end, columns)


def collective(name, start, end, **columns):
    return (Kind.COLLECTIVE, "comm", name, start, end, columns)


def send(text, start, end, peer, **columns):
    return (Kind.SEND, "send", "SEND", start, end, {"transaction": text, "peer": peer, **columns})


def recv(text, start, end, peer, **columns):
    return (Kind.RECV, "recv", "RECV", start, end, {"transaction": text, "peer": peer, **columns})


def fine(shared, name, num_ranks):
    """The shipped fine traces of a job, whose ranks share one clock."""
    folder = shared / "traces" / "fine_ring"
    return read_all([folder / f"{name}_rank{rank}.jsonl.gz" for rank in range(num_ranks)])
