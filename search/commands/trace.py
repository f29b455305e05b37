"""`search trace`: measured traces of a job's ranks, read, checked and shown."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from capture.installed import require_installed
from capture.traces.common import common
from capture.traces.pairing import Agreement, Pairing, pair
from capture.traces.records import KINDS, Kind, RankTrace
from capture.traces.trace_file import read_traces, write_traces
from hardware.units import format_bytes, format_seconds
from results.report.text import columns
from search.commands.answer import answer, check_new, check_writable, write_new

__all__ = ["read", "show"]


def read(args: argparse.Namespace) -> int:
    """Reads every trace, checks them against each other, writes the file of -o and tells what it found."""
    require_installed("search trace import", "msgspec", extra="traces")
    from capture.traces.recognise import read_all

    if args.output is not None:
        check_writable(args, args.output)
        check_new(args.output)
    start = time.perf_counter()
    traces = read_all(args.files)
    if args.whole:
        traces = common(traces)
    pairing = pair(traces)
    nbytes = None if args.output is None else write_new(args.output, lambda: write_traces(args.output, traces, pairing))
    seconds = time.perf_counter() - start
    told = argparse.Namespace(**{**vars(args), "output": None})
    head = f"{len(traces)} of {_world(traces)} ranks in {format_seconds(seconds)}"
    if nbytes is not None:
        head += f"; {format_bytes(nbytes)} in {args.output}"
    data = {"file": args.output, "file_bytes": nbytes, "import_s": seconds, **_data(traces, pairing)}
    answer(told, text=_text(head, traces, pairing), data=data)
    return 0


def show(args: argparse.Namespace) -> int:
    """Tells what a file holds."""
    held = read_traces(args.file)
    text = _text(f"{len(held.traces)} of {_world(held.traces)} ranks", held.traces, held.pairing)
    answer(args, text=text, data={"file": args.file, **_data(held.traces, held.pairing)})
    return 0


def _world(traces: Sequence[RankTrace]) -> str:
    return "an unknown number of" if traces[0].world is None else str(traces[0].world)


def _kinds(trace: RankTrace) -> dict[str, int]:
    """Events by kind, those that occur."""
    counts = np.bincount(trace.kind, minlength=len(KINDS))
    return {kind.value: int(count) for kind, count in zip(KINDS, counts, strict=True) if count}


def _span_s(trace: RankTrace) -> float:
    return float(trace.end_s.max() - trace.start_s.min()) if len(trace) else 0.0


def _iterations(trace: RankTrace) -> int:
    return int(trace.iteration.max(initial=-1)) + 1


def _text(head: str, traces: Sequence[RankTrace], pairing: Pairing) -> str:
    kinds = [kind.value for kind in Kind if any(kind.value in _kinds(trace) for trace in traces)]
    rows = [
        [str(trace.rank), trace.format, str(_iterations(trace)), format_seconds(_span_s(trace)), str(len(trace.groups)),
         *(str(_kinds(trace).get(kind, 0)) for kind in kinds)]
        for trace in traces
    ]  # fmt: skip
    lines = [head, "", *columns(["rank", "format", "iterations", "span", "groups", *kinds], rows), ""]
    lines.append(f"paired: {pairing.num_collectives} collectives, {pairing.num_transfers} transfers")
    if pairing.agreements:
        lines += ["", *columns(["ranks", "clocks differ", "ends agree (median)", "worst", "a collective takes"],
                               [_agreement(found) for found in pairing.agreements])]  # fmt: skip
    lines += [f"note: {note}" for note in (*_merged(traces), *pairing.notices)]
    return "\n".join(lines) + "\n"


def _agreement(found: Agreement) -> list[str]:
    seconds = (abs(found.clock_s), found.median_s, found.worst_s, found.duration_s)
    return [f"{found.a}, {found.b}", *map(format_seconds, seconds)]


def _merged(traces: Sequence[RankTrace]) -> list[str]:
    """What importers noticed, each sentence once, with its ranks where not all noticed it."""
    ranks = Counter(note for trace in traces for note in trace.notices)
    return [
        note if count == len(traces) else
        f"rank {', '.join(str(trace.rank) for trace in traces if note in trace.notices)}: {note}"
        for note, count in ranks.items()
    ]  # fmt: skip


def _data(traces: Sequence[RankTrace], pairing: Pairing) -> dict[str, Any]:
    return {
        "world": traces[0].world,
        "ranks": [
            {"rank": trace.rank, "source": trace.source, "format": trace.format, "machine": trace.machine,
             "job": trace.job, "epoch_ns": trace.epoch_ns, "iterations": _iterations(trace), "span_s": _span_s(trace),
             "topology": trace.topology.value, "events": _kinds(trace), "edges": len(trace.before),
             "memory_samples": len(trace.memory_s),
             "groups": [{"name": g.name, "size": g.size, "ranks": list(g.ranks)} for g in trace.groups],
             "notices": list(trace.notices)}
            for trace in traces
        ],
        "pairing": {
            "missing": list(pairing.missing), "collectives": pairing.num_collectives,
            "transfers": pairing.num_transfers, "notices": list(pairing.notices),
            "agreements": [
                {"a": found.a, "b": found.b, "paired": found.num_paired, "clock_s": found.clock_s,
                 "median_s": found.median_s, "most_s": found.most_s, "worst_s": found.worst_s,
                 "duration_s": found.duration_s}
                for found in pairing.agreements
            ],
        },
    }  # fmt: skip
