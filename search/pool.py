"""Runs blocks of work on Ray actors that may die: every block is reported once, whatever happens to its workers.

Knows nothing of what a block means; `blocks.py` says what becomes of one that goes wrong. The only module that imports
ray, and only once a `RayPool` is made.

Why a dispatcher of our own: `ray.util.ActorPool` hands work to dead actors, then shrinks or hangs.
"""

# ruff: noqa: ANN401  # Specs, hints and Ray's references are the caller's and Ray's: any type at all.

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from search.blocks import (
    Block,
    BlockDone,
    BlockFailed,
    Closing,
    Event,
    EventKind,
    Hint,
    InlinePool,
    Pool,
    PoolError,
    Ran,
    Referee,
    Work,
    Worker,
    WorkerFactory,
    describe,
)

__all__ = [
    "BlockDone",
    "BlockFailed",
    "Event",
    "EventKind",
    "InlinePool",
    "Pool",
    "PoolError",
    "RayPool",
    "Worker",
    "WorkerFactory",
    "one_session",
    "usable_cpus",
]

_QUEUED_PER_ACTOR = 2  # One runs, one waits, so an actor never idles while the driver merges a front.
_OBJECT_STORE_BYTES = 512 * 1024**2
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_CONNECT_S, _PROBE_S = 5.0, 30.0


@dataclass(slots=True, eq=False, kw_only=True)
class _Seat:
    """One actor as the driver sees it: starting until `starting` resolves, then with blocks in flight."""

    actor: Any
    starting: Any
    since_s: float
    failed_starts: int = 0
    name: str = "a starting worker"
    flights: dict[Any, Block] = field(default_factory=dict)  # In submission order, which is the actor's order.

    def takes_more(self) -> bool:
        busy = len(self.flights)
        lonely = any(block.alone for block in self.flights.values())
        return self.starting is None and busy < _QUEUED_PER_ACTOR and not lonely


@contextmanager
def one_session(address: str | None = None, num_workers: int | None = None) -> Iterator[None]:
    """One connection to Ray for every pool that is opened inside: starting a local Ray takes seconds each time."""
    session = _Session(address, num_workers, _OBJECT_STORE_BYTES)
    try:
        yield
    finally:
        session.close()


class RayPool(Closing):
    """Workers on Ray actors: on a local Ray that the pool starts and stops, or on a cluster that it joins and leaves.

    Dead actors and dead nodes are replaced and their blocks handed out again. The block that was running is charged
    an attempt; blocks queued behind it are not, but all of them next run by themselves, so that a second death names
    its cause. `max_attempts` charges make a `BlockFailed`.
    """

    def __init__(
        self,
        worker_factory: WorkerFactory,
        spec: Any,
        *,
        num_workers: int | None = None,
        address: str | None = None,
        max_attempts: int = 3,
        start_timeout_s: float = 60.0,
        object_store_bytes: int = _OBJECT_STORE_BYTES,
    ) -> None:
        """Start the workers, and Ray too unless `address` names a cluster ("auto", "host:port", "ray://host:port").

        If this process is connected to Ray already, that connection is used and left open.
        `num_workers` defaults to the CPUs there are, `object_store_bytes` caps the local Ray's shared memory.
        """
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, but got {num_workers}; leave it out to use every CPU")
        self._referee = Referee(max_attempts)
        self.events = self._referee.events
        self._start_timeout_s = start_timeout_s
        self._seats: list[_Seat] = []
        self._owner: dict[Any, _Seat] = {}  # Every reference awaited, and whose it is.
        self._closed = False
        begin = time.perf_counter()
        self._session = _Session(address, num_workers, object_store_bytes)
        try:
            connected = time.perf_counter()
            self.num_workers = self._session.num_workers(num_workers)
            self._open(worker_factory, spec)
        except BaseException:  # Ctrl-C included: whatever was started must stop.
            self.close()
            raise
        self.start_seconds: Mapping[str, float] = {
            "connect": connected - begin,
            "workers": time.perf_counter() - connected,
        }

    def _open(self, worker_factory: WorkerFactory, spec: Any) -> None:
        import ray

        self._ray: Any = ray  # Half of Ray's functions carry no types.
        self._actor_class = _actor_class()
        # In a list, Ray hands on the reference itself; the actor then reads the spec after its threads are limited.
        self._luggage = (
            [os.path.abspath(p) for p in sys.path],
            self._ray.cloudpickle.dumps(worker_factory),
            [ray.put(spec)],
        )
        for _ in range(self.num_workers):
            self._seat()
        while any(seat.starting is not None for seat in self._seats):
            ref = self._wait()
            if ref is not None and (error := self._started(ref)):
                raise PoolError(f"every worker must start, but one could not: {error}")
            late = [seat for seat in self._seats if seat.starting is not None and self._is_late(seat)]
            if late:
                raise PoolError(
                    f"{self.num_workers} workers must start within {self._start_timeout_s:.0f} s, but {len(late)} "
                    "did not; ask for fewer workers, or look for other jobs on the cluster"
                )

    def map(self, blocks: Iterable[tuple[int, int]], hint: Hint) -> Iterator[BlockDone | BlockFailed]:
        """Yield every block once, in completion order. `hint` is called right before a block is handed out."""
        work = Work(blocks)
        for _ in range(self.num_workers - len(self._seats)):
            self._seat()
        try:
            while True:
                self._hand_out(work, hint)
                if not any(seat.flights for seat in self._seats) and not work.more():
                    return
                self._require_workers()
                if (ref := self._wait()) is not None:
                    yield from self._settle(ref, work)
        finally:
            self._dismiss_busy()

    def close(self) -> None:
        """Stop the actors; stop Ray if the pool started it; leave the cluster if the pool joined it."""
        if self._closed:
            return
        self._closed = True
        for seat in list(self._seats):
            self._dismiss(seat)
        self._session.close()

    def _seat(self, failed_starts: int = 0) -> None:
        actor = self._actor_class.remote()
        starting = actor.start.remote(*self._luggage)
        seat = _Seat(actor=actor, starting=starting, since_s=time.monotonic(), failed_starts=failed_starts)
        self._seats.append(seat)
        self._owner[starting] = seat

    def _dismiss(self, seat: _Seat) -> None:
        """Forget a worker and all that it was to answer: what it still answers is nobody's."""
        self._seats.remove(seat)
        for ref in (seat.starting, *seat.flights):
            self._owner.pop(ref, None)
        self._ray.kill(seat.actor, no_restart=True)

    def _dismiss_busy(self) -> None:
        """After a map that ended early: a busy worker would run yesterday's blocks before today's."""
        for seat in [seat for seat in self._seats if seat.flights]:
            self._dismiss(seat)

    def _wait(self) -> Any | None:
        """A reference that resolved, None where none does soon: deadlines must be looked at.

        One at a time: to ask for all that are ready is a second call, as long as all else that a block costs here.
        """
        ready: list[Any] = self._ray.wait(list(self._owner), num_returns=1, timeout=1.0)[0]
        return ready[0] if ready else None

    def _started(self, ref: Any) -> str | None:
        """Seat the worker whose start resolved, or say why it could not start."""
        seat = self._owner.pop(ref)
        try:
            seat.name, error = self._ray.get(ref)
        except self._ray.exceptions.RayError as lost:
            error = _reason(lost)
        seat.starting = None
        return error if error is None else str(error)

    def _is_late(self, seat: _Seat) -> bool:
        return time.monotonic() - seat.since_s > self._start_timeout_s

    def _replace_unless_started(self, seat: _Seat) -> None:
        error = self._started(seat.starting)
        if error is None:
            self._referee.note(EventKind.WORKER, f"worker {seat.name} started in place of a lost one")
            return
        self._referee.note(EventKind.CRASH, f"a worker could not start: {error}")
        self._dismiss(seat)
        if seat.failed_starts + 1 < self._referee.max_attempts:
            self._seat(seat.failed_starts + 1)

    def _settle(self, ref: Any, work: Work) -> Iterator[BlockDone | BlockFailed]:
        """Do what a resolved reference asks for; yield the blocks that it decides."""
        seat = self._owner.get(ref)
        if seat is None:
            return  # Settled already, along with another block of its dead worker.
        if ref == seat.starting:
            self._replace_unless_started(seat)
            return
        try:
            ran = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:  # Its value cannot be pickled, say.
            ran = Ran(error=str(error).rstrip().splitlines()[-1])
        except self._ray.exceptions.RayError as lost:
            yield from self._bury(seat, _reason(lost), work)
            return
        del self._owner[ref]
        block = seat.flights.pop(ref)
        yield from self._referee.outcome(block, ran, work)

    def _bury(self, seat: _Seat, error: str, work: Work) -> Iterator[BlockFailed]:
        """Replace a dead worker; charge the block that it ran, hand out the ones behind it again."""
        self._referee.note(EventKind.CRASH, f"worker {seat.name} died: {error}")
        self._dismiss(seat)
        self._seat()
        # An actor runs its blocks in order, so the first without an answer ran. Or its answer was lost on the way, and
        # the next one ran: hence a first charge never fails a block (unless max_attempts is 1), and suspects run alone.
        running, *queued = seat.flights.values()
        for block in queued:
            block.alone = True
            self._referee.note(EventKind.RESUBMISSION, f"{block} was queued on worker {seat.name}")
            work.put_back(block)
        if failed := self._referee.crashed(running, error):
            yield failed
        else:
            work.put_back(running)

    def _require_workers(self) -> None:
        """A lost node can leave no room for a replacement: go on with fewer workers, but not with none."""
        if all(seat.starting is not None and self._is_late(seat) for seat in self._seats):
            last = next((e.text for e in reversed(self.events) if e.kind is EventKind.CRASH), "none was lost")
            raise PoolError(
                f"at least one worker must be left, but none is and no replacement started; last loss: {last}"
            )

    def _hand_out(self, work: Work, hint: Hint) -> None:
        """Fill the idle workers first, then one block deep behind those that run."""
        for load in range(_QUEUED_PER_ACTOR):
            for seat in self._seats:
                if len(seat.flights) != load or not seat.takes_more():
                    continue
                block = work.take(load=load)
                if block is None:
                    break
                ref = seat.actor.run.remote(block.start, block.stop, hint())
                seat.flights[ref] = block
                self._owner[ref] = seat


def _actor_class() -> Any:
    """The actor: pickled by value, since nothing of ours can be imported before it has set `sys.path`."""
    import ray

    class SearchWorker:
        def start(self, paths: list[str], worker_factory: bytes, spec: list[Any]) -> tuple[str, str | None]:
            import os
            import sys

            for variable in _THREAD_VARIABLES:  # Before numba loads: one actor is one core.
                os.environ[variable] = "1"
            sys.path[:] = paths + [path for path in sys.path if path not in paths]
            from search.backends import load_backends
            from search.blocks import Bench, describe

            try:
                load_backends()
                self._bench = Bench(ray.cloudpickle.loads(worker_factory), ray.get(spec[0]))
            except Exception as error:  # The named boundary: the driver raises it as a PoolError.
                return "", describe(error)
            return self._bench.name, None

        def run(self, start: int, stop: int, hint: Any) -> Any:
            return self._bench.run(start, stop, hint)

    # No restarts by Ray: a restarted actor would be handed calls before the driver has judged what killed it.
    options = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")
    return options(SearchWorker)


def _reason(error: BaseException) -> str:
    """Ray's errors are pages; the line that names the cause is enough."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    telling = [line for line in lines if line.startswith(("The actor is dead because", "The actor died because"))]
    detail = telling[-1] if telling else lines[0]
    detail = detail.split(" Some common causes")[0]
    return f"{type(error).__name__}: {detail[:300]}"


class _Session:
    """The connection to Ray: found open, started here, or joined; `close` undoes what was done and no more."""

    def __init__(self, address: str | None, num_workers: int | None, object_store_bytes: int) -> None:
        import ray

        self._ray: Any = ray
        self._opened_here = not ray.is_initialized()
        self._local = address is None and self._opened_here
        self._printed_before = _let_ray_print(False)
        try:
            if self._local:
                self._start(num_workers, object_store_bytes)
            elif self._opened_here:
                assert address is not None
                self._join(address)
            else:
                self._require_same(address)
        except BaseException:
            self.close()
            raise

    def _start(self, num_workers: int | None, object_store_bytes: int) -> None:
        most = max(8, 4 * usable_cpus())  # A worker beyond a core's first buys nothing and takes 100 MB and more.
        if num_workers is not None and num_workers > most:
            raise ValueError(
                f"num_workers must be at most {most} on {usable_cpus()} CPUs, but got {num_workers}; leave it out"
            )
        environment = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Else a FutureWarning on stderr.
        }
        environment |= dict.fromkeys(_THREAD_VARIABLES, "1")
        if "RAY_AUTH_MODE" not in os.environ:
            # Our own Ray, our own key: in the environment of its processes only, never in the home directory.
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        with _environment(environment):
            _reread_authentication()
            self._init(
                address="local",
                num_cpus=num_workers or usable_cpus(),
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=object_store_bytes,
            )

    def _join(self, address: str) -> None:
        _reread_authentication()
        _check_reachable(address)
        with _environment({}):
            self._init(address=address)

    def _require_same(self, address: str | None) -> None:
        here = self._ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise ValueError(
                f"a process can be connected to one Ray cluster, but it is to {here} and address is {address!r}; "
                "call ray.shutdown() first, or leave the address out"
            )

    def _init(self, **options: Any) -> None:
        main = threading.current_thread() is threading.main_thread()
        on_term, group = signal.getsignal(signal.SIGTERM), os.getpgrp()
        try:
            self._ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        finally:
            if main:  # Ray puts its own handler there; what SIGTERM does is the command line's business.
                signal.signal(signal.SIGTERM, on_term)
            if (
                os.getpgrp() != group
            ):  # Ray made us the leader of its processes: no Ctrl-C would reach us from a script.
                os.setpgid(0, group)

    def num_workers(self, asked: int | None) -> int:
        """How many workers the cluster has room for: those asked for, or as many as there are free CPUs."""
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        wanted = asked or max(cpus, 1)
        free = self._free_cpus(wanted) if wanted <= cpus else 0
        if wanted <= free:
            return wanted
        if asked is None and free:
            return free
        raise ValueError(
            f"num_workers must be at most the free CPUs of the cluster, but got {wanted} for {free} free of {cpus}; "
            "ask for fewer workers, add nodes, or wait for other jobs to end"
        )

    def _free_cpus(self, wanted: int) -> int:
        """Free CPUs now. Ray's view lags by about a second behind a job that has just ended, so look twice."""
        deadline = time.monotonic() + _CONNECT_S
        while True:
            free = int(self._ray.available_resources().get("CPU", 0))
            if free >= wanted or time.monotonic() > deadline:
                return free
            time.sleep(0.1)

    def close(self) -> None:
        if self._opened_here:
            self._ray.shutdown()
            _reread_authentication()
        _let_ray_print(self._printed_before)


def usable_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes started inside, and put back what was there, Ray's own changes included."""
    before = {name: os.environ.get(name) for name in {*values, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _let_ray_print(wanted: bool) -> bool:
    """Ray prints every dead worker to *standard output*, whatever `log_to_driver` says: no place for it in JSON."""
    import ray._private.worker

    settings = vars(ray._private.worker)
    before = bool(settings.get("_worker_logs_enabled", True))
    settings["_worker_logs_enabled"] = wanted
    return before


def _reread_authentication() -> None:
    """Ray reads the mode and the key once a process; a second session in this process may have others."""
    from ray import _raylet

    compiled: Any = _raylet
    compiled.AuthenticationTokenLoader.instance().reset_cache()
    compiled.Config.initialize("")


def _check_reachable(address: str) -> None:
    """Try the address in a process that can be killed: Ray itself waits for minutes, or ends the process."""
    law = f"address must name a running Ray cluster, but got {address!r}"
    remedy = "start one with `ray start --head`, or leave the address out to run on this machine"
    place = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    host, _, port = place.removeprefix("ray://").rpartition(":")
    if place != "auto":
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(f"{law}: {describe(error)}; {remedy}") from error
    probe = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level=40)"
    try:
        tried = subprocess.run(
            [sys.executable, "-c", probe, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{law}: no answer within {_PROBE_S:.0f} s; {remedy}") from error
    if tried.returncode:
        said = [line for line in tried.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise ValueError(f"{law}: {said[-1][:300]}; {remedy}")
