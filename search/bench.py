"""Measures this package on this machine: the cases of `search bench`. Each is a number with a unit; prints nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from estimator.inference.passes import priced_pass
from estimator.inference.step import infer
from estimator.schedule import Kind, order
from estimator.step import evaluate
from estimator.strategy import Schedule
from estimator.tasks import Device, Stream, Tasks
from results.pareto import non_dominated
from search.pool import usable_cpus
from search.served import load_served
from search.space import Sampler, Space, load_space

if TYPE_CHECKING:
    from search.sweep import Plan

__all__ = ["CASES", "Case", "machine", "selected"]

SPACES = ("deepseek_v3", "llama3_405b", "gpt3_175b", "qwen3_235b", "llama3_70b")
MAIN = SPACES[0]
ANSWERING = "llama3_70b_decode"
WIDE = "deepseek_v3_wide"
"""Every dimension open: candidates priced without pruning are those of structures drawn at random."""
SWEPT = (WIDE, "llama3_70b_wide", "capacity_deepseek_v3")
LIBRARIES = ("numpy", "numba", "ray", "pyarrow", "moocore")
NUM_POINTS = 1_000_000
NUM_CALLS = 30
NUM_STARTS = 5
NUM_PAIRS = 5
SAMPLED = {"llama3_8b_small": 19, "llama3_70b": 320}
"""Configurations that each sampler tries: half of the small space, a fortieth of the other."""
SAMPLERS = {
    Sampler.NSGA2: 320, Sampler.NSGA3: 320, Sampler.TPE: 320, Sampler.RANDOM: 320, Sampler.QMC: 320, Sampler.GP: 32,
}  # fmt: skip
"""And at most: a Gaussian process takes seconds to ask for one."""
NUM_REPLAYS = 5
PEAK_RSS = """
import sys
from search.space import load_space
from search.sweep import sweep_inline
sweep_inline(load_space(sys.argv[1]))
# Not getrusage: its maximum survives exec and would tell the parent's.
(line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(line.split()[1]) * 1024)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement. `better`: higher or lower."""

    name: str
    unit: str
    better: str
    measure: Callable[[], float] = field(repr=False)


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    return {
        "cpu": _cpu(),
        "cores": usable_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
    }


def selected(pattern: str) -> list[Case]:
    """Cases whose name matches a shell pattern; ValueError where none does."""
    chosen = [case for case in CASES if fnmatchcase(case.name, pattern)]
    if not chosen:
        raise ValueError(f"--only must match a case, but {pattern!r} does not; have {', '.join(c.name for c in CASES)}")
    return chosen


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _evaluate_s() -> float:
    """One scalar evaluation of the published layout, warm."""
    space = load_space(MAIN)
    strategy = next(iter(space.references.values()))
    work = partial(evaluate, space.model, strategy, space.system, space.workload)
    work()
    return median(_seconds(work) for _ in range(NUM_CALLS))


def _front_points_per_s() -> float:
    """The front of random points in two objectives."""
    points = np.random.default_rng(0).random((NUM_POINTS, 2))
    ids = np.arange(NUM_POINTS)
    non_dominated(points[:1000], ids[:1000])
    return NUM_POINTS / _seconds(lambda: non_dominated(points, ids))


def _infer_s() -> float:
    """One deployment of a shipped space, priced anew: nothing that was priced before is used."""
    space = load_served(ANSWERING)
    point = space.named(next(iter(space.references)))

    def work() -> None:
        priced_pass.cache_clear()
        infer(space.model, point.deployment, point.system, space.requests(point.batch))

    work()
    return median(_seconds(work) for _ in range(NUM_CALLS))


def _help_s() -> float:
    """A fresh interpreter that prints the help."""
    command = [sys.executable, "-m", "search", "--help"]
    return median(_seconds(lambda: _run(command)) for _ in range(NUM_STARTS))


def _priced_per_s_core(name: str) -> float:
    """Feasible candidates priced a second in one thread, without pruning."""
    from search.sweep import measure_rate

    rate, _ = measure_rate(load_space(name))
    return rate


def _replay_events_per_s() -> float:
    """Tasks replayed a second in one thread, warm, checks included: the best of a few."""
    from estimator.replay import replay

    replay(_pipeline(stages=2, micro_batches=2, blocks=2))
    tasks = _pipeline(stages=16, micro_batches=480, blocks=16)
    return len(tasks) / min(_seconds(lambda: replay(tasks)) for _ in range(NUM_REPLAYS))


def _replay_s() -> float:
    """The published layout's step, unrolled and replayed operation by operation, warm: lowering and prices included."""
    from estimator.detail.step import replay_step

    space = load_space(MAIN)
    strategy = next(iter(space.references.values()))
    work = partial(replay_step, space.model, strategy, space.system, space.workload)
    work()
    return median(_seconds(work) for _ in range(NUM_REPLAYS))


def _pipeline(*, stages: int, micro_batches: int, blocks: int) -> Tasks:
    """1F1B with traffic: 2 `blocks` + 1 tasks a pass on three streams a rank, 507 thousand for (16, 480, 16).

    A block is a kernel, which its host launches, and a transfer that may end while the next kernel runs; then a hop to
    the pass of the next stage. Transfers take compute, and share a link with the hops.
    """
    passes = [
        (r, x.kind, x.micro_batch) for r, o in enumerate(order(Schedule.ONE_F_ONE_B, stages, micro_batches)) for x in o
    ]
    at = {key: k for k, key in enumerate(passes)}
    onward = [at.get((r + (1 if kind is Kind.F else -1), kind, batch), -1) for r, kind, batch in passes]
    rank, receiver = np.array([r for r, _, _ in passes]), np.array(onward)
    size = 2 * blocks + 1
    base = size * np.arange(len(passes))
    kernel = base[:, None] + 2 * np.arange(blocks)
    hop = base + size - 1
    sends, follows = receiver >= 0, rank[1:] == rank[:-1]
    edges = [
        (kernel, kernel + 1),
        (kernel[:, :-1], kernel[:, 1:]),
        (kernel[:, :-2] + 1, kernel[:, 2:]),
        (kernel[:, -1] + 1, hop),
        (hop[sends], base[receiver[sends]]),
        (kernel[:-1, -1][follows], base[1:][follows]),
    ]
    lane = np.tile(np.append(np.tile([0, 1], blocks), 2), len(passes))  # kernel, transfer, ..., hop
    spread = np.random.default_rng(0).uniform(0.8, 1.2, len(lane))
    return Tasks.of(
        devices=[Device(name=f"rank {r}", links=("link",)) for r in range(stages)],
        streams=[
            Stream(device=k // 3, name=("compute", "tp", "pp")[k % 3], computes=k % 3 == 0) for k in range(3 * stages)
        ],
        stream=3 * np.repeat(rank, size) + lane,
        seconds=np.array([1e-3, 4e-4, 1e-3])[lane] * spread,
        edges=np.concatenate([np.stack([np.ravel(a), np.ravel(b)], axis=1) for a, b in edges]),
        takes=np.array([0.0, 0.1, 0.02])[lane],
        loads=np.array([0.0, 0.9, 0.6])[lane],
        launch_s=np.array([5e-6, 0.0, 0.0])[lane],
    )


def _sweep_s(name: str) -> float:
    """The exact front on every core, from the space on: without Ray's start and the replay of finalists."""
    seconds = _launched(load_space(name))
    return seconds["enumerate"] + seconds["warm_up"] + seconds["sweep"]


def _launch_s(name: str) -> float:
    """From nothing to a run folder with everything in it, as a user starts it: Ray's start included."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "search", "launch", name, "--out", str(Path(folder, "run"))]
        return _seconds(lambda: _run(command))


def _peak_rss_bytes(name: str) -> float:
    """Of a process that sweeps the space alone."""
    return float(_run([sys.executable, "-c", PEAK_RSS, name]).split()[-1])


def _scaling_2_workers() -> float:
    """How much faster two workers sweep than one, where there is most to sweep: median of pairs."""
    from search.fold import folded
    from search.pool import one_session
    from search.sweep import prepare

    plan = prepare(folded(load_space(WIDE))[0])
    with one_session(num_workers=2):
        return median(_swept_s(plan, 1) / _swept_s(plan, 2) for _ in range(NUM_PAIRS))


def _swept_s(plan: Plan, workers: int) -> float:
    """Seconds in which workers that have started, their code loaded, sweep the blocks of a plan."""
    from search.pool import BlockDone, RayPool
    from search.sweep import SweepWorker, merge

    found = [plan.warm]
    with RayPool(SweepWorker, plan, num_workers=workers) as pool:
        deque(pool.map(plan.blocks[-2 * workers :], lambda: plan.warm), maxlen=0)
        start = time.perf_counter()
        for done in pool.map(plan.blocks, lambda: found[-1]):
            assert isinstance(done, BlockDone), done
            found.append(merge([found[-1], done.value], plan.space, bounded=plan.bounded))
        return time.perf_counter() - start


class _Silent:
    """Watches a launch and says nothing."""

    def phase(self, text: str) -> None:
        """Nothing to say."""

    def update(self, state: object) -> None:
        """Nothing to say."""


def _launched(space: Space) -> dict[str, float]:
    """Seconds by phase of a run."""
    from search.launch import LaunchOptions, launch

    with tempfile.TemporaryDirectory() as folder:
        run = launch(space, LaunchOptions(out=Path(folder, "run")), _Silent())
        seconds: dict[str, float] = run.manifest["seconds"]
        run.close()
    return seconds


def _run(command: list[str]) -> str:
    """Standard output of a command; RuntimeError with its last line where it fails."""
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"`{' '.join(command)}` must end with 0, but ended with {done.returncode}: {last}")
    return done.stdout


def _optuna_speedup() -> float:
    """Time to 99 % of the exact hypervolume, plain Optuna over a study."""
    from search.bench_study import optuna_speedup

    return optuna_speedup(SPACES[1])


def _hypervolume(name: str, sampler: Sampler, trials: int) -> float:
    """Share of the exact hypervolume that a sampler reaches by itself."""
    from search.bench_study import hypervolume_share

    return hypervolume_share(name, sampler, trials)


def _captured(what: str) -> float:
    """A case of search/bench_capture.py, which alone needs the framework."""
    from search import bench_capture

    measure: Callable[[], float] = getattr(bench_capture, what)
    return measure()


def _traced(what: str) -> float:
    """A case of search/bench_traces.py, which needs the readers of traces."""
    from search import bench_traces

    measure: Callable[[], float] = getattr(bench_traces, what)
    return measure()


def _measured_traces(what: str) -> float:
    """A case of search/bench_replay_traces.py."""
    from search import bench_replay_traces

    measure: Callable[[], float] = getattr(bench_replay_traces, what)
    return measure()


def _tuned(off: str = "") -> float:
    """A case of search/bench_tune.py."""
    from search.bench_tune import tune_s

    return tune_s(off)


def _cases() -> Iterator[Case]:
    for name in SPACES:
        yield Case(
            name=f"priced_per_s_core.{name}", unit="1/s", better="higher", measure=partial(_priced_per_s_core, name)
        )
    yield Case(name=f"priced_per_s_core.{WIDE}", unit="1/s", better="higher", measure=partial(_priced_per_s_core, WIDE))
    for name in SWEPT:
        yield Case(name=f"sweep_s.{name}", unit="s", better="lower", measure=partial(_sweep_s, name))
    for name in SPACES:
        yield Case(name=f"sweep_s.{name}", unit="s", better="lower", measure=partial(_sweep_s, name))
        yield Case(name=f"launch_s.{name}", unit="s", better="lower", measure=partial(_launch_s, name))
        peak = partial(_peak_rss_bytes, name)
        yield Case(name=f"peak_rss_bytes.sweep_{name}", unit="B", better="lower", measure=peak)
    yield Case(name="evaluate_s", unit="s", better="lower", measure=_evaluate_s)
    yield Case(name="infer_s", unit="s", better="lower", measure=_infer_s)
    yield Case(name="front_points_per_s", unit="1/s", better="higher", measure=_front_points_per_s)
    yield Case(name=f"replay_s.{MAIN}", unit="s", better="lower", measure=_replay_s)
    yield Case(name="replay_events_per_s", unit="1/s", better="higher", measure=_replay_events_per_s)
    rate = partial(_measured_traces, "trace_replay_events_per_s")
    yield Case(name="trace_replay_events_per_s", unit="1/s", better="higher", measure=rate)
    yield Case(name="align_s", unit="s", better="lower", measure=partial(_measured_traces, "align_s"))
    yield Case(name="tune_s", unit="s", better="lower", measure=_tuned)
    for off in ("coarse", "partial", "symmetry"):
        yield Case(name=f"tune_s.without_{off}", unit="s", better="lower", measure=partial(_tuned, off))
    yield Case(name="scaling_2_workers", unit="1", better="higher", measure=_scaling_2_workers)
    yield Case(name="optuna_speedup", unit="1", better="higher", measure=_optuna_speedup)
    for name, trials in SAMPLED.items():
        for sampler, fewer in SAMPLERS.items():
            share = partial(_hypervolume, name, sampler, min(trials, fewer))
            yield Case(name=f"hypervolume.{sampler.value}.{name}", unit="1", better="higher", measure=share)
    yield Case(name=f"capture_s.{MAIN}", unit="s", better="lower", measure=partial(_captured, "capture_s"))
    yield Case(name=f"graph_bytes.{MAIN}", unit="B", better="lower", measure=partial(_captured, "graph_bytes"))
    peak = partial(_captured, "peak_rss_bytes")
    yield Case(name=f"peak_rss_bytes.capture_{MAIN}", unit="B", better="lower", measure=peak)
    ratio = partial(_captured, "sweep_captured_over_spec")
    yield Case(name="sweep_captured_over_spec", unit="1", better="higher", measure=ratio)
    yield Case(name="import_100mb_s", unit="s", better="lower", measure=partial(_traced, "import_100mb_s"))
    peak = partial(_traced, "peak_rss_bytes")
    yield Case(name="peak_rss_bytes.import_100mb", unit="B", better="lower", measure=peak)
    yield Case(name="help_s", unit="s", better="lower", measure=_help_s)


CASES: tuple[Case, ...] = tuple(_cases())
