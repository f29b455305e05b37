"""Cases of `search bench` about measured traces: how long an import takes, and how much memory.

The trace is written here, in the form of PyTorch's profiler: nested operations of a thread that launches kernels,
copies and collectives, each with the arrow from its call, the arguments and the spacing that the profiler writes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["imported", "import_100mb_s", "peak_rss_bytes", "write_profile"]

NUM_BYTES = 100_000_000
RANKS = [0, 1]
STEP_OPS = 500
"""Operations of a step; each launches a kernel, each tenth copies and each fiftieth reduces besides."""


def _event(name: str, cat: str, ts: float, dur: float, tid: int, **args: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"ph": "X", "cat": cat, "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": dur, "args": args}


def _launched(kernel: str, cat: str, at: float, number: int, stream: int, **args: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """A call, what it launches 10 us later, and the arrow between them."""
    told = {"External id": number, "device": 0, "context": 1, "stream": stream, "correlation": number, **args}
    arrow = {"id": number, "cat": "ac2g", "name": "ac2g"}
    return [
        _event("cudaLaunchKernel", "cuda_runtime", at, 4.0, 1, **{"External id": number}, cbid=211, correlation=number),
        {**_event(kernel, cat, at + 10, 20.0, stream, **told), "pid": 0},
        {"ph": "s", "pid": 10, "tid": 1, "ts": at, **arrow},
        {"ph": "f", "pid": 0, "tid": stream, "ts": at + 10, "bp": "e", **arrow},
    ]


def _step(index: int, number: int) -> Iterator[dict[str, Any]]:
    """One step of 50 ms from `index` on; `number` counts launches."""
    start = 50_000.0 * index
    yield _event(f"ProfilerStep#{index}", "user_annotation", start, 49_000.0, 1)
    shape = {"grid": [512, 1, 1], "block": [512, 1, 1], "registers per thread": 40, "shared memory": 16384,
             "blocks per SM": 4.74, "warps per SM": 75.85, "est. achieved occupancy %": 75}  # fmt: skip
    told = {"Collective name": "allreduce", "In msg nelems": 6637568, "Out msg nelems": 6637568, "Group size": 2,
            "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": str(RANKS)}  # fmt: skip
    for op in range(STEP_OPS):
        at, dims = start + 90.0 * op + 10.0, {"Input Dims": [[4096, 4096], [4096, 1024]], "Input type": ["float"] * 2}
        yield _event("aten::linear", "cpu_op", at, 80.0, 1, **dims, **{"Ev Idx": 2 * op})
        yield _event("aten::addmm", "cpu_op", at + 5, 70.0, 1, **dims, **{"Ev Idx": 2 * op + 1})
        number += 1
        yield from _launched(
            f"void gemm_{op % 7}<float, 128>(float const*, float*)", "kernel", at + 10, number, 7, **shape
        )
        if op % 10 == 0:
            number += 1
            yield from _launched("Memcpy DtoD (Device -> Device)", "gpu_memcpy", at + 30, number, 7, bytes=4000)
        if op % 50 == 0:
            number += 1
            kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            yield from _launched(kernel, "kernel", at + 50, number, 20, **shape, **told)


def write_profile(path: Path, num_bytes: int) -> None:
    """A trace of so many bytes or more, of whole steps, one at least."""
    info = {"backend": "nccl", "rank": 0, "world_size": len(RANKS),
            "pg_config": [{"pg_name": "0", "pg_size": len(RANKS), "ranks": RANKS}]}  # fmt: skip
    header = json.dumps({"schemaVersion": 1, "distributedInfo": info, "baseTimeNanoseconds": 10**18})
    with path.open("w", encoding="utf-8") as file:
        written = file.write(header[:-1] + ', "traceEvents": [\n')
        index = 0
        while not index or written < num_bytes:
            events = [json.dumps(event, indent=2) for event in _step(index, 2 * STEP_OPS * index)]
            written += file.write((",\n" if index else "") + ",\n".join(events))
            index += 1
        file.write("\n]}\n")


def imported(path: str, out: str) -> None:
    """Reads and checks a trace and writes the file of it, as `search trace import` does."""
    from capture.traces.pairing import pair
    from capture.traces.recognise import read_all
    from capture.traces.trace_file import write_traces

    traces = read_all([path])
    write_traces(out, traces, pair(traces))


def import_100mb_s() -> float:
    """A profiler's trace of 100 MB from file to file, modules loaded."""
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder, "small.json"), Path(folder, "large.json")
        write_profile(small, 1)
        imported(str(small), str(Path(folder, "small.dfg")))
        write_profile(large, NUM_BYTES)
        start = time.perf_counter()
        imported(str(large), str(Path(folder, "large.dfg")))
        return time.perf_counter() - start


def peak_rss_bytes(num_bytes: int = NUM_BYTES) -> float:
    """Of a process that imports such a trace."""
    code = (
        "import sys\nfrom search.bench_traces import imported\nimported(*sys.argv[1:])\n"
        "(line,) = (line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(int(line.split()[1]) * 1024)"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "trace.json"))
        write_profile(Path(path), num_bytes)
        command = [sys.executable, "-c", code, path, str(Path(folder, "trace.dfg"))]
        done = subprocess.run(command, text=True, capture_output=True, check=True)
    return float(done.stdout.split()[-1])
