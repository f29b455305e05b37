"""What an evaluation of answering tells: its columns, their units, and the identities between them.

Seconds are those of one pass through all layers. Identities (tests/estimator/test_inference.py):

    time_per_output_token = compute + exposed {tp, ep} + pipeline + host          (means over the output, in decode;
                                                           of a pass, over the tokens that it gives each sequence)
    time_to_first_token   = the same of prefill, of all its micro-batches
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from estimator.result import Column

__all__ = ["OF_DECODE", "OF_PROMPTS", "SERVED_COLUMNS", "InferenceResult", "PricedPart", "served_column"]


def _c(name: str, unit: str, better: str, description: str) -> Column:
    return Column(name=name, unit=unit, better=better, follows="", description=description)


SERVED_COLUMNS: tuple[Column, ...] = (
    _c("time_to_first_token_s", "s", "lower", "prefill of the batch; of decode, of one prompt on each replica"),
    _c("time_per_output_token_s", "s", "lower", "of a sequence, mean over its output; NaN in prefill"),
    _c("first_output_token_s", "s", "lower", "the same where the output begins"),
    _c("last_output_token_s", "s", "lower", "the same where it ends"),
    _c("longest_pass_s", "s", "lower", "of decode with chunks: a pass that reads one, where the output ends; else NaN"),
    _c("request_s", "s", "lower", "first token and all others of one request"),
    _c("tokens_per_s", "1/s", "higher", "tokens decoded of all sequences; in prefill read, batch after batch"),
    _c("tokens_per_s_per_gpu", "1/s", "higher", "the same per chip"),
    _c("tokens_per_s_per_sequence", "1/s", "higher", "decoded tokens of one sequence; NaN in prefill"),
    _c("compute_s", "s", "lower", "kernels of one pass"),
    _c("attention_s", "s", "lower", "of these, the core of attention, which reads the cache"),
    _c("exposed_comm_tp_s", "s", "lower", "tensor-parallel traffic"),
    _c("exposed_comm_ep_s", "s", "lower", "expert all-to-all that compute does not hide"),
    _c("pipeline_s", "s", "lower", "hops between stages, and waiting for the slowest of them"),
    _c("host_s", "s", "lower", "launches that the device waits for, and work of the host between passes"),
    _c("weight_bytes", "B", "lower", "of weights, on the rank with most memory"),
    _c("kv_cache_bytes", "B", "lower", "of the cache there when the last token is decoded"),
    _c("kv_cache_bytes_per_token", "B", "lower", "that one more token adds, however tp and pp split it"),
    _c("activation_bytes", "B", "lower", "of the widest moment of a pass, with buffers and workspace"),
    _c("peak_memory_bytes", "B", "lower", "allocated on the rank with most"),
    _c("device_memory_bytes", "B", "lower", "with the allocator's blocks, driver context and communicator buffers"),
    _c("mbu", "1", "higher", "weights and cache that a pass reads / (its seconds * peak HBM bandwidth)"),
    _c("mfu", "1", "higher", "FLOPs of a pass / (its seconds * peak of the products' format)"),
    _c("num_gpus", "1", "lower", "chips used"),
    _c("cost_usd_per_mtoken", "USD", "lower", "rental price of a million tokens of tokens_per_s"),
    _c("energy_j_per_token", "J", "lower", "chips, hosts and network at rated power, times PUE"),
)


OF_DECODE = frozenset({"time_per_output_token_s", "first_output_token_s", "last_output_token_s", "longest_pass_s",
                       "tokens_per_s_per_sequence"})  # fmt: skip
"""Columns without a value in prefill."""
OF_PROMPTS = frozenset({"time_to_first_token_s", "request_s"})
"""Columns without a value where a model's graph is of decode alone."""


def served_column(name: str) -> Column:
    """The column of that name; ValueError names the known ones."""
    for candidate in SERVED_COLUMNS:
        if candidate.name == name:
            return candidate
    raise ValueError(f"unknown column {name!r}; have {[c.name for c in SERVED_COLUMNS]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPart:
    """Seconds of one part of the model in one pass, over all its layers; the bytes and FLOPs behind them."""

    part: str
    seconds: float
    memory_bound_s: float  # of these, in kernels that wait for memory
    hbm_bytes: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceResult:
    """One deployment, priced.

    `memory`: line items of the rank with most; `parts`: of a pass in the middle of the output; `reason`: why it is not
    feasible, else empty.
    """

    columns: Mapping[str, float]
    memory: Mapping[str, float]
    parts: tuple[PricedPart, ...]
    feasible: bool
    reason: str
    assumptions: tuple[str, ...]

    def __getattr__(self, name: str) -> float:
        if name in self.columns:
            return self.columns[name]
        raise AttributeError(name)
