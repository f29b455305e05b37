"""`search trace diff`: two steps operation by operation, each measured or simulated: what runs how often, how long."""

from __future__ import annotations

import argparse
import importlib.util
import zipfile
from pathlib import Path
from typing import Any

from estimator.breakdown import Breakdown, Difference, breakdown, differences
from estimator.timeline import Timeline
from hardware.units import format_seconds
from results.files import as_user_error
from results.report.occupancy import difference_table
from results.report.text import columns
from search.commands.answer import answer, tell
from search.commands.point import read_point
from search.commands.trace_measured import measured_step

__all__ = ["run"]

HEAD = 1 << 16


def run(args: argparse.Namespace) -> int:
    """Tells where B differs from A."""
    (a, about_a), (b, about_b) = (_timeline(args, target) for target in (args.a, args.b))
    found = differences(a, b)
    parts = {name: breakdown(timeline) for name, timeline in (("A", a), ("B", b))}
    answer(args, text=_text((about_a, about_b), parts, found, args.top), data={
        "a": {"target": args.a, "about": about_a, **_json(parts["A"])},
        "b": {"target": args.b, "about": about_b, **_json(parts["B"])},
        "operations": [
            {"name": one.name, "category": one.category, "count_a": one.count_a, "count_b": one.count_b,
             "seconds_a": one.seconds_a, "seconds_b": one.seconds_b, "difference_s": one.seconds}
            for one in found
        ],
    })  # fmt: skip
    return 0


def _timeline(args: argparse.Namespace, target: str) -> tuple[Timeline, str]:
    """A step to compare, and what it is."""
    if Path(target).is_file():
        if zipfile.is_zipfile(target):
            return measured_step(target, args.iteration)
        if not _may_be_configuration(target):
            raise ValueError(
                f"{target}: a diff takes files of `search trace import -o` and configurations, but this is neither; a "
                f"recorder's trace is imported first: search trace import {target} -o job.dfg"
            )
    return _of_configuration(target, args.reference)


def _may_be_configuration(target: str) -> bool:
    """Whether a file is text, and none that an importer of traces reads, if these are installed."""
    with as_user_error(Path(target), "read"), open(target, "rb") as file:
        head = file.read(HEAD)
    try:
        text = head[: head.rfind(b"\n") + 1 or None].decode()
    except UnicodeDecodeError:
        return False
    if "\0" in text or importlib.util.find_spec("msgspec") is None:
        return "\0" not in text
    from capture.traces.recognise import looks_like_trace  # which needs the extra `traces`

    return not looks_like_trace(head)


def _of_configuration(target: str, reference: str | None) -> tuple[Timeline, str]:
    from estimator.detail.step import replay_step  # a diff of two traces needs no estimator

    point = read_point(target, reference, [])
    try:
        point = point.settled()
        if not point.evaluate().feasible:
            raise ValueError("a step is simulated where it fits, but this one does not; search estimate tells why")
        tell(f"replaying {target}")
        step = replay_step(point.model, point.strategy, point.system, point.workload)
    except ValueError as error:
        raise ValueError(f"{target}: {error}") from error
    tell(*point.notices)
    return step.timeline, f"simulated, {point.name}"


def _json(found: Breakdown) -> dict[str, Any]:
    return {
        "span_s": found.span_s, "compute_s": float(found.compute_s.mean()), "idle_s": float(found.idle_s.mean()),
        "non_compute_s": float(found.non_compute_s.mean()), "communication_s": float(found.communication_s.mean()),
        "overlap_s": float(found.overlap_s.mean()),
    }  # fmt: skip


def _text(about: tuple[str, str], parts: dict[str, Breakdown], found: list[Difference], top: int) -> str:
    rows = []
    for (name, told), part in zip(zip(parts, about, strict=True), parts.values(), strict=True):
        whole = (part.span_s, part.compute_s.mean(), part.non_compute_s.mean(), part.idle_s.mean())
        rows.append([name, told, *(format_seconds(float(x)) for x in whole)])
    lines = columns(["", "step", "span", "compute", "non-compute", "idle"], rows, left=2)
    return "\n".join([*lines, "", "of a rank on average:", difference_table(found, top)])
