"""Fits fused causal attention, forward: a share of peak by head dim, and what keeps short or few sequences from it.

seconds = kernel_s + max(FLOPs / (peak share), bytes / bandwidth), FLOPs as in estimator/cost/curves.py. One fit for
each generation of kernels that a table names. Backward has 2.5 times forward's FLOPs (arXiv:2307.08691, section 3), at
forward's rate; where a table has a column `pass` with rows `backward`, how much longer they take than that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capture.fits import Chip, Fit, frameworks, octaves
from capture.fitting import Parameter, Quality, central, fit, held_out, quality
from capture.op_tables import OpTable
from estimator.cost.curves import attention_flops
from hardware.dtype import DType
from hardware.units import US

__all__ = ["REFERENCE_HEAD_DIM", "attention_seconds", "fit_attention", "generation"]

REFERENCE_HEAD_DIM = 128
LEAST_SEQ, FEWEST = 256, 24
NOT_PREFILL = "decode"  # kernels of one query, which tables name so
BACKWARD = "backward"  # as the column `pass` names it
BACKWARD_FLOPS = 2.5  # over forward's: arXiv:2307.08691, section 3

GENERATIONS = {
    "flash_attention": "flash2", "vllm_flash_attn": "flash2", "fa2": "flash2", "fa3": "flash3",
    "vllm_flash_attn_fa3": "flash3", "vllm_flash_attn_fa4": "flash4", "trtllm_mha": "trtllm",
    "vllm_flashinfer_trtllmprefill": "trtllm", "torch_flow": "trtllm_fmha", "torch_flow_flashinfer": "flashinfer",
}  # fmt: skip
"""Kernels by what frameworks call them; a name that is not here is a generation of its own."""


def generation(kernel_source: str) -> str:
    """Which generation of kernels a table's name stands for."""
    return GENERATIONS.get(kernel_source, kernel_source)


def attention_seconds(
    batch: np.ndarray, seq: np.ndarray, heads: np.ndarray, kv_heads: np.ndarray, head_dim: np.ndarray, *, chip: Chip,
    flops_per_s: np.ndarray | float, ramp_keys: float, tail: float, kernel_s: float, bytes_per_s: float,
) -> np.ndarray:  # fmt: skip
    """Seconds of a measured forward pass over whole causal sequences."""
    rows, width = batch * heads * seq, 2.0 * head_dim
    flops = rows * seq * width  # the causal half of 2 FLOPs a multiply-add
    more = attention_flops(rows, seq, width, num_sms=chip.num_sms, ramp_keys=ramp_keys, tail=tail)
    moved = 2.0 * 2.0 * batch * seq * head_dim * (heads + kv_heads)  # q, k, v and the output in 16 bits
    return kernel_s + np.maximum((flops + more) / flops_per_s, moved / bytes_per_s)


def fit_attention(table: OpTable, chip: Chip, hbm_efficiency: float) -> list[Fit]:
    """One curve for each generation with enough rows.

    The one that most frameworks use stands first, of equals the one that does most at head dim 128: the kernel that a
    training framework is likeliest to have.
    """
    names = np.array([generation(name) for name in table.texts["kernel_source"]], dtype=object)
    prefill = np.array([NOT_PREFILL not in name for name in table.texts["kernel_source"]])
    back = table.texts["pass"] == BACKWARD if "pass" in table.texts else np.zeros(len(names), dtype=bool)
    found = [
        _fit(table.where((names == name) & prefill & ~back), table.where((names == name) & back), chip, str(name),
             hbm_efficiency)
        for name in sorted(set(names[prefill]))
    ]  # fmt: skip
    whole = [f for f in found if f is not None]
    return sorted(whole, key=lambda f: (-len(f.measured_by), -f.values.get(_share(REFERENCE_HEAD_DIM), 0.0)))


def _share(head_dim: float) -> str:
    return f"share.{head_dim:.0f}"


def _fit(table: OpTable, backward: OpTable, chip: Chip, name: str, hbm_efficiency: float) -> Fit | None:
    sizes, seconds = _sizes(table)
    if len(seconds) < FEWEST:
        return None
    batch, seq, heads, _, head_dim = sizes
    peak = _peak(table, chip)
    dims, at_dim = np.unique(head_dim, return_inverse=True)
    out = held_out(*sizes)
    bandwidth = chip.hbm_bytes_per_s * hbm_efficiency

    def predict(at: np.ndarray, where: np.ndarray) -> np.ndarray:
        return attention_seconds(
            *(size[where] for size in sizes), chip=chip, flops_per_s=peak * at[3:][at_dim[where]], ramp_keys=at[0],
            tail=at[1], kernel_s=at[2] * US, bytes_per_s=bandwidth,
        )  # fmt: skip

    floor = float(np.quantile(seconds, 0.02)) / US
    parameters = (
        Parameter(start=128.0, low=0.0, high=4096.0, step=64.0),
        Parameter(start=0.5, low=0.0, high=4.0, step=0.25),
        Parameter(start=0.7 * floor, low=0.0, high=floor, step=0.2 * floor),
        *(Parameter(start=0.5, low=0.01, high=1.0, step=0.1) for _ in dims),
    )
    seen = ~out
    found = fit(
        lambda at: predict(at, seen), seconds[seen], parameters, weights=octaves((batch * seq**2 * heads)[seen])
    )
    values = {"ramp_keys": found[0], "tail": found[1], "kernel_s": found[2] * US}
    values |= {_share(dim): float(value) for dim, value in zip(dims, found[3:], strict=True)}
    long = seq >= 2048  # what training runs
    parts: Sequence[tuple[str, np.ndarray]] = (("all", out), ("seq from 2048", out & long))
    errors = {part: quality(predict(found, w), seconds[w], int(seen.sum())) for part, w in parts}
    more = _backward(backward, chip, peak, bandwidth, dict(zip(dims, found[3:], strict=True)), found)
    if more is not None:
        values["backward"], errors["backward"] = more
    return Fit(
        subject=f"attention {name}", values=values, errors=errors, num_rows=table.num_rows + backward.num_rows,
        measured_by=frameworks(table.texts.get("framework")),
    )  # fmt: skip


def _sizes(table: OpTable) -> tuple[list[np.ndarray], np.ndarray]:
    """Batch, sequence, heads, key heads and head dim of each shape that is fitted to, and its seconds."""
    columns = ("batch", "seq", "heads", "kv_heads", "head_dim")
    sizes, seconds, _ = central([table.numbers[c] for c in columns], table.numbers["latency_us"] * US)
    used = sizes[1] >= LEAST_SEQ
    return [size[used] for size in sizes], seconds[used]


def _peak(table: OpTable, chip: Chip) -> float:
    """What shares are of: the peak of the table's one format, else of half precision, where the chip has it."""
    told = set(table.texts.get("dtype", ()))
    only = next(iter(told)) if len(told) == 1 else ""
    names = (only, DType.BF16.value, DType.FP16.value, DType.FP32.value)
    return next(chip.flops_per_s[name] for name in names if name in chip.flops_per_s)


def _backward(
    table: OpTable, chip: Chip, peak: float, bandwidth: float, share: dict[float, float], at: np.ndarray
) -> tuple[float, Quality] | None:
    """How much longer backward takes than its FLOPs at forward's rate, and the error of that on held-out shapes."""
    sizes, seconds = _sizes(table)
    known = np.array([dim in share for dim in sizes[4]], dtype=bool)
    sizes, seconds = [size[known] for size in sizes], seconds[known]
    if len(seconds) < FEWEST:
        return None
    rate = peak * np.array([share[dim] for dim in sizes[4]])
    kernel_s = at[2] * US
    once = attention_seconds(
        *sizes, chip=chip, flops_per_s=rate, ramp_keys=at[0], tail=at[1], kernel_s=0.0, bytes_per_s=bandwidth
    )
    out = held_out(*sizes)
    factor = float(np.median((seconds[~out] - kernel_s) / (BACKWARD_FLOPS * once[~out])))
    predicted = kernel_s + BACKWARD_FLOPS * factor * once
    return factor, quality(predicted[out], seconds[out], int((~out).sum()))
