"""Streams a file in Chrome's trace event format, a few megabytes at a time. Knows JSON, not what events mean.

The array of events may stand alone or under `traceEvents` with other keys before and after it. It is cut where one
event ends and another begins: what stands before a cut is decoded as a whole, so that a cut in the middle of a text or
of a nested object cannot pass for one. Refuses what is no JSON, by the last event that could be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from capture.traces.opened import Opened, named

__all__ = ["EVENTS", "ChromeEvents", "Microseconds"]

EVENTS = "traceEvents"
BLOCK = 8 << 20
CUTS = 8  # places tried before more is read
ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
BETWEEN = re.compile(rb"\s*,\s*(?=\{)")
ENDED = re.compile(rb"\}" + BETWEEN.pattern)  # a search for blanks alone is quadratic in their number

Event = TypeVar("Event")
Microseconds = Annotated[float, msgspec.Meta(ge=-1e17, le=1e17)]
"""A time or a duration: until the year 5138."""


class ChromeEvents(Generic[Event]):
    """Iterates over lists of events; `header` holds the other keys once all are read.

    `name_of`: of an event, for messages. `unfinished`: whether a bare array may lack its end, as a job that was killed
    leaves it.
    """

    def __init__(self, file: Opened, event: type[Event], *, unfinished: bool = False) -> None:
        self.file, self.unfinished = file, unfinished
        self.header: dict[str, Any] = {}
        self.decoder = msgspec.json.Decoder(list[event])  # type: ignore[valid-type]
        self.raw = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self.count, self.last = 0, ""

    def __iter__(self) -> Iterator[list[Event]]:
        buffer, bare = self._start()
        block, whole = BLOCK, False
        while not whole:
            more = self._read(block, buffer)
            whole = not more
            buffer += more
            if not whole:
                events, buffer = self._cut(buffer)
                block = BLOCK if events else min(2 * block, 1 << 30)
                if events:
                    yield self._told(events)
        yield self._told(self._rest(buffer, bare))

    def _told(self, events: list[Event]) -> list[Event]:
        self.count += len(events)
        self.last = getattr(events[-1], "name", "") if events else self.last
        return events

    def _start(self) -> tuple[bytes, bool]:
        """What follows the opening bracket of the array, and whether the array stands alone."""
        buffer = self._read(BLOCK).lstrip(b"\xef\xbb\xbf \t\r\n")
        if buffer.startswith(b"["):
            return buffer[1:], True
        at = 0
        while True:
            match = ARRAY.search(buffer, at)
            if match is None:
                at = max(0, len(buffer) - len(EVENTS) - 16)
                more = self._read(BLOCK)
                if not more:
                    raise ValueError(
                        f"{self.file.source}: must hold an array {EVENTS!r}, but holds no whole one; copy it again"
                    )
                buffer += more
            elif self._is_header(buffer[: match.end()] + b"]}"):
                return buffer[match.end() :], False
            else:
                at = match.end()  # the words stand within a text or deeper down

    def _read(self, size: int, buffer: bytes | None = None) -> bytes:
        """So many bytes, fewer at the end; where the file is damaged, the last event before that is told.

        `buffer`: events that are not decoded yet, None before the array of events.
        """
        pieces: list[bytes] = []
        try:
            with named(self.file.source):
                while size > 0 and (piece := self.file.stream.read1(size)):
                    pieces.append(piece)
                    size -= len(piece)
        except ValueError as error:
            text = b"".join(pieces)
            if buffer is None:
                match = ARRAY.search(text)
                text = text.lstrip()[1:] if match is None else text[match.end() :]
            count, last = self._last((buffer or b"") + text)
            raise ValueError(f"{error}; the last whole event is number {count}, {last!r}") from error
        return b"".join(pieces)

    def _is_header(self, text: bytes) -> bool:
        try:
            header: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError:
            return False
        self.header.update({key: value for key, value in header.items() if key != EVENTS})
        return True

    def _cut(self, buffer: bytes) -> tuple[list[Event], bytes]:
        """The events before the last cut that holds, and the rest; none and everything where no cut does."""
        end, tries = len(buffer), 0
        while tries < CUTS and (end := buffer.rfind(b"}", 0, end)) >= 0:
            if (match := BETWEEN.match(buffer, end + 1)) is not None:
                tries += 1
                try:
                    return self.decoder.decode(b"[" + buffer[: end + 1] + b"]"), buffer[match.end() :]
                except msgspec.ValidationError as error:
                    raise ValueError(f"{self._where(buffer)} {error}; record again") from error
                except msgspec.DecodeError:
                    continue
        return [], buffer

    def _rest(self, buffer: bytes, bare: bool) -> list[Event]:
        try:
            if bare:
                return self.decoder.decode(b"[" + self._ended(buffer))
            document = self.raw.decode(b'{"traceEvents":[' + buffer)
            events = self.decoder.decode(document.pop(EVENTS))
            self.header.update({key: msgspec.json.decode(value) for key, value in document.items()})
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self._where(buffer)} {error}; copy it again or record again") from error
        return events

    def _ended(self, buffer: bytes) -> bytes:
        text = buffer.rstrip()
        return text.rstrip(b",") + b"]" if self.unfinished and not text.endswith(b"]") else text

    def _where(self, buffer: bytes) -> str:
        count, last = self._last(buffer)
        return f"{self.file.source}: must be whole JSON, but after event {count} ({last!r}):"

    def _last(self, buffer: bytes) -> tuple[int, str]:
        """Number and name of the last event that can be read, by bisection over the cuts of what was read."""
        cuts = [match.start() + 1 for match in ENDED.finditer(buffer)]
        low, high, count, last = 0, len(cuts), self.count, self.last
        while low < high:
            middle = (low + high) // 2
            try:
                events = self.decoder.decode(b"[" + buffer[: cuts[middle]] + b"]")
            except msgspec.MsgspecError:
                high = middle
            else:
                low = middle + 1
                count, last = self.count + len(events), getattr(events[-1], "name", "")
        return count, last
