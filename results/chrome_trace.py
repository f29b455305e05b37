"""A timeline as a Chrome/Perfetto trace, JSON or gzip of it: the only trace writer. Computes no times of its own.

Process = device, thread = stream, above the streams a thread with one slice per pass; arrows where a task of one device
waits for one of another, a memory counter per device. Format: "Trace Event Format" (Google, JSON object form: complete,
flow, counter and metadata events); opens in ui.perfetto.dev. A file holds at most 100 MB of text: what a viewer takes.
Where all operations would be more, all passes are kept and operations of the first, middle and last micro-batches.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from estimator.part import Part
from estimator.tasks import CATEGORIES
from estimator.timeline import Timeline, memory
from hardware.units import format_bytes
from results.colours import TRACE_NAMES
from results.files import as_user_error
from results.trace_selection import choose

__all__ = ["MAX_BYTES", "TraceFile", "check_free", "write_trace"]

MAX_BYTES = 100_000_000  # of JSON text; ui.perfetto.dev holds about as much without its native helper
PER_S = 1_000_000_000  # times are whole nanoseconds, as Perfetto keeps them
COUNTER_SHARE = 0.03  # of the text at most: a memory curve has two steps per tensor
# Characters of a line besides names, times (2 a slice) and whole numbers (4 a slice), rounded up.
OP_BYTES, FLOW_BYTES, PASS_BYTES, COUNTER_BYTES = 148, 2 * 86, 98, 110
HEAD_BYTES, THREAD_BYTES = 20_000, 500
BATCH = 2_000  # lines that are written at once
LEVEL = 3  # of gzip: a trace of the largest size in a second, a twelfth of its size
HEAD_LIMIT = 65_536  # bytes of a file that may be a trace: its first line says whose it is


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """What was written. `ops` says which operations are in it."""

    path: Path
    text_bytes: int
    events: int
    ops: str


@dataclass(frozen=True, slots=True)
class _Passes:
    """One slice per pass and device, `[P]` each; a lane holds passes that do not overlap."""

    device: np.ndarray
    scope: np.ndarray
    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    first: np.ndarray


def check_free(path: Path, subject: str) -> None:
    """ValueError where a trace at `path` would replace anything but a trace of the same subject."""
    path = Path(path)
    if path.exists() and (not path.is_file() or _subject_of(path) != subject):
        raise ValueError(
            f"{path}: holds something else, and nothing is overwritten; give another folder or move it away"
        )


def write_trace(
    path: Path, timeline: Timeline, *, subject: str, about: Mapping[str, str | float] | None = None,
    max_bytes: int = MAX_BYTES, parts: Mapping[str, Part] | None = None,
) -> TraceFile:  # fmt: skip
    """Writes the timeline to `path`, at once or not at all; gzip when the name ends in .gz.

    `subject` names what is traced: a file of another subject is not replaced. `about` goes into the trace's metadata.
    `parts`: of which part of the model an operation of that name is; chrome://tracing draws it in the part's colour,
    Perfetto's viewer chooses colours by name.
    """
    path = Path(path)
    check_free(path, subject)
    trace = _Trace(timeline, max_bytes, parts or {})
    head = {"subject": subject, **(about or {}), **trace.notes()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    num_bytes = num_events = 0
    with as_user_error(path, "write the trace"):
        try:
            with _opened(temporary, is_gzip=path.suffix == ".gz") as file:
                file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(head)},\n"traceEvents":[\n')
                for lines in _batches(trace.lines()):
                    text = ("," if num_events else "") + "\n,".join(lines)
                    num_bytes += file.write(text + "\n")
                    num_events += len(lines)
                file.write("]}\n")
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return TraceFile(path=path, text_bytes=num_bytes, events=num_events, ops=trace.ops)


def _batches(lines: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(lines, BATCH)):
        yield batch


def _opened(path: Path, *, is_gzip: bool) -> io.TextIOWrapper:
    """A text file; of equal content, equal bytes (a gzip header would hold the time)."""
    raw = path.open("wb")
    return io.TextIOWrapper(_Gzip(raw) if is_gzip else raw, encoding="ascii", newline="\n")


class _Gzip(gzip.GzipFile):
    """Closes the file below it too."""

    def __init__(self, below: io.BufferedWriter) -> None:
        super().__init__(filename="", mode="wb", compresslevel=LEVEL, fileobj=below, mtime=0)
        self._below = below

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._below.close()


def _subject_of(path: Path) -> object:
    """Whose trace a file is; None where it is none of ours."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            line = file.readline(HEAD_LIMIT)
        return json.loads(line.rstrip(b",\n") + b"}")["otherData"].get("subject")
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None


class _Trace:
    """The events of one timeline as lines of JSON, thread by thread in time order."""

    def __init__(self, timeline: Timeline, max_bytes: int, parts: Mapping[str, Part]) -> None:
        self.timeline, self.tasks = timeline, timeline.tasks
        self.said = [_named(name, parts.get(name)) for name in self.tasks.names]
        self.computes = np.array([stream.computes for stream in self.tasks.streams], dtype=np.bool_)
        ran = np.flatnonzero(np.isfinite(timeline.start))
        self.ran = ran[np.argsort(timeline.start[ran], kind="stable")]
        self.start, self.end = _nanoseconds(timeline, self.ran)
        self.passes = self._passes()
        self.curves = _counters(timeline, max_bytes)
        self.flows = self._flows()
        names = [len(said) for said in self.said]
        scopes = [len(json.dumps(name)) + 6 for name in self.tasks.scopes]  # one without a name is called step
        time, number = len(_us(int(self.end.max(initial=0)))), len(str(4 * len(self.tasks)))
        fixed = HEAD_BYTES + sum(len(times) for times, _ in self.curves) * (COUNTER_BYTES + time + number)
        fixed += THREAD_BYTES * (len(self.tasks.streams) + 3 * len(self.tasks.devices))
        fixed += int((PASS_BYTES + 2 * time + 4 * number + np.array(scopes, dtype=np.int64)[self.passes.scope]).sum())
        if fixed > max_bytes:
            raise ValueError(
                f"a trace must be at most {max_bytes} bytes, but its {len(self.passes.scope)} passes alone take "
                f"{fixed}; a replay of this point alone may take {MAX_BYTES}, fewer micro-batches take less"
            )
        cost = np.zeros(len(self.tasks))
        cost[self.ran] = OP_BYTES + 2 * time + 4 * number + np.array(names, dtype=np.int64)[self.tasks.name[self.ran]]
        np.add.at(cost, self.flows[:, 0], FLOW_BYTES + 2 * time + 6 * number)
        self.kept, self.ops = choose(self.tasks.micro_batch, cost, self.ran, max_bytes - fixed)
        self.flows = self.flows[self.kept[self.flows].all(axis=1)]

    def notes(self) -> dict[str, str]:
        """What a reader of the file must know."""
        devices = self.tasks.devices
        ranks = sum(device.num_ranks for device in devices)
        return {
            "units": "ts, dur: microseconds; own_s: seconds when alone; stretch: dur over own_s; memory: bytes",
            "ranks": f"{len(devices)} processes stand for {ranks} ranks",
            "ops": self.ops,
        }

    def lines(self) -> Iterator[str]:
        """Every event."""
        yield from self._names()
        yield from self._pass_lines()
        yield from self._op_lines()
        yield from self._counter_lines()

    # Process ids, then pass threads, then streams: no two numbers are equal, for some readers key threads by tid alone.

    def _pid(self, device: int) -> int:
        return 1 + device

    def _stream_tid(self, stream: int) -> int:
        return 1 + len(self.tasks.devices) + stream

    def _lane_tid(self, device: int, lane: int) -> int:
        first = 1 + len(self.tasks.devices) + len(self.tasks.streams)
        return first + lane * len(self.tasks.devices) + device

    def _names(self) -> Iterator[str]:
        lanes = dict.fromkeys(zip(self.passes.device.tolist(), self.passes.lane.tolist(), strict=True))
        for d, device in enumerate(self.tasks.devices):
            told = f"{device.name} (stands for {device.num_ranks} ranks)" if device.num_ranks != 1 else device.name
            yield _meta("process_name", self._pid(d), None, {"name": told})
            yield _meta("process_sort_index", self._pid(d), None, {"sort_index": d})
            for lane in sorted(lane for owner, lane in lanes if owner == d):
                name = "passes" if lane == 0 else f"passes, {lane + 1} at a time"
                yield from self._thread(self._pid(d), self._lane_tid(d, lane), name, lane)
        behind = 1 + max((lane for _, lane in lanes), default=0)
        for s, stream in enumerate(self.tasks.streams):
            place = behind + s + (0 if stream.computes else len(self.tasks.streams))
            yield from self._thread(self._pid(stream.device), self._stream_tid(s), stream.name, place)

    def _thread(self, pid: int, tid: int, name: str, place: int) -> Iterator[str]:
        yield _meta("thread_name", pid, tid, {"name": name})
        yield _meta("thread_sort_index", pid, tid, {"sort_index": place})

    def _pass_lines(self) -> Iterator[str]:
        p, names = self.passes, [json.dumps(name or "step") for name in self.tasks.scopes]
        for device, scope, lane, start, end, first in zip(
            p.device.tolist(), p.scope.tolist(), p.lane.tolist(), p.start.tolist(), p.end.tolist(), p.first.tolist(),
            strict=True,
        ):  # fmt: skip
            args = _where(int(self.tasks.micro_batch[first]), int(self.tasks.chunk[first]))[:-1]
            yield (
                f'{{"ph":"X","name":{names[scope]},"cat":"pass","pid":{self._pid(device)},'
                f'"tid":{self._lane_tid(device, lane)},"ts":{_us(start)},"dur":{_us(end - start)},"args":{{{args}}}}}'
            )

    def _op_lines(self) -> Iterator[str]:
        tasks, timeline = self.tasks, self.timeline
        kinds = [category.value for category in CATEGORIES]
        places = [f'"pid":{self._pid(s.device)},"tid":{self._stream_tid(i)}' for i, s in enumerate(tasks.streams)]
        arrows = self._arrows()
        shown = self.ran[self.kept[self.ran]]
        shown = shown[np.lexsort((shown, self.end[shown], self.start[shown], tasks.stream[shown]))]
        with np.errstate(invalid="ignore", divide="ignore"):
            stretch = np.where(tasks.seconds > 0, (timeline.end - timeline.start) / tasks.seconds, 1.0)
        # Columns as lists: this loop runs half a million times, and NumPy scalars are slow to come by.
        columns = (tasks.name, tasks.category, tasks.stream, tasks.micro_batch, tasks.chunk, self.start, self.end,
                   tasks.seconds, stretch)  # fmt: skip
        for task, name, kind, stream, batch, chunk, start, end, own, slower in zip(
            shown.tolist(), *(column[shown].tolist() for column in columns), strict=True
        ):
            at, said = places[stream], self.said[name]
            yield (
                f'{{"ph":"X","name":{said},"cat":"{kinds[kind]}",{at},"ts":{start // 1000}.{start % 1000:03d},'
                f'"dur":{_us(end - start)},"args":{{{_where(batch, chunk)}"own_s":{own:.6g},"stretch":{slower:.4g}}}}}'
            )
            for phase, number in arrows.get(task, ()):
                # A nanosecond before the end, so that the next slice, which may start there, is not meant.
                when, bind = (end - 1, "") if phase == "s" else (start, ',"bp":"e"')
                yield f'{{"ph":"{phase}","name":"send","cat":"flow","id":{number},{at},"ts":{_us(when)}{bind}}}'

    def _arrows(self) -> dict[int, list[tuple[str, int]]]:
        """Per task the arrows that end at its start, then those that begin at its end, by number."""
        arrows: dict[int, list[tuple[str, int]]] = {}
        for number, (before, after) in enumerate(self.flows.tolist(), start=1):
            arrows.setdefault(before, []).append(("s", number))
            arrows.setdefault(after, []).insert(0, ("f", number))
        return arrows

    def _counter_lines(self) -> Iterator[str]:
        for d, (times, levels) in enumerate(self.curves):
            capacity = self.tasks.devices[d].capacity_bytes
            name = json.dumps("memory" + (f" of {format_bytes(capacity)}" if np.isfinite(capacity) else ""))
            for when, level in zip(times.tolist(), levels.tolist(), strict=True):
                yield (
                    f'{{"ph":"C","name":{name},"pid":{self._pid(d)},"ts":{_us(when)},"args":{{"bytes":{level:.0f}}}}}'
                )

    def _flows(self) -> np.ndarray:
        """Tasks [N, 2] that an arrow joins: a transfer, and what waited for it on another device.

        Both are at least a nanosecond long, or a viewer could not tell whom an arrow means: one to a task of no length
        (the begin of a pass whose weights are gathered first) goes on to the next of its pass on that stream.
        """
        tasks = self.tasks
        long = np.zeros(len(tasks), dtype=np.bool_)
        long[self.ran] = self.end[self.ran] > self.start[self.ran]
        heir = np.arange(len(tasks))
        order = self.ran[np.lexsort((self.ran, self.end[self.ran], self.start[self.ran], tasks.stream[self.ran]))]
        for i in np.flatnonzero(~long[order])[::-1].tolist():
            task, after = order[i], order[min(i + 1, len(order) - 1)]
            if tasks.stream[task] == tasks.stream[after] and tasks.scope[task] == tasks.scope[after]:
                heir[task] = heir[after]
        sends = ~self.computes[tasks.stream[tasks.before]] & (tasks.device[tasks.before] != tasks.device[tasks.after])
        flows = np.stack([tasks.before[sends], heir[tasks.after[sends]]], axis=1)
        return flows[long[flows].all(axis=1)]

    def _passes(self) -> _Passes:
        """Passes by device and start. A pass lasts as long as its compute, or as its traffic where it has none."""
        tasks, ran = self.tasks, self.ran
        key = tasks.device[ran] * len(tasks.scopes) + tasks.scope[ran]
        computes = self.computes[tasks.stream[ran]]
        ran, key = ran[computes | ~np.isin(key, key[computes])], key[computes | ~np.isin(key, key[computes])]
        keys, which = np.unique(key, return_inverse=True)
        start, end = np.full(len(keys), np.iinfo(np.int64).max), np.zeros(len(keys), dtype=np.int64)
        np.minimum.at(start, which, self.start[ran])
        np.maximum.at(end, which, self.end[ran])
        first = np.zeros(len(keys), dtype=np.int64)
        first[which[::-1]] = ran[::-1]
        order = np.lexsort((end, start, keys // max(len(tasks.scopes), 1)))
        device, scope = keys[order] // max(len(tasks.scopes), 1), keys[order] % max(len(tasks.scopes), 1)
        lane = _lanes(device, start[order], end[order])
        order2 = np.lexsort((np.arange(len(order)), lane, device))
        taken = order[order2]
        return _Passes(device[order2], scope[order2], lane[order2], start[taken], end[taken], first[taken])


def _counters(timeline: Timeline, max_bytes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Times [ns] and bytes of each device's memory; where they are too many, the fullest moment of each window."""
    curves = memory(timeline)
    room = max(int(COUNTER_SHARE * max_bytes / (COUNTER_BYTES + 40) / max(len(curves.times), 1)), 3)
    out = []
    for seconds, levels in zip(curves.times, curves.bytes, strict=True):
        kept = np.arange(len(seconds))
        if len(seconds) > room:
            edges = np.linspace(0, len(seconds) - 1, room).astype(np.int64)
            windows = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
            kept = np.array([*(low + int(np.argmax(levels[low:high])) for low, high in windows), edges[-1]])
        out.append((np.rint(seconds[kept] * PER_S).astype(np.int64), levels[kept]))
    return out


def _nanoseconds(timeline: Timeline, ran: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends [N] as whole nanoseconds; on a stream nothing overlaps, whatever rounding did."""
    start, end = np.zeros(len(timeline.tasks), dtype=np.int64), np.zeros(len(timeline.tasks), dtype=np.int64)
    start[ran] = np.rint(timeline.start[ran] * PER_S).astype(np.int64)
    end[ran] = np.maximum(np.rint(timeline.end[ran] * PER_S).astype(np.int64), start[ran])
    stream = timeline.tasks.stream
    order = ran[np.lexsort((ran, end[ran], start[ran], stream[ran]))]
    here, there = order[:-1], order[1:]
    over = np.where(stream[here] == stream[there], end[here] - start[there], 0)
    assert (over <= 1).all(), "a stream runs one task at a time"
    end[here] -= np.maximum(over, 0)
    return start, end


def _lanes(device: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The first lane of its device on which each slice overlaps none; slices come by device and start."""
    lane = np.zeros(len(start), dtype=np.int64)
    free: dict[int, list[int]] = {}
    for i, (d, begins, ends) in enumerate(zip(device.tolist(), start.tolist(), end.tolist(), strict=True)):
        until = free.setdefault(d, [])
        place = next((k for k, t in enumerate(until) if t <= begins), len(until))
        until[place : place + 1] = [ends]
        lane[i] = place
    return lane


@lru_cache(maxsize=1 << 16)
def _where(micro_batch: int, chunk: int) -> str:
    """The place of a task as the beginning of its args."""
    places = (("micro_batch", micro_batch), ("chunk", chunk))
    return "".join(f'"{name}":{number},' for name, number in places if number >= 0)


def _named(name: str, part: Part | None) -> str:
    """The name of an operation as JSON, with the colour of its part behind it where that is known."""
    return json.dumps(name) + ("" if part is None else f',"cname":"{TRACE_NAMES[part]}"')


def _meta(name: str, pid: int, tid: int | None, args: Mapping[str, str | int]) -> str:
    thread = "" if tid is None else f'"tid":{tid},'
    return f'{{"ph":"M","name":"{name}","pid":{pid},{thread}"args":{json.dumps(args)}}}'


def _us(nanoseconds: int) -> str:
    """Microseconds with three digits, exact.

    >>> _us(1_234_567)
    '1234.567'
    """
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"
