"""`search trace testbed`: a job on this machine's own network, predicted as it was not recorded, and run like that."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capture.installed import require_installed
from capture.testbed.experiment import Outcome, Report, contest, experiment
from capture.testbed.network import require_network
from capture.testbed.setup import Setup
from hardware.units import format_seconds
from results.report.text import columns, hanging
from search.commands.answer import answer, check_writable, tell
from search.testbed_plans import contenders

__all__ = ["run"]

QUIET = 1.0  # processes that run or wait, per core


def run(args: argparse.Namespace) -> int:
    """Records, predicts, runs, and tells how far apart they are."""
    require_network()
    require_installed("search trace testbed", "torch")
    require_installed("search trace testbed", "msgspec", extra="traces")
    require_installed("search trace testbed", "cvxpy", extra="align")
    if args.output is not None:
        check_writable(args, args.output)
    if args.ranks < 2:
        raise ValueError(f"--ranks must be at least 2, for one has nothing to synchronise, but is {args.ranks}")
    kept = None if args.keep is None else Path(args.keep)
    if kept is not None and kept.exists() and (not kept.is_dir() or any(kept.iterdir())):
        raise ValueError(f"--keep must name a new or empty folder, but {args.keep} is not; give another")
    base = Setup(model=args.model, steps=args.steps)
    with tempfile.TemporaryDirectory(prefix="testbed-") as scratch:
        folder = kept or Path(scratch)
        text, data = (_tuned if args.tune else _predicted)(args, base, folder)
    answer(args, text=text, data=data)
    return 0


def _predicted(args: argparse.Namespace, base: Setup, folder: Path) -> tuple[str, dict[str, Any]]:
    found = experiment(
        base, ranks=args.ranks, bits_per_s=args.rate, folder=folder / "runs", rounds=args.rounds, tell=tell
    )
    return _text(found), _data(found)


def _tuned(args: argparse.Namespace, base: Setup, folder: Path) -> tuple[str, dict[str, Any]]:
    """Records, tunes what the recording in the middle tells, and runs the plan and the defaults in turn."""
    how: dict[str, Any] = {"ranks": args.ranks, "bits_per_s": args.rate, "tell": tell}
    recorded = contest({"as recorded": base}, folder=folder / "recorded", rounds=args.rounds, **how).recorded
    named = {one.name: one for one in contenders(recorded, base)}
    found = contest({name: one.setup for name, one in named.items()}, folder=folder / "runs", rounds=args.rounds, **how)
    took = {name: float(np.median(seconds)) for name, seconds in found.run_s.items()}
    best = min((name for name, one in named.items() if one.default), key=took.__getitem__)
    rows = [
        [name, format_seconds(took[name]), f"{float(np.ptp(seconds)) / took[name]:.1%}",
         "-" if (told := named[name].predicted_s) is None else format_seconds(told),
         f"{took[name] / took[best] - 1.0:+.1%}"]
        for name, seconds in found.run_s.items()
    ]  # fmt: skip
    lines = [
        _head(base, args.ranks, args.rate, args.rounds), "",
        *columns(["configuration", "run", "rounds differ", "predicted", f"against {best}"], rows),
        *_notes(args.ranks, found.load),
    ]  # fmt: skip
    data = {
        "model": base.model, "ranks": args.ranks, "bits_per_s": args.rate, "iterations": base.steps,
        "load_per_core": list(found.load), "best_default": best,
        "cases": [
            {"name": name, "default": one.default, "run_s": found.run_s[name].tolist(), "predicted_s": one.predicted_s,
             "against_best_default": took[name] / took[best] - 1.0}
            for name, one in named.items()
        ],
    }  # fmt: skip
    return "\n".join(lines) + "\n", data


def _head(base: Setup, ranks: int, bits_per_s: float, rounds: int) -> str:
    return f"{base.model} on {ranks} ranks at {bits_per_s / 1e6:g} Mbit/s, {rounds} rounds of {base.steps} iterations"


def _notes(ranks: int, load: Sequence[float]) -> list[str]:
    cores, lines = os.cpu_count() or 1, list[str]()
    if max(load) > QUIET:
        lines += hanging("note: ", f"not a quiet machine: {max(load):.1f} processes per core ran beside it")
    if ranks > cores:
        lines += hanging("note: ", f"{ranks} ranks share {cores} cores: these bound them, not the links")
    return lines


def _text(found: Report) -> str:
    base, same = found.base, found.replayed
    rows = [
        [one.case.name, _median(one.run_s), f"{one.spread:.1%}", _median(one.predicted_s), f"{one.error:+.1%}",
         f"{one.plain_error:+.1%}"]
        for one in found.outcomes
    ]  # fmt: skip
    lines = [
        _head(base, found.ranks, found.bits_per_s, len(found.load)),
        "",
        *columns(["configuration", "run", "rounds differ", "predicted", "error", "size / bandwidth"], rows),
        "",
        f"what was not recorded is predicted to within {abs(found.worst_error):.1%}",
        f"replayed with clocks 50 ms off: {same.off_error:+.1%} (size / bandwidth {_known(same.off_plain_error)})",
        f"with clocks aligned to {same.clock_s * 1e6:.0f} us: {same.aligned_error:+.2%} (size / bandwidth "
        f"{_known(same.aligned_plain_error)})",
    ]
    if np.isfinite(same.memory_error):
        lines.append(f"the replay's peak of memory is {same.memory_error:+.2%} from what the allocator had handed out")
    lines += _notes(found.ranks, found.load)
    return "\n".join(lines) + "\n"


def _known(error: float) -> str:
    return f"{error:+.1%}" if np.isfinite(error) else "cannot tell"


def _median(seconds: np.ndarray) -> str:
    return format_seconds(float(np.median(seconds)))


def _data(found: Report) -> dict[str, Any]:
    same = found.replayed
    return {
        "model": found.base.model, "ranks": found.ranks, "bits_per_s": found.bits_per_s, "iterations": found.base.steps,
        "load_per_core": list(found.load), "worst_error": found.worst_error,
        "replay": {
            "measured_s": same.measured_s, "off_error": same.off_error, "aligned_error": same.aligned_error,
            "memory_error": same.memory_error, "off_size_over_bandwidth_error": same.off_plain_error,
            "clock_error_s": same.clock_s,
            "aligned_size_over_bandwidth_error": same.aligned_plain_error,
        },
        "cases": [_case(one) for one in found.outcomes],
    }  # fmt: skip


def _case(one: Outcome) -> dict[str, Any]:
    return {
        "name": one.case.name, "bits_per_s": one.case.bits_per_s, "run_s": one.run_s.tolist(),
        "predicted_s": one.predicted_s.tolist(), "size_over_bandwidth_s": one.plain_s.tolist(), "error": one.error,
        "size_over_bandwidth_error": one.plain_error,
    }  # fmt: skip
