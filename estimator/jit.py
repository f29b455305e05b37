"""The one door to numba: `njit` and `kernel`; compiled code is cached on disk under a name that the sources change.

Numba renews a cached function when its own file changes, but not when a function or a constant that it uses changes in
another file; old code would then run with new data. So the cache folder is named after the content of every module that
is compiled and of those that it imports from. It lies beside the sources, or in the user's cache folder where those
cannot be written.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import numba

__all__ = ["cache_folder", "kernel", "njit"]

ROOMS = ("estimator", "search")  # packages with compiled modules
IMPORTED = re.compile(rb"^from ((?:estimator|search)\.[\w.]+) import", re.MULTILINE)


def njit(**options: Any) -> Any:  # noqa: ANN401 - numba's types
    """numba.njit for functions that make arrays, whoever calls them: a callee inherits what its caller counts."""
    return numba.njit(_nrt=True, **options)  # type: ignore[call-overload]  # an option of its target


def kernel(function: Any) -> Any:  # noqa: ANN401 - numba's types
    """`njit` for functions that make no arrays and return none: they borrow their caller's, nothing counts references.

    Small functions get ten times faster so, for LLVM can put them into their callers. Numba refuses to compile one that
    makes an array; one that returned a view would let it go too early, so it must be `njit`.
    """
    return numba.njit(cache=True, _nrt=False)(function)  # type: ignore[call-overload]


def cache_folder(root: Path, chosen: str = "") -> Path:
    """Where compiled code of the packages below `root` belongs; `chosen` is the user's own NUMBA_CACHE_DIR."""
    digest = hashlib.sha256()
    for path, text in sorted(_sources(root).items()):
        digest.update(path.encode() + b"\0" + text)
    name = f"numba-{digest.hexdigest()[:16]}"
    beside = root / ROOMS[0] / "__pycache__"
    if chosen:
        return Path(chosen) / name
    if os.access(beside if beside.is_dir() else beside.parent, os.W_OK):
        return beside / name
    return Path.home() / ".cache" / "trainspace" / name


def _sources(root: Path) -> dict[str, bytes]:
    """Text of the compiled modules and of what they import from the same packages, by path."""
    texts = {
        str(path.relative_to(root).with_suffix("")): path.read_bytes()
        for room in ROOMS
        for path in (root / room).rglob("*.py")
    }
    found: dict[str, bytes] = {}
    left = [name for name, text in texts.items() if b"njit" in text]
    while left:
        name = left.pop()
        if name in texts and name not in found:
            found[name] = texts[name]
            left += [module.decode().replace(".", "/") for module in IMPORTED.findall(texts[name])]
    return found


numba.config.CACHE_DIR = str(  # type: ignore[attr-defined]  # numba sets its options from a table
    cache_folder(Path(__file__).resolve().parents[1], numba.config.CACHE_DIR)  # type: ignore[attr-defined]
)
