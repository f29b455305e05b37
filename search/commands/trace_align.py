"""`search trace align`: the clocks of all ranks of an imported job on that of its first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from capture.align import Alignment, align, moved
from capture.traces.pairing import pair
from capture.traces.records import RankTrace
from capture.traces.trace_file import read_traces, write_traces
from hardware.units import format_seconds
from results.report.text import columns
from search.commands.answer import answer, check_new, check_writable, write_new

__all__ = ["run"]

US = 1e6


def run(args: argparse.Namespace) -> int:
    """Finds the offsets, tells them, and with -o writes the job on one clock."""
    if args.output is not None:
        check_writable(args, args.output)
        check_new(args.output)
    held = read_traces(args.file)
    try:
        found = align(held.traces, same_machine=not args.no_machines, solver=args.solver)
    except ValueError as error:
        raise ValueError(f"{args.file}: {error}") from error
    traces = moved(held.traces, found)
    if args.output is not None:
        write_new(args.output, lambda: write_traces(args.output, traces, pair(traces)))
    told = argparse.Namespace(**{**vars(args), "output": None})
    answer(told, text=_text(args, found, traces), data=_data(args, found, traces))
    return 0


def _text(args: argparse.Namespace, found: Alignment, traces: Sequence[RankTrace]) -> str:
    columns_of = (found.offset_s, found.low_s, found.high_s)
    rows = []
    for r, trace in enumerate(traces):
        offset, low, high = (f"{float(column[r]) * US:+.1f}" for column in columns_of)
        sure = "yes" if found.identifiable[r] else "no: too wide"
        rows.append([f"rank {trace.rank}", trace.machine or "-", f"{offset} us", f"{low} to {high} us", sure])
    source = f"{found.num_messages} messages, {found.num_collectives} collectives"
    head = f"{len(traces)} clocks by {found.mode.value} ({source}; a transfer takes {format_seconds(found.transfer_s)})"
    lines = [head, "", *columns(["rank", "machine", "moved by", "feasible", "identifiable"], rows, left=2)]
    lines += ["", f"on one clock in {args.output}"] if args.output else []
    return "\n".join(lines) + "\n"


def _data(args: argparse.Namespace, found: Alignment, traces: Sequence[RankTrace]) -> dict[str, Any]:
    return {
        "file": args.output, "mode": found.mode.value, "messages": found.num_messages,
        "collectives": found.num_collectives, "transfer_s": found.transfer_s, "rounds": found.rounds,
        "nodes": [
            {"rank": trace.rank, "machine": trace.machine, "offset_s": float(found.offset_s[r]),
             "low_s": float(found.low_s[r]), "high_s": float(found.high_s[r]),
             "start_s": float(found.start_s[r]), "identifiable": bool(found.identifiable[r])}
            for r, trace in enumerate(traces)
        ],
    }  # fmt: skip
