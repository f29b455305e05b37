"""What an evaluation answers: the columns of a step, their units and the identities between them.

All seconds are those of one rank. Every rank waits at the gradient-norm reduction for the last to arrive, so all finish
together; told is the one that works most (its passes and its own exposed gradient traffic), which others wait for.
Identities (tests/estimator/test_identities.py):

    step_time = pipeline + optimizer + optimizer_comm + fixed_host + jitter
    pipeline  = compute + exposed {tp, cp, ep, pp, dp} + exposed_offload + exposed_host + bubble
    compute   = forward + backward + recompute
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["BAND_COLUMNS", "COLUMNS", "Column", "StageResult", "StepResult", "column"]

Value = float | np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One scalar that an evaluation gives. `better` is 'lower', 'higher' or '' (neither).

    `follows` says of what the column is a monotone function on one system at one global batch: 'step' (step time),
    'memory', 'system' (constant), or '' (no such promise: a search over it enumerates).
    """

    name: str
    unit: str
    better: str
    follows: str
    description: str


def _c(name: str, unit: str, better: str, follows: str, description: str) -> Column:
    return Column(name=name, unit=unit, better=better, follows=follows, description=description)


COLUMNS: tuple[Column, ...] = (
    _c("step_time_s", "s", "lower", "step", "one optimizer step, slowest rank"),
    _c("tokens_per_s", "1/s", "higher", "step", "tokens of the global batch per second"),
    _c("tokens_per_s_per_gpu", "1/s", "higher", "step", "the same per chip"),
    _c("model_tflops_per_gpu", "TFLOP/s", "higher", "step", "model FLOPs (no recompute) per second and chip, 1e12"),
    _c("mfu", "1", "higher", "", "model FLOPs / (step * peak of the recipe's GEMM dtype)"),
    _c("mfu_bf16", "1", "higher", "step", "the same against the bf16 peak"),
    _c("hfu", "1", "higher", "", "like mfu, with recomputed FLOPs counted"),
    _c("pipeline_s", "s", "lower", "", "from the first forward to the last gradient in place"),
    _c("compute_s", "s", "lower", "", "forward + backward + recompute"),
    _c("forward_s", "s", "lower", "", "forward kernels"),
    _c("backward_s", "s", "lower", "", "input- and weight-gradient kernels"),
    _c("recompute_s", "s", "lower", "", "forward kernels run again"),
    _c("bubble_s", "s", "lower", "", "idle in the pipeline"),
    _c("exposed_comm_tp_s", "s", "lower", "", "tensor-parallel traffic that compute does not hide"),
    _c("exposed_comm_cp_s", "s", "lower", "", "context-parallel traffic that compute does not hide"),
    _c("exposed_comm_ep_s", "s", "lower", "", "expert all-to-all that compute does not hide"),
    _c("exposed_comm_pp_s", "s", "lower", "", "stage-to-stage traffic that compute does not hide"),
    _c("exposed_comm_dp_s", "s", "lower", "", "gradient and parameter traffic that compute does not hide"),
    _c("exposed_offload_s", "s", "lower", "", "host transfers that compute does not hide"),
    _c("exposed_host_s", "s", "lower", "", "kernel launches that the device waits for"),
    _c("fixed_host_s", "s", "lower", "system", "host work per step that nothing hides"),
    _c("optimizer_s", "s", "lower", "", "parameter update"),
    _c("optimizer_comm_s", "s", "lower", "", "parameter all-gather after the update, where exposed"),
    _c("jitter_s", "s", "lower", "step", "waiting for the slowest of many ranks"),
    _c("peak_memory_bytes", "B", "lower", "memory", "allocated on the worst rank at its worst moment"),
    _c("reserved_memory_bytes", "B", "lower", "memory", "held by the allocator"),
    _c("device_memory_bytes", "B", "lower", "memory", "with driver context and communicator buffers"),
    _c("host_memory_bytes", "B", "lower", "", "offloaded to the host, of the chip that offloads most"),
    _c("num_gpus", "1", "lower", "system", "chips used"),
    _c("cost_usd_per_mtoken", "USD", "lower", "step", "rental price of a million tokens"),
    _c("energy_j_per_token", "J", "lower", "step", "chips, hosts and network at rated power, times PUE"),
    _c("co2_kg_per_mtoken", "kg", "lower", "step", "CO2 of the energy of a million tokens, by the site's grid"),
    _c("price_share_measured", "1", "higher", "", "share of priced seconds that rests on measured tables"),
    _c("price_share_tile", "1", "higher", "", "share that rests on the tile model"),
    _c("price_share_roofline", "1", "lower", "", "share that rests on the roofline"),
)

BAND_COLUMNS: tuple[Column, ...] = (
    _c("step_time_p10_s", "s", "lower", "", "step time at P10 of the model's error, routing skew and stragglers"),
    _c("step_time_p90_s", "s", "lower", "", "step time at their P90"),
    _c("peak_memory_p10_bytes", "B", "lower", "", "allocated on the worst rank at P10 of the same"),
    _c("peak_memory_p90_bytes", "B", "lower", "", "allocated on the worst rank at its P90"),
)
"""What is added to an evaluation that is told (estimator/band.py, search/bands.py): a search does not price it."""

NAMES = frozenset(c.name for c in COLUMNS)


def column(name: str) -> Column:
    """The column of that name; ValueError names the known ones."""
    for candidate in COLUMNS:
        if candidate.name == name:
            return candidate
    raise ValueError(f"unknown column {name!r}; have {[c.name for c in COLUMNS]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One pipeline rank of a scalar evaluation: bytes by item, seconds of one micro-batch through its chunks."""

    rank: int
    memory: dict[str, float]
    layers: tuple[int, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """An evaluated strategy: every column as a float, or as `[N]` for a batch.

    `feasible` and `reason` hold per row; `stages` and `chunks` (seconds of forward, input and weight gradient of one
    micro-batch on each chunk, in model order) are filled for a scalar only. Seconds of rows that a gated batch did not
    price are NaN.
    """

    columns: dict[str, Value]
    feasible: Value
    reason: str | tuple[str, ...]
    stages: tuple[StageResult, ...] = ()
    chunks: tuple[tuple[float, float, float], ...] = ()
    assumptions: tuple[str, ...] = ()
    finishing_rank: int = 0

    def __getattr__(self, name: str) -> Value:
        if name in NAMES:
            return self.columns[name]
        raise AttributeError(name)

    def as_dict(self) -> dict[str, object]:
        """Plain values under the keys of `search estimate --json`: exposed traffic and stages nested."""
        comm = {k.removeprefix("exposed_comm_").removesuffix("_s"): v for k, v in self.columns.items() if "_comm_" in k
                and k.startswith("exposed")}  # fmt: skip
        share = {k.removeprefix("price_share_"): v for k, v in self.columns.items() if k.startswith("price_share")}
        plain = {k: v for k, v in self.columns.items() if not k.startswith(("exposed_comm_", "price_share_"))}
        stages = [
            {"rank": s.rank, "layers": list(s.layers), "memory": s.memory, "forward_s": s.forward_s,
             "backward_s": s.backward_s}
            for s in self.stages
        ]  # fmt: skip
        return {
            **plain, "exposed_comm_s": comm, "price_sources": share, "stages": stages, "feasible": self.feasible,
            "reason": self.reason, "finishing_rank": self.finishing_rank, "assumptions": list(self.assumptions),
        }  # fmt: skip
