"""Opens what a user names: plain files, gzip, and each file of a tar or zip, as streams of bytes. Knows no format.

Refuses a file that is empty, cut short or damaged, in one line that names it.
"""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

__all__ = ["Opened", "named", "opened"]

GZIP, ZIP = b"\x1f\x8b", b"PK\x03\x04"
USTAR_AT = 257  # of a tar header: where "ustar" stands
BLOCK = 1 << 20  # read at a time, and what a look at the head of a file may see
PIECE = 1 << 15
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile)
LOCKED = 1  # flag of a zip's member that needs a password


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """One file to read. `source`: for messages, FILE or FILE:MEMBER. `folder`: name of the folder that holds it."""

    source: str
    folder: str
    stream: io.BufferedReader[Any]


class _UntilDamage(io.RawIOBase):
    """A stream that gives what stands before damage, and tells of the damage at the next read.

    Readers of archives drop what they have unpacked of a piece when its rest is damaged: pieces are small.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: Exception | None = None

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """As what it reads."""
        return self.file.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """As what it reads."""
        return self.file.seek(offset, whence)

    def readinto(self, into: Any) -> int:  # noqa: ANN401 - any writable buffer
        """Bytes until `into` is full or the file ends."""
        if self.error is not None:
            raise self.error
        view, at = memoryview(into), 0
        read = getattr(self.file, "read1", self.file.read)
        try:
            while at < len(view) and (piece := read(min(PIECE, len(view) - at))):
                view[at : at + len(piece)] = piece
                at += len(piece)
        except (*DAMAGE, OSError) as error:
            if at == 0:
                raise
            self.error = error
        return at

    def close(self) -> None:
        """Closes what it reads."""
        self.file.close()
        super().close()


@contextmanager
def named(source: str, action: str = "read") -> Iterator[None]:
    """Turns what a damaged archive or the operating system says into a ValueError that names the file.

    A file that exists where a new one was to be made is the caller's to tell.
    """
    try:
        yield
    except DAMAGE as error:
        raise ValueError(f"{source}: must be whole, but is cut short or damaged ({error}); copy it again") from error
    except FileExistsError:
        raise
    except OSError as error:
        raise ValueError(f"{source}: cannot {action}: {error.strerror or error}; give another file") from error


def opened(path: str | Path) -> Generator[Opened, None, None]:
    """Every file in a path: the file itself, or those in its archive. Each is read before the next is opened."""
    source = str(path)
    with named(source), open(path, "rb", BLOCK) as file:
        if not Path(path).stat().st_size:
            raise ValueError(f"{source}: must hold a trace, but is empty; record again")
        yield from _within(file, source, Path(source).resolve().parent.name)


def _within(file: Any, source: str, folder: str) -> Iterator[Opened]:  # noqa: ANN401 - any binary file
    """What a stream holds, archives in archives included."""
    with io.BufferedReader(_UntilDamage(file), BLOCK) as stream:
        with named(source):  # of a member: the archive alone would not tell which is cut short
            head = stream.peek(USTAR_AT + 5)
        if head.startswith(GZIP):
            with gzip.GzipFile(fileobj=stream, mode="rb") as unpacked:
                yield from _within(unpacked, source, folder)
        elif head.startswith(ZIP):
            with zipfile.ZipFile(stream if stream.seekable() else io.BytesIO(stream.read())) as members:
                for info in members.infolist():
                    if not info.is_dir():
                        yield from _member(_unlocked(members, info, source), source, info.filename)
        elif head[USTAR_AT : USTAR_AT + 5] == b"ustar":
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    if (content := archive.extractfile(member)) is not None:
                        yield from _member(content, source, member.name)
        else:
            yield Opened(source=source, folder=folder, stream=stream)


def _unlocked(members: zipfile.ZipFile, info: zipfile.ZipInfo, source: str) -> IO[bytes]:
    if info.flag_bits & LOCKED:
        raise ValueError(f"{source}:{info.filename}: must be readable, but needs a password; unpack it first")
    try:
        return members.open(info)
    except NotImplementedError as error:  # a compression of the future
        raise ValueError(f"{source}:{info.filename}: must be unpackable, but {error}; unpack it first") from error


def _member(file: IO[bytes], source: str, name: str) -> Iterator[Opened]:
    yield from _within(file, f"{source}:{name}", Path(name).parent.name)
