"""Reads `--what-if` of `search trace replay`, KEY=VALUE with commas, and tells what it came to."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import numpy as np

from capture.traces.dfg import GlobalDfg
from capture.traces.kept import computes_differ, predict_kept
from capture.traces.records import Topology
from capture.traces.what_if import Change, Prediction, link_of, predict
from hardware.units import format_seconds

__all__ = ["change_lines", "json_change", "predicted", "read_change"]


def _number(text: str) -> float:
    return float(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError
    return int(text)


def _yes(text: str) -> bool:
    return {"yes": True, "no": False}[text]


def _modules(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(text.split("+"))


def _topology(text: str) -> Topology:
    return Topology(text)


READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "bandwidth": (_number, "times as fast, such as 2"),
    "compute": (_number, "times as fast, such as 1.5"),
    "latency_s": (_number, "seconds of a message, such as 1e-5"),
    "bucket_bytes": (_number, "bytes, such as 25e6"),
    "workers": (_count, "a whole number of at least 1"),
    "topology": (_topology, "ring, tree, hierarchical or parameter_server"),
    "servers": (_count, "a whole number of at least 1"),
    "per_machine": (_count, "workers of a machine, a whole number of at least 1"),
    "part_bytes": (_number, "bytes, such as 4e6"),
    "colocated": (_yes, "yes (servers are workers too) or no"),
    "half_duplex": (_yes, "yes (both directions between two workers take turns) or no"),
    "recompute": (_modules, "modules with + between, such as 1+2, or none"),
}


def read_change(text: str) -> Change:
    """ValueError with the key, what it takes and what it got."""
    given: dict[str, Any] = {}
    for word in text.split(","):
        key, equals, value = word.strip().partition("=")
        if key not in READERS or not equals:
            near = difflib.get_close_matches(key, READERS, 1)
            hint = f"; did you mean {near[0]}?" if near and equals else f"; have {', '.join(READERS)}"
            raise ValueError(f"--what-if takes KEY=VALUE with commas between, but got {word.strip()!r}{hint}")
        if key in given:
            raise ValueError(f"--what-if takes each key once, but {key} stands twice; leave one out")
        read, takes = READERS[key]
        try:
            given[key] = read(value)
        except (KeyError, ValueError):
            raise ValueError(f"--what-if {key} must be {takes}, but is {value!r}") from None
    return Change(**given)


def change_lines(text: str, found: Prediction, baseline: Prediction, measured_s: np.ndarray) -> list[str]:
    """What the change came to, beside the same job as measured, both synthesised."""
    mean, same = float(found.seconds.mean()), float(baseline.seconds.mean())
    off = same / float(measured_s.mean()) - 1.0
    plain = float(found.size_over_bandwidth_s.mean())
    return [
        f"what if   {text}: {format_seconds(mean)} ± {format_seconds(float(found.seconds.std()))} an iteration, "
        f"{mean / same - 1.0:+.1%}",
        f"against   {format_seconds(same)}, the same job synthesised as it is ({off:+.2%} from measured)",
        f"baseline  {format_seconds(plain)} by size / bandwidth",
    ]


def json_change(text: str, found: Prediction, baseline: Prediction, dfg: GlobalDfg) -> dict[str, Any]:
    """The same for JSON."""
    link = link_of(dfg)[0]
    return {
        "what_if": text, "predicted_s": float(found.seconds.mean()), "predicted_std_s": float(found.seconds.std()),
        "iterations_s": found.seconds.tolist(), "synthesised_as_is_s": float(baseline.seconds.mean()),
        "size_over_bandwidth_s": float(found.size_over_bandwidth_s.mean()),
        "link": {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}, "notices": list(found.notices),
    }  # fmt: skip


def predicted(
    dfg: GlobalDfg, change: Change, *, with_hosts: GlobalDfg, alone: GlobalDfg | None = None
) -> tuple[Prediction, Prediction]:
    """The job under the change, and as it is: its traffic anew, or where ranks compute differently its graph kept."""
    if computes_differ(dfg):
        if alone is not None:
            raise ValueError(
                "--alone tells what transfers cost ranks that compute the same, and these do not; leave it out"
            )
        return predict_kept(with_hosts, change), predict_kept(with_hosts, Change())
    return predict(dfg, change, alone), predict(dfg, Change(), alone)
