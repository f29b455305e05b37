"""t_sync(s, k): seconds to synchronise a bucket of s bytes in k parts, by partial replay of its communication alone.

A replay of one bucket is piecewise linear in its bytes, and linear where all its transfers take latency + bytes / rate:
two replays for a number of parts give the line, a third holds it to that, and where it is none every size is replayed
(dPRO, arXiv:2205.02473, sections 4.3 and 5.3).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from capture.traces.records import Topology
from capture.traces.synthesise import Wire, sync_alone_s

__all__ = ["PARTS", "Sync"]

PARTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of parts that are tried."""
SIZES = (1e6, 6.4e7, 1.7e7)  # two that give the line, and one that tests it
STRAIGHT = 1e-9
CUT = (Topology.TREE, Topology.PARAMETER_SERVER)  # a ring has a chunk per worker, whatever the parts


class Sync:
    """Remembers what was replayed."""

    def __init__(self, workers: int, wire: Wire) -> None:
        self.workers, self.wire = workers, wire
        self.replays = 0
        self._lines: dict[int, tuple[float, float] | None] = {}
        self._sizes: dict[tuple[float, int], float] = {}
        self.parts = PARTS if wire.topology in CUT else PARTS[:1]

    def seconds(self, nbytes: np.ndarray, parts: np.ndarray) -> np.ndarray:
        """Of each bucket."""
        out = np.empty(len(nbytes))
        for k in np.unique(parts).tolist():
            mine = parts == k
            line = self._line(int(k))
            if line is None:
                out[mine] = [self._replayed(float(s), int(k)) for s in nbytes[mine]]
            else:
                out[mine] = line[0] + line[1] * nbytes[mine]
        return out

    def best_parts(self, nbytes: np.ndarray) -> np.ndarray:
        """k* of each bucket: by grid search, the fewest where several are as fast."""
        if len(self.parts) == 1:
            return np.ones(len(nbytes), np.int64)
        found = np.stack([self.seconds(nbytes, np.full(len(nbytes), k)) for k in self.parts])
        return np.array(self.parts)[np.argmin(found, axis=0)]

    def parts_of(self, nbytes: np.ndarray, part_bytes: float | None) -> np.ndarray:
        """How many parts each bucket has; None: the best number."""
        if part_bytes is None:
            return self.best_parts(nbytes)
        if self.wire.topology not in CUT:
            return np.ones(len(nbytes), np.int64)
        return np.maximum(np.ceil(nbytes / part_bytes), 1).astype(np.int64)

    def _line(self, parts: int) -> tuple[float, float] | None:
        if parts not in self._lines:
            low, high, middle = (self._replayed(s, parts) for s in SIZES)
            slope = (high - low) / (SIZES[1] - SIZES[0])
            line = low - slope * SIZES[0], slope
            straight = abs(line[0] + slope * SIZES[2] - middle) <= STRAIGHT * middle
            self._lines[parts] = line if straight else None
        return self._lines[parts]

    def _replayed(self, nbytes: float, parts: int) -> float:
        key = nbytes, parts
        if key not in self._sizes:
            self.replays += 1
            # Half a byte more than a part needs, so that rounding makes no part too many.
            wire = replace(self.wire, part_bytes=nbytes / parts * (1.0 + 1e-12))
            self._sizes[key] = sync_alone_s(self.workers, nbytes, wire)
        return self._sizes[key]
