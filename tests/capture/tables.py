"""Tables of operators as a device of known parameters would give them."""

from __future__ import annotations

import csv
import gzip
import io

import numpy as np

from capture.fit_attention import attention_seconds
from capture.fit_products import product_seconds
from capture.fits import Chip
from estimator.cost.curves import tile_seconds
from hardware.units import US

CHIP = Chip(name="h100-80g-sxm", num_sms=132, flops_per_s={"bf16": 989.4e12, "fp8": 1978.8e12}, hbm_bytes_per_s=3350e9)
PRODUCTS = {"efficiency": 0.8, "ramp_k": 200.0, "slowdown": 0.2, "kernel_s": 4e-6, "hbm": 0.9}
ATTENTION = {"ramp_keys": 300.0, "tail": 0.5, "kernel_s": 12e-6, 64: 0.45, 128: 0.6}


def write(path, header, rows):
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    raw = text.getvalue().encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def products(path, *, noise=0.0, cast_bytes=0.0, dtype="bf16", **changes):
    p = {**PRODUCTS, **changes}
    rng = np.random.default_rng(1)
    thin = [(m, n, k) for m in (1, 2, 4, 8, 16) for n in (32, 128, 256, 16384, 32768, 65536)
            for k in (32, 128, 256, 16384, 32768, 65536)]  # fmt: skip
    wide = [(m, n, k) for m in (256, 512, 1024, 2048, 4096, 8192, 32768) for n in (512, 1024, 4096, 7168, 16384)
            for k in (512, 1024, 4096, 7168, 16384)]  # fmt: skip
    m, n, k = np.array(thin + wide, dtype=np.float64).T
    width = 2.0 if dtype == "bf16" else 1.0
    seconds = product_seconds(
        m, n, k, width=width, chip=CHIP, flops_per_s=CHIP.flops_per_s[dtype] * p["efficiency"], ramp_k=p["ramp_k"],
        slowdown=p["slowdown"], bytes_per_s=CHIP.hbm_bytes_per_s * p["hbm"], kernel_s=p["kernel_s"],
        cast_bytes=cast_bytes,
    )  # fmt: skip
    rows = []
    for framework in ("one", "two", "three"):
        noisy = seconds * np.exp(noise * rng.standard_normal(len(seconds)))
        rows += [(dtype, *map(int, size), t / US, framework, "1.0") for size, t in zip(zip(m, n, k, strict=True), noisy,
                                                                                       strict=True)]  # fmt: skip
    return write(path, ["dtype", "m", "n", "k", "latency_us", "framework", "version"], rows)


def attention(path, kernel="fa3"):
    p = ATTENTION
    sizes = [(b, s, h, h, d) for b in (1, 4, 16) for s in (256, 1024, 2048, 4096, 16384) for h in (1, 4, 16, 32)
             for d in (64, 128)]  # fmt: skip
    columns = np.array(sizes, dtype=np.float64).T
    share = np.where(columns[4] == 64, p[64], p[128])
    seconds = attention_seconds(
        *columns, chip=CHIP, flops_per_s=CHIP.flops_per_s["bf16"] * share, ramp_keys=p["ramp_keys"], tail=p["tail"],
        kernel_s=p["kernel_s"], bytes_per_s=CHIP.hbm_bytes_per_s * 0.88,
    )  # fmt: skip
    rows = [(*size, t / US, "one", "1.0", kernel) for size, t in zip(sizes, seconds, strict=True)]
    header = ["batch", "seq", "heads", "kv_heads", "head_dim", "latency_us", "framework", "version", "kernel_source"]
    return write(path, header, rows)


def all_reduce_seconds(n, nbytes, *, latency_s, setup_s, rate, pair_loss):
    """2 (n - 1)/n V over the rate of n members, and twice the way round the ring: Thakur 2005."""
    return 2 * (n - 1) / n * nbytes / (rate * (1 - pair_loss / n**2)) + 2 * ((n - 1) * latency_s + setup_s)


def collectives(path, share=0.8, **link):
    link = {"latency_s": 1e-6, "setup_s": 10e-6, "pair_loss": 1.0, "rate": 450e9 * share, **link}
    rows = [("h100", "1", "all_reduce", "half", n, v // 2, v, all_reduce_seconds(n, v, **link) / US, "")
            for n in (2, 4, 8) for v in (2**e for e in range(12, 30))]  # fmt: skip
    header = ["gpu", "version", "op_name", "nccl_dtype", "num_gpus", "message_size", "bytes", "time_us", "busbw_gbps"]
    return write(path, header, rows)


def streams(path, *, kernel_s=3e-6, rate=20e9):
    rows = [(op, "fp32", v, (kernel_s + v / rate) / US, "one", "1.0")
            for op in ("copy", "add") for v in (2**e for e in range(12, 30))]  # fmt: skip
    return write(path, ["op", "dtype", "bytes", "latency_us", "framework", "version"], rows)


def shares(path, *, group_s, share, peak=2250e12, num_sms=148):
    rows = []

    def add(op, work, seconds, shape):
        rows.append(("b200_bf16_ceperm", op, "2250.0", work / (seconds * peak), shape, "measured"))

    def tiles(groups, m, n, k):
        return tile_seconds(groups, m, k, n, num_sms=num_sms, flops_per_s=peak * share, ramp_k=128.0)

    for m in (1024.0, 4096.0, 8192.0):
        for n in (2048.0, 4096.0, 8192.0):
            for k in (2048.0, 4096.0, 7168.0):
                shape = f"b=1, m={m:.0f}, k={k:.0f}, n={n:.0f}, layout=TN"
                add("matmul", 2 * m * n * k, tiles(1.0, m, n, k), shape)
                for groups in (8.0, 64.0):
                    shape = f"ng={groups:.0f}, M={m:.0f}, N={n:.0f}, K={k:.0f}, dtype=bf16, stage=fwd"
                    add("group_matmul", 2 * groups * m * n * k, tiles(groups, m, n, k) + groups * group_s, shape)
    return write(path, ["system", "op", "peak_tflops", "efficiency", "shape", "kind"], rows)
