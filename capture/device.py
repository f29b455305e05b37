"""The device that operators are measured on: what it is called, how much memory it has, how its seconds are told.

Opens torch, which comes with an extra: without it a ValueError says what to install. Measures nothing itself.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from capture.installed import require_installed
from hardware.catalog import chip, chip_names

if TYPE_CHECKING:
    import torch

__all__ = ["KINDS", "Device", "clock", "open_device", "torch_dtype"]

KINDS = ("auto", "cpu", "cuda")
SAME_MEMORY = 0.1  # memory of the catalogue's chip and of the device differ by less: drivers keep a little back
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one rank trains on.

    Attributes:
        kind: `cpu` or `cuda`.
        name: as files and systems call it: the catalogue's name of the chip, else one made from its maker's.
        hardware: what its maker calls it.
        in_catalog: whether `name` is a chip of the catalogue.
        ranks: processes that train together on this machine, a device each.
        threads: of one rank on a CPU.
        num_sms: multiprocessors; 1 for a CPU, whose libraries cut products to fit its cores, so that no wave waits.
        memory_bytes: of one rank.
        framework, version: what computes.
    """

    kind: str
    name: str
    hardware: str
    in_catalog: bool
    ranks: int
    threads: int
    num_sms: int
    memory_bytes: float
    framework: str
    version: str

    def plain(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return asdict(self)

    def told(self) -> str:
        """One line for people."""
        shared = f", {self.ranks} ranks" if self.ranks > 1 else ""
        threads = f", {self.threads} threads a rank" if self.kind == "cpu" else ""
        return f"{self.hardware} ({self.name}{threads}{shared}), {self.framework} {self.version}"


def open_device(wanted: str, ranks: int | None) -> Device:
    """The device of this machine. `wanted`: auto takes CUDA where there is some. ValueError where it is not there.

    `ranks`: one for each GPU, or one on a CPU, where it is None.
    """
    require_installed("search measure", "torch")
    import torch

    if wanted not in KINDS:
        raise ValueError(f"--device must be one of {', '.join(KINDS)}, but got {wanted!r}; give one of these")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda needs a GPU that torch {torch.__version__} can use; there is none: give cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return _cpu(ranks or 1)
    return _cuda(ranks or torch.cuda.device_count())


def _cpu(ranks: int) -> Device:
    import torch

    threads = torch.get_num_threads()
    if ranks > threads:
        raise ValueError(f"--ranks must be at most the {threads} cores of this machine, but got {ranks}; give fewer")
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Device(
        kind="cpu", name="cpu", hardware=_cpu_name(), in_catalog=False, ranks=ranks, threads=threads // ranks,
        num_sms=1, memory_bytes=memory / ranks, framework="torch", version=torch.__version__,
    )  # fmt: skip


def _cpu_name() -> str:
    """What Linux says of the processor, else what Python does."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            found = re.search(r"^model name\s*:\s*(.+)$", file.read(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return found.group(1).strip()
    import platform

    return platform.processor() or platform.machine() or "unknown processor"


def _cuda(ranks: int) -> Device:
    import torch

    if ranks > torch.cuda.device_count():
        have = torch.cuda.device_count()
        raise ValueError(f"--ranks must be at most the {have} GPUs of this machine, but got {ranks}; give fewer")
    about = torch.cuda.get_device_properties(0)
    known = catalog_name(about.name, float(about.total_memory))
    return Device(
        kind="cuda", name=known or re.sub(r"[^a-z0-9]+", "-", about.name.lower()).strip("-"), hardware=about.name,
        in_catalog=known is not None, ranks=ranks, threads=1, num_sms=about.multi_processor_count,
        memory_bytes=float(about.total_memory), framework="torch", version=torch.__version__,
    )  # fmt: skip


def catalog_name(hardware: str, memory_bytes: float) -> str | None:
    """The catalogue's chip of that maker's name and memory; None where it has none.

    >>> catalog_name("NVIDIA H100 80GB HBM3", 85e9)
    'h100-80g-sxm'
    >>> catalog_name("NVIDIA GeForce RTX 4090", 25e9)
    """
    words = re.split(r"[^a-z0-9]+", hardware.lower())
    for name in chip_names():
        model, is_card = name.partition("-")[0], name.endswith("pcie")
        close = abs(chip(name).hbm_bytes / memory_bytes - 1.0) < SAME_MEMORY
        if model in words and is_card == ("pcie" in words) and close:
            return name
    return None


def torch_dtype(name: str) -> torch.dtype:
    """Torch's own of a format. ValueError for one that this does not measure."""
    import torch

    if name not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, but got {name!r}; give one of these")
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def clock(kind: str) -> Callable[[Callable[[], object], int], float]:
    """A function that gives the seconds of so many calls in a row: on the device itself where that has a clock."""
    if kind == "cpu":
        return _by_the_host

    import torch

    def by_events(run: Callable[[], object], calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3  # CUDA tells milliseconds

    return by_events


def _by_the_host(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start
