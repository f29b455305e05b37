"""States what one accelerator can do: peaks, memory, power, price. Knows nothing of models or of other chips."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hardware._errors import reject
from hardware.dtype import DType
from hardware.op_times import OpTimes
from hardware.site import LARGEST

__all__ = ["ChipSpec"]

_POSITIVE = ("num_sms", "hbm_bytes", "hbm_bytes_per_s", "tdp_w", "gemm_slowdown", "attention_backward",
             "step_attention")  # fmt: skip
_NOT_NEGATIVE = ("price_usd_per_hour", "failures_per_hour", "launch_s", "context_bytes", "host_bytes_per_s",
                 "host_memory_bytes", "host_memory_bytes_per_s", "kernel_s", "gemm_kernel_s", "attention_kernel_s",
                 "attention_ramp_keys", "attention_tail")  # fmt: skip
_PER_HOUR_OR_WATT = ("price_usd_per_hour", "failures_per_hour", "tdp_w")
_MOST = 1e24  # assumption, of bytes and rates: a yottabyte or a yottaflop is no chip's
_FRACTIONS = ("attention_efficiency", "hbm_efficiency")
_TABLES = ("matrix_flops_per_s", "vector_flops_per_s", "gemm_efficiency")
KERNEL_S = 2e-6  # ramp-up and drain of a kernel; assumption: a null kernel takes about 2 us on A100/H100
GEMM_RAMP_K = 128.0  # assumption: prologue and epilogue of a tile as long as 128 steps of k


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipSpec:
    """One accelerator. Peaks are dense: structured sparsity is never counted.

    Attributes:
        matrix_flops_per_s: peak of the matrix engine (tensor cores, cubes) per format.
        vector_flops_per_s: peak of the vector engine per format.
        num_sms: parallel multiprocessors, which wave quantisation counts.
        hbm_bytes: memory that the driver offers to programs, not the figure on the box.
        failures_per_hour: interruptions of a job that one chip (with its share of host and network) causes.
        launch_s: host time to launch one kernel.
        context_bytes: driver context and communicator buffers, held outside the allocator.
        gemm_efficiency: achieved / peak of large matrix products, before tile and wave losses of small ones.
        gemm_slowdown: seconds of a matrix product inside a training step / alone: clocks and power under steady load.
        attention_efficiency: causal-half FLOPs of long forward flash attention / bf16 (or fp16) matrix peak.
        attention_head_dims: what other head dims reach / what 128 does; straight lines in between, flat beyond.
        attention_ramp_keys: keys' worth of time that each row of scores pays besides its own.
        attention_tail: share of the longest tile's seconds that shows, because the others are done before it.
        attention_kernel_s: ramp-up and drain of one attention kernel on the device.
        attention_backward: seconds of its backward / what 2.5 times forward's FLOPs take at forward's rate.
        gemm_ramp_k: prologue and epilogue of an output tile, in steps of k, per format; 128 where none is given.
        gemm_kernel_s: ramp-up and drain of a matrix product on the device; kernel_s: of any other kernel.
        hbm_efficiency: achieved / peak bandwidth of long streams.
        step_gemm, step_attention: seconds of matrix products (by format, 1 where none is given) and of attention in
            published training steps / what measured operators say, over all chips alike: kernels of training beside
            those of a benchmark.
        host_bytes_per_s: achieved bandwidth between the chip and its host, one way; both ways run side by side. 0:
            unknown, which refuses offload.
        host_memory_bytes: share of the host's memory that a chip may fill; host_memory_bytes_per_s: its share of the
            bandwidth of that memory.
        sources: where each field comes from, with its date.
        assumptions: the fields that are assumed rather than published or measured, and why.
        measured: the fields that rest on measured operators of this very chip; formats as `gemm_efficiency.bf16`.
        times: measured operators by themselves, which prices look up before they work anything out.
    """

    name: str
    vendor: str
    matrix_flops_per_s: Mapping[DType, float] = field(hash=False)
    vector_flops_per_s: Mapping[DType, float] = field(hash=False)
    num_sms: int
    hbm_bytes: float
    hbm_bytes_per_s: float
    tdp_w: float
    price_usd_per_hour: float
    failures_per_hour: float
    launch_s: float
    context_bytes: float
    gemm_efficiency: Mapping[DType, float] = field(hash=False)
    attention_efficiency: float
    hbm_efficiency: float
    gemm_slowdown: float
    host_bytes_per_s: float = 0.0
    host_memory_bytes: float = 0.0
    host_memory_bytes_per_s: float = 0.0
    kernel_s: float = KERNEL_S
    gemm_kernel_s: float = KERNEL_S
    gemm_ramp_k: Mapping[DType, float] = field(default_factory=dict, hash=False)
    attention_head_dims: Mapping[int, float] = field(default_factory=dict, hash=False)
    attention_ramp_keys: float = 0.0
    attention_tail: float = 0.0
    attention_kernel_s: float = KERNEL_S
    attention_backward: float = 1.0
    step_gemm: Mapping[DType, float] = field(default_factory=dict, hash=False)
    step_attention: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    assumptions: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    times: OpTimes | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            self._check(name, getattr(self, name), low=0.0, strict=True, high=_most(name))
        for name in _NOT_NEGATIVE:
            self._check(name, getattr(self, name), low=0.0, strict=False, high=_most(name))
        for name in _FRACTIONS:
            self._check(name, getattr(self, name), low=0.0, strict=True, high=1.0)
        for name in _TABLES:
            high = 1.0 if name == "gemm_efficiency" else _MOST
            for dtype, value in getattr(self, name).items():
                self._check(f"{name}[{dtype.value}]", value, low=0.0, strict=True, high=high)
        for dtype, steps in self.gemm_ramp_k.items():
            self._check(f"gemm_ramp_k[{dtype.value}]", steps, low=0.0, strict=False, high=_MOST)
        for dtype, factor in self.step_gemm.items():
            self._check(f"step_gemm[{dtype.value}]", factor, low=0.0, strict=True, high=_MOST)
        for head_dim, share in self.attention_head_dims.items():
            achieved = share * self.attention_efficiency
            self._check(f"attention_head_dims[{head_dim}] of peak", achieved, low=0.0, strict=True, high=1.0)
        if self.context_bytes >= self.hbm_bytes:
            law = f"{self.name}: context_bytes must be below hbm_bytes ({self.hbm_bytes:g})"
            reject(law, f"{self.context_bytes:g}", "give both in bytes")
        missing = [d.value for d in self.matrix_flops_per_s if d not in self.gemm_efficiency]
        if missing:
            law = f"{self.name}: gemm_efficiency must cover every format of matrix_flops_per_s"
            reject(law, f"none for {', '.join(missing)}", "add them, as a fraction of peak")

    def _check(self, name: str, value: float, *, low: float, strict: bool, high: float) -> None:
        above = value > low if strict else value >= low
        if not (math.isfinite(value) and above and value <= high):
            bound = f"{'above' if strict else 'at least'} {low:g} and at most {high:g}"
            reject(f"{self.name}: {name} must be finite, {bound}", f"{value:g}", "use SI units and fractions")

    def peak(self, dtype: DType) -> float:
        """Dense FLOP/s of the engine that multiplies `dtype`: the matrix engine, else the vector engine.

        Raises ValueError where the chip has neither.
        """
        if dtype in self.matrix_flops_per_s:
            return self.matrix_flops_per_s[dtype]
        if dtype in self.vector_flops_per_s:
            return self.vector_flops_per_s[dtype]
        engines = sorted({d.value for d in (*self.matrix_flops_per_s, *self.vector_flops_per_s)})
        law = f"a precision must have an engine on the chip, and {self.name} has {', '.join(engines)}"
        reject(law, dtype.value, "choose a precision recipe that the chip has, or another chip")

    def ramp_k(self, dtype: DType) -> float:
        """Steps of k that an output tile pays besides its own."""
        return self.gemm_ramp_k.get(dtype, GEMM_RAMP_K)

    def gemm_overhead(self, dtype: DType) -> float:
        """Seconds of a product inside a training step over those that operators alone say."""
        return self.gemm_slowdown * self.step_gemm.get(dtype, 1.0)

    def attention_share(self, head_dim: float) -> float:
        """Causal-half FLOPs of long forward attention over the half-precision peak, at one head dim."""
        known = sorted({128: 1.0, **self.attention_head_dims}.items())
        below = max((item for item in known if item[0] <= head_dim), default=known[0])
        above = min((item for item in known if item[0] >= head_dim), default=known[-1])
        span = above[0] - below[0]
        share = below[1] + (above[1] - below[1]) * ((head_dim - below[0]) / span if span else 0.0)
        return self.attention_efficiency * share

    def offers(self, dtype: DType) -> bool:
        """Whether the matrix engine multiplies `dtype`."""
        return dtype in self.matrix_flops_per_s


def _most(name: str) -> float:
    return LARGEST if name in _PER_HOUR_OR_WATT else _MOST
