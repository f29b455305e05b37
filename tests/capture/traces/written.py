"""Writes small traces in this package's own format, for tests to break."""

from __future__ import annotations

import json

NS = 1_000_000_000
EPOCH = 1_796_000_000 * NS


def header(rank=0, world=2, **meta):
    return {"format": "trainspace.trace", "version": 1, "meta": {"rank": rank, "world": world, **meta}}


def event(name, cat, start_ms, end_ms, **more):
    return {"name": name, "cat": cat, "ts": EPOCH + round(start_ms * 1e6), "end": EPOCH + round(end_ms * 1e6), **more}


def step(later_ms=0.0, it=0):
    """Forward, backward, one bucket reduced, an update: 10 ms, `later_ms` after the epoch."""
    at = later_ms + 10 * it
    return [
        event("FW", "FW", at, at + 2, it=it),
        event("BW.w", "BW", at + 2, at + 4, it=it, tensor="w", bytes=4096),
        event("AR", "COMM", at + 5, at + 8, it=it, bucket=0, bytes=4096, enq=EPOCH + round((at + 4) * 1e6)),
        event("UPD", "UPD", at + 9, at + 10, it=it),
    ]


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
