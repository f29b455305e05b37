"""The one door to numba: `njit`, with compiled code cached on disk under a name that changes with the sources.

Numba renews a cached function when its own file changes, but not when a function that it calls changes in another file;
old code would then run with new data. So the cache folder is named after the content of every module that is compiled.
It lies beside the sources, or in the user's cache folder where those cannot be written.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba
from numba import njit

__all__ = ["cache_folder", "njit"]

ROOMS = ("estimator", "search")  # packages with compiled modules


def cache_folder(root: Path, chosen: str = "") -> Path:
    """Where compiled code of the packages below `root` belongs; `chosen` is the user's own NUMBA_CACHE_DIR."""
    digest = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        text = path.read_bytes()
        if b"njit" in text:
            digest.update(str(path.relative_to(root)).encode() + b"\0" + text)
    name = f"numba-{digest.hexdigest()[:16]}"
    beside = root / ROOMS[0] / "__pycache__"
    if chosen:
        return Path(chosen) / name
    if os.access(beside if beside.is_dir() else beside.parent, os.W_OK):
        return beside / name
    return Path.home() / ".cache" / "trainspace" / name


numba.config.CACHE_DIR = str(cache_folder(Path(__file__).resolve().parents[1], numba.config.CACHE_DIR))
