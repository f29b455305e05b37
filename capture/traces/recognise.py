"""Which importer reads a file, by what is in it and never by its name; and the ranks of all files that a user names.

Refuses what no importer knows. Checks nothing between ranks (pairing.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from capture.traces.byteps import looks_like_byteps, read_byteps
from capture.traces.chakra import read_chakra, read_chakra_json, starts_as_chakra
from capture.traces.execution_trace import read_execution_trace
from capture.traces.horovod import looks_like_horovod, read_horovod
from capture.traces.jsonl import read_jsonl
from capture.traces.kineto import read_kineto
from capture.traces.opened import Opened, named, opened
from capture.traces.records import RankTrace
from capture.traces.trace_file import HEADER

__all__ = ["looks_like_trace", "read_all"]

KNOWN = "PyTorch's profiler or execution trace, Chakra, Horovod, BytePS, JSON lines of this package"

Importer = Callable[[Opened], RankTrace]


def read_all(paths: Sequence[str | Path]) -> list[RankTrace]:
    """The trace of every rank in the files, in order of rank."""
    traces = []
    for path in paths:
        with closing(opened(path)) as files:
            traces += [_read(file) for file in files]
    if not traces:
        raise ValueError(f"{paths[0]}: must hold a trace, but holds no file; pack one into it")
    return sorted(traces, key=lambda trace: trace.rank)


def _read(file: Opened) -> RankTrace:
    """The trace in a file. What nests a thousand deep no recorder wrote, and no reader follows."""
    try:
        return importer(file.source, _head(file))(file)
    except RecursionError as error:
        raise ValueError(f"{file.source}: must nest as traces do, but nests too deep to read; record again") from error


def _head(file: Opened) -> bytes:
    with named(file.source):
        return file.stream.peek(1)


def looks_like_trace(head: bytes) -> bool:
    """Whether an importer reads what starts with these bytes."""
    try:
        importer("", head)
    except ValueError:
        return False
    return True


def importer(source: str, head: bytes) -> Importer:
    """What reads a file that starts with these bytes."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not text:
        raise ValueError(f"{source}: must hold a trace, but is empty; record again")
    if source.endswith(f":{HEADER}") and b'"trainspace.traces"' in text:
        raise ValueError(
            f"{source.removesuffix(HEADER)[:-1]}: must be a recorder's, but is imported already; see it with "
            "`search trace show`"
        )
    if re.match(rb'\{\s*"(meta|format)"\s*:', text):
        return read_jsonl
    if b'"workload_graph"' in text:
        return read_chakra_json
    if re.match(rb'\{\s*"schema"\s*:', text) and b'"nodes"' in text:
        return read_execution_trace
    if not text.startswith((b"{", b"[")) and starts_as_chakra(head):
        return read_chakra
    if looks_like_horovod(text):
        return read_horovod
    if looks_like_byteps(text):
        return read_byteps
    if b'"traceEvents"' in text or re.match(rb"\[\s*\{", text):
        return read_kineto
    raise ValueError(
        f"{source}: must be a trace of a known kind ({KNOWN}), but starts with {text[:40]!r}; give one of these, "
        "packed as gzip, tar or zip if at all"
    )
