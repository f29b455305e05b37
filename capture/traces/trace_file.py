"""The file of `search trace import`: traces of a job's ranks and their pairing, all arrays bit for bit.

A zip of `header.json` and one `RANK/FIELD.npy` per array, without pickles. Refuses other files, later versions and
damage; never writes over a file that exists, and a file that exists is whole.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from capture.traces.opened import named
from capture.traces.pairing import Agreement, Pairing
from capture.traces.records import KINDS, Group, RankTrace, Topology

__all__ = ["HEADER", "TraceFile", "read_traces", "write_traces"]

FORMAT, VERSION = "trainspace.traces", 1
HEADER = "header.json"
ARRAYS = tuple(field.name for field in dataclasses.fields(RankTrace) if field.type == "np.ndarray")
FLOATS = ("start_s", "end_s", "posted_s", "nbytes", "memory_s", "memory_bytes")
PLAIN = tuple(field.name for field in dataclasses.fields(RankTrace) if field.name not in ARRAYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """What a file holds."""

    traces: tuple[RankTrace, ...]
    pairing: Pairing


def write_traces(path: str | Path, traces: Sequence[RankTrace], pairing: Pairing) -> int:
    """Writes a new file and gives its bytes. FileExistsError where there is one: it is never written over."""
    target = Path(path)
    header = {
        "format": FORMAT, "version": VERSION, "pairing": dataclasses.asdict(pairing),
        "ranks": [{name: _plain(getattr(trace, name)) for name in PLAIN} for trace in traces],
    }  # fmt: skip
    with named(str(target), "write"):
        _check_absent(target)
        number, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(number, "wb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                    archive.writestr(HEADER, json.dumps(header))
                    for index, trace in enumerate(traces):
                        for field in ARRAYS:
                            with archive.open(f"{index}/{field}.npy", "w", force_zip64=True) as member:
                                np.lib.format.write_array(member, getattr(trace, field), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            _place(name, target)
        finally:
            Path(name).unlink(missing_ok=True)
        return target.stat().st_size


def _place(temporary: str, target: Path) -> None:
    """Gives a finished file its name unless that is taken: a link, unlike a renaming, never replaces."""
    os.chmod(temporary, 0o666 & ~_umask())
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        _check_absent(target)
        os.replace(temporary, target)


def _check_absent(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _plain(value: Any) -> Any:  # noqa: ANN401 - any field of a RankTrace
    if isinstance(value, Topology):
        return value.value
    if isinstance(value, tuple) and value and isinstance(value[0], Group):
        return [dataclasses.asdict(group) for group in value]
    return value


def read_traces(path: str | Path) -> TraceFile:
    """What `write_traces` wrote."""
    source = str(path)
    with named(source):
        try:
            archive = zipfile.ZipFile(source)
            header = json.loads(archive.read(HEADER))
            version = header["version"] if header["format"] == FORMAT else None
        except (zipfile.BadZipFile, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{source}: must be a file of `search trace import -o`, but is none; import it") from error
        if version != VERSION:
            raise ValueError(
                f"{source}: must be {FORMAT} of version {VERSION}, but is of {version}; import the traces again"
            )
        try:
            with archive:
                traces = tuple(_trace(archive, index, plain) for index, plain in enumerate(header["ranks"]))
            return TraceFile(traces=traces, pairing=_pairing(header["pairing"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source}: must be whole, but {error}; import the traces again") from error


def _pairing(told: dict[str, Any]) -> Pairing:
    agreements = tuple(Agreement(**found) for found in told["agreements"])
    lists = {name: tuple(told[name]) for name in ("missing", "notices")}
    return Pairing(**{**told, **lists, "agreements": agreements})


def _trace(archive: zipfile.ZipFile, index: int, plain: dict[str, Any]) -> RankTrace:
    fields: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in plain.items()}
    fields["topology"] = Topology(fields["topology"])
    fields["groups"] = tuple(
        Group(name=group["name"], size=group["size"], ranks=tuple(group["ranks"])) for group in fields["groups"]
    )
    for name in ARRAYS:
        with archive.open(f"{index}/{name}.npy") as member:
            fields[name] = np.lib.format.read_array(member, allow_pickle=False)
    trace = RankTrace(**fields)
    _check_rows(trace)
    return trace


def _check_rows(trace: RankTrace) -> None:
    """ValueError where arrays are of other lengths or types than were written, or point outside their tables."""
    num, sizes = len(trace), {"memory_bytes": len(trace.memory_s), "memory_s": len(trace.memory_s)}
    sizes |= {"before": len(trace.before), "after": len(trace.before)}
    tables = {"before": num, "after": num, "kind": len(KINDS), "stream": len(trace.streams), "name": len(trace.names),
              "group": len(trace.groups), "transaction": len(trace.transactions),
              "tensor": len(trace.tensors)}  # fmt: skip
    for name in ARRAYS:
        array = getattr(trace, name)
        least = 0 if name in ("kind", "stream", "name", "before", "after") else -1
        if array.shape != (sizes.get(name, num),) or array.dtype.kind != ("f" if name in FLOATS else "i"):
            raise ValueError(f"{name} of rank {trace.rank} is of another shape or type")
        if name in tables and len(array) and not least <= array.min() <= array.max() < tables[name]:
            raise ValueError(f"{name} of rank {trace.rank} points outside its table")
