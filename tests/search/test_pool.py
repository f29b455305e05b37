"""The pools: every block once, whatever dies. Real Ray, real SIGKILL; drivers that must die run as this file itself."""

# ruff: noqa: ANN401  # Specs and hints are any type.

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import search.pool
from search.blocks import Referee, Work
from search.pool import BlockDone, BlockFailed, EventKind, InlinePool, PoolError, RayPool

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [(start, start + 7) for start in range(0, 210, 7)]
DEADLINE_S = 30.0  # Generous: for what takes a second on a quiet machine.


class Adder:
    """Adds up its block of the spec's numbers, and does to itself what the spec asks for at a block's start."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec

    def run(self, start: int, stop: int, hint: Any) -> dict[str, Any]:
        what = self.spec.get("at", {}).get(start)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raise":
            raise Unpicklable
        if what == "lock":
            return {"value": threading.Lock()}
        if what == "interrupt":
            raise KeyboardInterrupt
        time.sleep(self.spec.get("seconds", 0.0))
        return {"value": int(self.spec["numbers"][start:stop].sum()), "pid": os.getpid(), "hint": hint}


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("no way to pickle me")
        self.lock = threading.Lock()


class Witness:
    """Reports how the spec and the process look from inside a worker."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.numbers = spec["numbers"]

    def run(self, start: int, stop: int, hint: Any) -> dict[str, Any]:
        address = self.numbers.ctypes.data
        spans = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        home = next(s for s in spans if int(s[0].split("-")[0], 16) <= address < int(s[0].split("-")[1], 16))
        threads = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")}
        return {"writeable": self.numbers.flags.writeable, "mapping": " ".join(home[5:]), "threads": threads}


def adder(spec: dict[str, Any]) -> Adder:
    return Adder(spec)


def witness(spec: dict[str, Any]) -> Witness:
    return Witness(spec)


def unwilling(spec: dict[str, Any]) -> Adder:
    raise LookupError(f"no model called {spec['name']}")


def stillborn(spec: dict[str, Any]) -> Adder:
    os.kill(os.getpid(), signal.SIGKILL)
    return Adder(spec)


def spec_of(**extra: Any) -> dict[str, Any]:
    return {"numbers": np.arange(210), **extra}


def expected(*, without: tuple[int, ...] = ()) -> Counter[tuple[int, int, int]]:
    return Counter((a, b, sum(range(a, b))) for a, b in BLOCKS if a not in without)


def sums(results: list[BlockDone | BlockFailed]) -> Counter[tuple[int, int, int]]:
    return Counter((r.start, r.stop, r.value["value"]) for r in results if isinstance(r, BlockDone))


def failures(results: list[BlockDone | BlockFailed]) -> dict[int, BlockFailed]:
    return {r.start: r for r in results if isinstance(r, BlockFailed)}


def no_hint() -> None:
    return None


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and only waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(root: int) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, size = {root}, 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {root}


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def wait_until_gone(pids: set[int], deadline_s: float = DEADLINE_S) -> set[int]:
    """Return those of `pids` that outlive the deadline."""
    end = time.monotonic() + deadline_s
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < end:
        time.sleep(0.05)
    return left


# In this process


def test_the_inline_pool_does_every_block_once_in_order():
    with InlinePool(adder, spec_of()) as pool:
        results = list(pool.map(BLOCKS, no_hint))
    assert [(r.start, r.stop) for r in results] == BLOCKS
    assert sums(results) == expected()


def test_a_block_that_raises_is_tried_twice_and_then_is_an_error_row():
    with InlinePool(adder, spec_of(at={14: "raise"})) as pool:
        results = list(pool.map(BLOCKS, no_hint))
    assert sums(results) == expected(without=(14,))
    assert failures(results)[14] == BlockFailed(start=14, stop=21, error="Unpicklable: no way to pickle me", attempts=2)
    assert [event.kind for event in pool.events] == [EventKind.RETRY, EventKind.FAILURE]


def test_ctrl_c_inside_an_inline_block_is_not_swallowed():
    with InlinePool(adder, spec_of(at={7: "interrupt"})) as pool, pytest.raises(KeyboardInterrupt):
        list(pool.map(BLOCKS, no_hint))


def test_a_block_whose_worker_died_next_runs_by_itself_and_the_others_wait_for_it():
    work, referee = Work([(0, 7), (7, 14)]), Referee(max_attempts=2)
    suspect = work.take(load=0)
    assert referee.crashed(suspect, "gone") is None
    work.put_back(suspect)
    assert work.take(load=1) is None  # a busy worker gets nothing: it must run dry
    assert work.take(load=0) is suspect
    assert work.take(load=1).start == 7
    assert referee.crashed(suspect, "gone").attempts == 2
    assert not work.more()


@pytest.mark.parametrize("bad", [{"num_workers": 0}, {"max_attempts": 0}])
def test_senseless_sizes_are_refused_before_anything_starts(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be at least 1, but got 0"):
        RayPool(adder, spec_of(), **bad)


def test_a_port_where_nothing_listens_is_refused_with_a_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound but not listening: connections are refused.
        with pytest.raises(ValueError, match=r"must name a running Ray cluster.*refused.*ray start --head"):
            search.pool._check_reachable(f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_server_that_is_not_ray_is_given_up_after_a_bounded_time(monkeypatch):
    monkeypatch.setattr(search.pool, "_PROBE_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        begin = time.monotonic()
        with pytest.raises(ValueError, match="no answer within 3 s"):
            search.pool._check_reachable(f"127.0.0.1:{mute.getsockname()[1]}")
    assert time.monotonic() - begin < 3.0 + DEADLINE_S


# On a cluster of this process: a head with two CPUs, and nodes that a test adds


@pytest.mark.parametrize("num_workers", [1, 2])
def test_ray_gives_what_inline_gives_whatever_the_number_of_workers(cluster, num_workers):
    with RayPool(adder, spec_of(), num_workers=num_workers) as pool:
        results = list(pool.map(BLOCKS, no_hint))
    assert sums(results) == expected()
    assert len({r.value["pid"] for r in results}) == num_workers
    assert all(r.seconds > 0 and r.peak_rss_bytes > 1e7 and str(r.value["pid"]) in r.worker for r in results)
    assert pool.events == []


def test_sigkill_of_workers_changes_nothing_in_the_result(cluster):
    results = []
    with RayPool(adder, spec_of(seconds=0.02), num_workers=2) as pool:
        for result in pool.map(BLOCKS, no_hint):
            results.append(result)
            if len(results) in (3, 11, 19):
                os.kill(result.value["pid"], signal.SIGKILL)
    assert sums(results) == expected()
    assert Counter(event.kind for event in pool.events)[EventKind.CRASH] == 3
    assert pool.events[0].time_s == pytest.approx(time.time(), abs=60)


def test_a_block_that_kills_its_worker_becomes_an_error_row_while_the_others_finish(cluster):
    with RayPool(adder, spec_of(at={21: "die"}), num_workers=2, max_attempts=2) as pool:
        results = list(pool.map(BLOCKS, no_hint))
    assert sums(results) == expected(without=(21,))
    assert failures(results)[21].attempts == 2
    assert "worker died 2 time(s)" in failures(results)[21].error


def test_many_poison_blocks_side_by_side_never_fail_an_innocent_one(cluster):
    poison = (7, 14)
    with RayPool(adder, spec_of(at=dict.fromkeys(poison, "die")), num_workers=1, max_attempts=2) as pool:
        results = list(pool.map(BLOCKS[:5], no_hint))
    assert set(failures(results)) == set(poison)
    assert sorted(r.start for r in results) == [a for a, _ in BLOCKS[:5]]


def test_exceptions_and_values_that_cannot_be_pickled_are_error_rows_with_their_text(cluster):
    with RayPool(adder, spec_of(at={0: "raise", 70: "lock"}), num_workers=2) as pool:
        results = list(pool.map(BLOCKS, no_hint))
    assert sums(results) == expected(without=(0, 70))
    assert failures(results)[0] == BlockFailed(start=0, stop=7, error="Unpicklable: no way to pickle me", attempts=2)
    assert "pickle" in failures(results)[70].error
    assert not [event for event in pool.events if event.kind is EventKind.CRASH]


def test_a_hint_is_drawn_right_before_its_block_is_handed_out_and_seen_by_its_worker(cluster):
    finished: list[int] = []
    drawn: list[int] = []

    def blocks() -> Iterator[tuple[int, int]]:
        for block in BLOCKS:
            drawn.append(block[0])
            yield block

    with RayPool(adder, spec_of(), num_workers=2) as pool:
        for result in pool.map(blocks(), lambda: (len(drawn), len(finished))):
            num_drawn, num_finished = result.value["hint"]
            place = BLOCKS.index((result.start, result.stop))
            assert num_drawn == place + 1
            assert num_finished >= place - 3  # two workers hold two blocks each, this one included
            finished.append(result.start)
    assert len(finished) == len(BLOCKS)


def test_spec_arrays_are_read_only_pages_of_the_shared_store_and_each_actor_is_one_thread(cluster):
    with RayPool(witness, {"numbers": np.arange(300_000)}, num_workers=1) as pool:
        (result,) = pool.map([(0, 1)], no_hint)
    assert result.value["writeable"] is False
    assert "plasma" in result.value["mapping"] or "/shm/" in result.value["mapping"]
    assert result.value["threads"] == {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def test_a_map_left_early_leaves_nothing_to_the_next_one(cluster):
    with RayPool(adder, spec_of(seconds=0.05), num_workers=2) as pool:
        first = pool.map(BLOCKS, no_hint)
        next(first)
        first.close()
        assert sums(list(pool.map(BLOCKS[20:], no_hint))) == Counter((a, b, sum(range(a, b))) for a, b in BLOCKS[20:])


def test_more_workers_than_cpus_are_refused_and_the_default_is_what_is_free(cluster):
    with pytest.raises(ValueError, match="at most the free CPUs of the cluster, but got 64"):
        RayPool(adder, spec_of(), num_workers=64)
    with RayPool(adder, spec_of(), num_workers=1), RayPool(adder, spec_of()) as second:
        assert second.num_workers == 1


def test_another_cluster_than_the_one_connected_to_is_refused(cluster):
    with pytest.raises(ValueError, match="connected to one Ray cluster"):
        RayPool(adder, spec_of(), address="127.0.0.1:1")


def test_a_factory_that_raises_or_dies_is_an_error_with_its_text_not_a_hang(cluster):
    with pytest.raises(PoolError, match="LookupError: no model called gpt-5"):
        RayPool(unwilling, {"name": "gpt-5"}, num_workers=2)
    with pytest.raises(PoolError, match=r"every worker must start.*ActorDiedError"):
        RayPool(stillborn, spec_of(), num_workers=1)


@pytest.mark.slow
def test_a_node_that_dies_mid_run_changes_nothing_in_the_result(cluster):
    extra = [cluster.add_node(num_cpus=1, object_store_memory=80 * 1024**2) for _ in range(2)]
    cluster.wait_for_nodes()
    results, drawn = [], Counter()
    with RayPool(adder, spec_of(seconds=0.05), num_workers=4) as pool:

        def blocks() -> Iterator[tuple[int, int]]:
            end = time.monotonic() + 2 * DEADLINE_S
            while not pool.events and time.monotonic() < end:  # a node takes a moment to die
                for block in BLOCKS:
                    drawn[block] += 1
                    yield block

        for result in pool.map(blocks(), no_hint):
            results.append(result)
            if len(results) == 6:
                cluster.remove_node(extra[0], allow_graceful=False)
    assert sums(results) == Counter({(a, b, sum(range(a, b))): times for (a, b), times in drawn.items()})
    assert [event.kind for event in pool.events].count(EventKind.CRASH) == 1
    cluster.remove_node(extra[1])


# Drivers of their own: `python test_pool.py MODE [ADDRESS]`


def driver(mode: str, address: str | None) -> None:
    """Run a pool; say on one line of JSON who runs below it; then go on, or wait for a signal."""
    environment, group = dict(os.environ), os.getpgrp()
    with RayPool(adder, spec_of(seconds=0.01), num_workers=2, address=address, max_attempts=3) as pool:
        results = []
        for result in pool.map(BLOCKS if mode == "finish" else ((i, i + 1) for i in range(10**9)), no_hint):
            results.append(result)
            if len(results) == 8:
                workers = {r.value["pid"] for r in results}
                # Ray's agents linger for a minute after a SIGKILL of the driver, asleep: Ray's own timeout.
                below = {pid for pid in workers | descendants(os.getpid()) if "Agent" not in command(pid)}
                changed = {k: v for k, v in os.environ.items() if k != "RAY_CLIENT_MODE" and environment.get(k) != v}
                print(
                    json.dumps({"below": sorted(below), "changed": changed, "same_group": os.getpgrp() == group}),
                    flush=True,
                )
                if mode == "finish":
                    os.kill(result.value["pid"], signal.SIGKILL)
    print(json.dumps({"right": sums(results) == expected()}), flush=True)


def start_driver(mode: str, address: str | None = None, *, session: bool = True, **env: str) -> "subprocess.Popen[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"PYTHONPATH": str(ROOT)} | env
    command = [sys.executable, __file__, mode, *([address] if address else [])]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=session
    )


def first_line(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return json.loads(line)


def test_a_local_ray_is_quiet_restores_the_environment_and_leaves_no_process(tmp_path):
    with start_driver("finish", session=False, HOME=str(tmp_path)) as process:
        said = first_line(process)
        out, err = process.communicate(timeout=2 * DEADLINE_S)
    assert process.returncode == 0
    assert json.loads(out) == {"right": True}  # a killed worker included, and not a word of Ray's beside it
    assert err == ""
    assert said["changed"] == {}
    assert said["same_group"]  # or a shell script's Ctrl-C would no longer reach it
    assert len(said["below"]) > 2
    assert wait_until_gone(set(said["below"]), 5.0) == set()
    assert list(tmp_path.iterdir()) == []  # no key in the home directory


@pytest.mark.slow
def test_sigkill_of_the_driver_leaves_no_process():
    with start_driver("endless") as process:
        below = set(first_line(process)["below"])
        process.kill()
        assert wait_until_gone(below) == set()


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True], ids=["kill -INT", "ctrl-c"])
def test_an_interrupt_ends_the_driver_and_its_ray_within_seconds(whole_group):
    with start_driver("endless") as process:
        below = set(first_line(process)["below"])
        begin = time.monotonic()
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
        took = time.monotonic() - begin
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert process.returncode == -signal.SIGINT
        assert wait_until_gone(below, 5.0) == set()
    assert took < 10.0  # 2 s on a quiet machine


@pytest.mark.slow
def test_a_joined_cluster_runs_on_when_its_driver_closes_or_is_killed(cluster):
    import ray

    with start_driver("finish", cluster.address, RAY_AUTH_MODE="disabled") as process:
        closed = set(first_line(process)["below"])
        out, err = process.communicate(timeout=2 * DEADLINE_S)
    assert (json.loads(out), err) == ({"right": True}, "")
    with start_driver("endless", cluster.address, RAY_AUTH_MODE="disabled") as process:
        killed = set(first_line(process)["below"])
        process.kill()
    assert wait_until_gone(closed | killed) == set()
    assert [node["Alive"] for node in ray.nodes()].count(True) >= 1
    with RayPool(adder, spec_of(), num_workers=1) as pool:
        assert sums(list(pool.map(BLOCKS, no_hint))) == expected()


if __name__ == "__main__":
    driver(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
