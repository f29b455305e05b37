"""Writes small traces as PyTorch's profiler does, for tests to break."""

from __future__ import annotations

import itertools
import json

INFO = {"backend": "nccl", "rank": 0, "world_size": 2,
        "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]}  # fmt: skip


def span(name, cat, ts, dur, tid=1, pid=10, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launched(kernel, at, start, dur, correlation, stream=7, tid=1, call="cudaLaunchKernel", cat="cuda_runtime", **args):
    """A call at `at` of 5 us, and the kernel that it launches."""
    return [
        span(call, cat, at, 5, tid=tid, correlation=correlation),
        span(kernel, "kernel", start, dur, pid=0, tid=stream, device=0, stream=stream, correlation=correlation, **args),
    ]


def all_reduce(at, start, dur, correlation, kernel="ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", **more):
    told = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2,
            "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}  # fmt: skip
    return launched(kernel, at, start, dur, correlation, stream=20, **{**told, **more})


def step(at=0.0, first=1):
    """A step of 1000 us from `at`: one operation that launches a kernel and a collective."""
    return [
        span(f"ProfilerStep#{first}", "user_annotation", at, 1000),
        span("aten::mm", "cpu_op", at + 10, 100),
        span("aten::inner", "cpu_op", at + 20, 50),
        *launched("gemm", at + 30, at + 40, 100, 10 * first + 1),
        *all_reduce(at + 60, at + 150, 300, 10 * first + 2),
    ]


def document(events, info=INFO, **header):
    return {"schemaVersion": 1, "distributedInfo": info, "baseTimeNanoseconds": 10**18, **header, "traceEvents": events}


def write(path, events, info=INFO, **header):
    path.write_text(json.dumps(document(list(events), info, **header)), encoding="utf-8")
    return path


def numbered(steps):
    return list(itertools.chain.from_iterable(step(1000.0 * index, index + 1) for index in range(steps)))
