"""Predicts configurations of a test bed that it has not seen from one that it has, and runs them.

Recorded once as it is and once with nothing to synchronise, a job is aligned (with clocks that were put off on
purpose), replayed, and predicted with other buckets, recomputation, servers and bandwidth; each of these then runs for
real. Rounds go through all configurations in turn, so that what else the machine does meets all alike, and what counts
is the median over rounds. Tunes nothing and prints nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from capture.align import align, moved
from capture.testbed.job import Run, run
from capture.testbed.network import Network
from capture.testbed.setup import MIB, Setup
from capture.traces.dfg import GlobalDfg, build
from capture.traces.records import RankTrace, Topology
from capture.traces.replay import replay_trace
from capture.traces.what_if import Change, Prediction, predict

__all__ = ["Case", "Contest", "Outcome", "Replayed", "Report", "cases", "contest", "experiment", "replayed", "shifted"]

OFF_S = 0.05  # by which the clock of every other rank is put off, forward and back in turn
SLOWER = 0.4  # of the rate: 400 Mbit/s of 1 Gbit/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration: how it is run, and how it differs from the one that was recorded."""

    name: str
    setup: Setup
    bits_per_s: float
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """[N] median seconds of an iteration of each round: predicted, by size / bandwidth, and run."""

    case: Case
    predicted_s: np.ndarray
    plain_s: np.ndarray
    run_s: np.ndarray

    @property
    def error(self) -> float:
        """Of the prediction."""
        return float(np.median(self.predicted_s) / np.median(self.run_s) - 1.0)

    @property
    def plain_error(self) -> float:
        """Of size / bandwidth."""
        return float(np.median(self.plain_s) / np.median(self.run_s) - 1.0)

    @property
    def spread(self) -> float:
        """From the fastest to the slowest round, over the median."""
        return float(np.ptp(self.run_s) / np.median(self.run_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The same job replayed, over what it took: with its clocks put off and with them aligned again.

    plain: size / bandwidth, NaN where transfers seem to take no time. clock_s: the largest distance of an aligned clock
    from the truth. memory_error: of the most bytes that a rank holds, over what its allocator had handed out; NaN where
    the recording does not tell.
    """

    measured_s: float
    off_error: float
    aligned_error: float
    off_plain_error: float
    aligned_plain_error: float
    clock_s: float
    memory_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Configurations that ran in turn: [N] median seconds of an iteration of each round, by name. load: of each round.

    recorded: the graph of the first configuration, of the round in the middle.
    """

    run_s: dict[str, np.ndarray]
    load: tuple[float, ...]
    recorded: GlobalDfg


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an experiment found. load: processes that ran or waited per core, of each round."""

    ranks: int
    base: Setup
    bits_per_s: float
    replayed: Replayed
    outcomes: tuple[Outcome, ...]
    load: tuple[float, ...]

    @property
    def worst_error(self) -> float:
        """The largest of any configuration that was not seen, with its sign."""
        return max((one.error for one in self.outcomes[1:]), key=abs)


def cases(base: Setup, bits_per_s: float) -> tuple[Case, ...]:
    """The job itself, and what it is to be predicted under."""
    slow, large = SLOWER * bits_per_s, 25 * MIB
    again = replace(base, recompute=base.blocks)
    return (
        Case(name="as recorded", setup=base, bits_per_s=bits_per_s, change=Change()),
        Case(name="buckets of 1 MiB", setup=replace(base, bucket_bytes=MIB), bits_per_s=bits_per_s,
             change=Change(bucket_bytes=MIB)),
        Case(name="buckets of 25 MiB", setup=replace(base, bucket_bytes=large), bits_per_s=bits_per_s,
             change=Change(bucket_bytes=large)),
        Case(name="blocks computed again", setup=again, bits_per_s=bits_per_s,
             change=Change(recompute=base.blocks)),
        _served("server, parts of 4 MiB", base, bits_per_s, 4 * MIB),
        _served("server, parts of 1 MiB", base, bits_per_s, MIB),
        Case(name="0.4 of the rate", setup=base, bits_per_s=slow, change=Change(bandwidth=SLOWER)),
        Case(name="0.4 of the rate, 25 MiB", setup=replace(base, bucket_bytes=large), bits_per_s=slow,
             change=Change(bandwidth=SLOWER, bucket_bytes=large)),
    )  # fmt: skip


def _served(name: str, base: Setup, bits_per_s: float, part_bytes: float) -> Case:
    """By a parameter server on the first rank. gloo announces a receive on the connection on which the rank sends,
    behind what is going out: so the two directions of a pair take turns.
    """  # noqa: D205 - one sentence
    return Case(
        name=name, setup=replace(base, topology=Topology.PARAMETER_SERVER, part_bytes=part_bytes),
        bits_per_s=bits_per_s, change=Change(topology=Topology.PARAMETER_SERVER, part_bytes=part_bytes,
                                             colocated=True, half_duplex=True),
    )  # fmt: skip


def experiment(
    base: Setup, *, ranks: int, bits_per_s: float, folder: Path, rounds: int = 3,
    chosen: Sequence[Case] | None = None, tell: Callable[[str], None] = lambda line: None,
) -> Report:  # fmt: skip
    """Records, predicts and runs. chosen: cases, the first as recorded. ValueError where a rank fails."""
    chosen = tuple(chosen or cases(base, bits_per_s))
    found: dict[str, list[tuple[float, float, float]]] = {case.name: [] for case in chosen}
    load, first = [], None
    with Network(ranks, bits_per_s) as network:
        for number in range(rounds):
            load.append(_load())
            runs = dict(_round(network, (_apart(base, bits_per_s), *chosen), folder / f"round{number}", tell))
            recorded, alone = (_graph(runs[name].traces) for name in (chosen[0].name, ALONE))
            first = first or replayed(runs[chosen[0].name].traces)
            for case in chosen:
                took = _graph(runs[case.name].traces).iteration_s()
                told = predict(recorded, case.change, alone)
                found[case.name].append((*_medians(told), float(np.median(took))))
    assert first is not None
    outcomes = [
        Outcome(case=case, predicted_s=columns[:, 0], plain_s=columns[:, 1], run_s=columns[:, 2])
        for case in chosen
        for columns in [np.array(found[case.name])]
    ]
    return Report(
        ranks=ranks, base=base, bits_per_s=bits_per_s, replayed=first, outcomes=tuple(outcomes), load=tuple(load)
    )


def contest(
    setups: Mapping[str, Setup], *, ranks: int, bits_per_s: float, folder: Path, rounds: int = 3,
    tell: Callable[[str], None] = lambda line: None,
) -> Contest:  # fmt: skip
    """Runs configurations in turn, round by round. ValueError where a rank fails."""
    named = [Case(name=name, setup=setup, bits_per_s=bits_per_s, change=Change()) for name, setup in setups.items()]
    found: dict[str, list[float]] = {name: [] for name in setups}
    load, graphs = list[float](), list[GlobalDfg]()
    with Network(ranks, bits_per_s) as network:
        for number in range(rounds):
            load.append(_load())
            for name, done in _round(network, named, folder / f"round{number}", tell):
                graph = _graph(done.traces)
                if name == named[0].name:
                    graphs.append(graph)
                found[name].append(float(np.median(graph.iteration_s())))
    middle = int(np.argsort(found[named[0].name], kind="stable")[(rounds - 1) // 2])
    return Contest(
        run_s={name: np.array(seconds) for name, seconds in found.items()}, load=tuple(load), recorded=graphs[middle]
    )


ALONE = "alone"


def _apart(base: Setup, bits_per_s: float) -> Case:
    """The job with nothing to synchronise."""
    return Case(name=ALONE, setup=replace(base, synchronise=False), bits_per_s=bits_per_s, change=Change())


def _load() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _round(
    network: Network, chosen: Sequence[Case], folder: Path, tell: Callable[[str], None]
) -> Iterator[tuple[str, Run]]:
    """Every case once."""
    for number, case in enumerate(chosen):
        if network.bits_per_s != case.bits_per_s:
            network.limit(case.bits_per_s)
        tell(f"{folder.name}: {case.name}")
        yield case.name, run(network, case.setup, folder / str(number))


def _graph(traces: Sequence[RankTrace]) -> GlobalDfg:
    return build(traces, hosts=False)


def _medians(told: Prediction) -> tuple[float, float]:
    return float(np.median(told.seconds)), float(np.median(told.size_over_bandwidth_s))


def shifted(traces: Sequence[RankTrace], offset_s: Sequence[float]) -> tuple[RankTrace, ...]:
    """The same recordings by clocks that were put off."""
    return tuple(
        replace(trace, epoch_ns=trace.epoch_ns + round(1e9 * offset))
        for trace, offset in zip(traces, offset_s, strict=True)
    )


def _plain_s(graph: GlobalDfg) -> float:
    """By size / bandwidth; NaN where clocks are so far apart that transfers seem to take no time."""
    try:
        return float(predict(graph, Change()).size_over_bandwidth_s.mean())
    except ValueError:
        return float("nan")


def replayed(traces: Sequence[RankTrace]) -> Replayed:
    """What a job replays to once its clocks, which agree, are put off, and once they are aligned again."""
    truth = _graph(traces)
    offset_s = np.array([OFF_S * (-1) ** (r // 2) if r % 2 else 0.0 for r in range(len(traces))])
    off = shifted(traces, offset_s.tolist())
    found = align(off, same_machine=False)
    aligned = moved(off, found)
    took = float(truth.iteration_s().mean())
    held = np.max([one.peak_bytes for one in replay_trace(truth).iterations], axis=0)
    errors = []
    for graph in (_graph(off), _graph(aligned)):
        errors.append((float(replay_trace(graph).replayed_s.mean()) / took - 1.0, _plain_s(graph) / took - 1.0))
    return Replayed(
        measured_s=took, off_error=errors[0][0], aligned_error=errors[1][0], off_plain_error=errors[0][1],
        aligned_plain_error=errors[1][1], clock_s=float(np.abs(found.offset_s + offset_s - offset_s[0]).max()),
        memory_error=_furthest(held, np.array([trace.memory_bytes.max(initial=0.0) for trace in traces])),
    )  # fmt: skip


def _furthest(held: np.ndarray, sampled: np.ndarray) -> float:
    """The largest error of any rank, with its sign."""
    if not (held > 0.0).all() or not (sampled > 0.0).all():
        return float("nan")
    errors = held / sampled - 1.0
    return float(errors[np.argmax(np.abs(errors))])
