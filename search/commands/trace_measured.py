"""An iteration of an imported job as it was measured, for commands that look at one. Replays nothing."""

from __future__ import annotations

import numpy as np

from capture.traces.dfg import build
from capture.traces.joined import missing_ranks
from capture.traces.lower import measured
from capture.traces.trace_file import read_traces
from estimator.timeline import Timeline

__all__ = ["measured_step"]


def measured_step(path: str, number: int | None) -> tuple[Timeline, str]:
    """The iteration of this number, without one the median, and what it is. Ranks may be missing."""
    traces = read_traces(path).traces
    lacking = missing_ranks(traces)
    try:
        dfg = build(traces, alone=bool(lacking))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    seconds = dfg.iteration_s()
    if number is None:
        number = dfg.iterations[int(np.argsort(seconds, kind="stable")[(len(seconds) - 1) // 2])]
    if number not in dfg.iterations:
        have = f"{dfg.iterations[0]} to {dfg.iterations[-1]}"
        raise ValueError(f"{path}: --iteration must be one of the trace, but is {number}; have {have}")
    of = f"{len(dfg.ranks)} of {len(dfg.ranks) + len(lacking)} ranks" if lacking else f"{len(dfg.ranks)} ranks"
    return measured(dfg, number), f"measured, iteration {number}, {of}"
