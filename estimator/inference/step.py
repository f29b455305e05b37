"""infer(model, deployment, system, requests): when the first token comes, how long the others take, what fits.

Micro-batches through the stages of a pipeline, the growing cache, and the memory of the rank with most. Prices one
deployment at a time. Neglected: how requests arrive and wait, prompts between decoded tokens, drafts of several tokens,
the transfer of a cache from machines that prefill to machines that decode.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from estimator.captured import CapturedModel
from estimator.cost.collective import point_to_point
from estimator.inference.cache import bytes_per_token, layer_bytes
from estimator.inference.deployment import Deployment
from estimator.inference.laws import check_deployment, replicas
from estimator.inference.passes import PassPrice, priced_pass, served
from estimator.inference.result import SERVED_COLUMNS, InferenceResult, PricedPart
from estimator.inference.workload import Requests, ServingPhase
from estimator.layout import Layout, layout_of
from estimator.memory import RESERVED_FACTOR, served_items
from estimator.model import ModelSpec
from estimator.op import Array
from estimator.strategy import Schedule
from hardware.system import SystemSpec

__all__ = ["NEGLECTED", "STEP_HOST_S", "infer"]

STEP_HOST_S = 2e-4  # between two passes, to hand over tokens; assumption: what else the host does hides beside them
LENGTHS = 33  # of the cache, from the first to the last decoded token: seconds are nearly straight lines in between
NEGLECTED = "queues of requests, prompts between decoded tokens, drafts of tokens, moving a cache between machines"


class _Run(NamedTuple):
    """Passes of one batch through the stages, micro-batch after micro-batch: seconds `[R]` each."""

    price: PassPrice
    layout: Layout
    micro_batches: int
    halves: int  # of a micro-batch that take turns
    once: np.ndarray  # one micro-batch through all stages
    slowest: np.ndarray  # its longest stage
    hop: float
    sums: dict[str, np.ndarray]  # columns of one micro-batch


def infer(model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests) -> InferenceResult:
    """Price one deployment. ValueError (law, offence, remedy) where it is illegal; what does not fit is infeasible."""
    check_deployment(model, deployment, system, requests)
    model = served(model)
    dp = replicas(deployment, system)
    columns = dict.fromkeys((c.name for c in SERVED_COLUMNS), float("nan"))
    if requests.phase is ServingPhase.PREFILL:
        run = _run(model, deployment, system, requests.phase, requests.batch // dp, (float(requests.context),))
        seconds = run.once + (run.micro_batches - 1) * run.slowest + (deployment.pp - 1) * run.hop + STEP_HOST_S
        back_to_back = run.micro_batches * run.slowest + STEP_HOST_S
        columns["time_to_first_token_s"] = columns["request_s"] = float(seconds[0])
        columns["tokens_per_s"] = requests.batch * requests.context / float(back_to_back[0])
        weights, middle = np.ones(1), 0
    else:
        lengths = _lengths(requests)
        run = _run(model, deployment, system, requests.phase, requests.batch // dp, lengths)
        hops = deployment.pp * run.hop if deployment.pp > 1 else 0.0  # the last one brings the token back
        seconds = np.maximum(run.once + hops, run.micro_batches * run.slowest) + STEP_HOST_S
        weights, middle = _weights(lengths), len(lengths) // 2
        columns |= _decoded(model, deployment, system, requests, seconds, weights)
    mean = float(weights @ seconds)
    columns |= {name: float(weights @ value) for name, value in run.sums.items() if name in columns}
    columns["host_s"] += STEP_HOST_S
    told = sum(columns[n] for n in ("compute_s", "exposed_comm_tp_s", "exposed_comm_ep_s", "host_s"))
    columns["pipeline_s"] = max(mean - told, 0.0)
    columns |= _shares(run, weights, mean, deployment, system)
    memory = _memory(model, deployment, system, requests, run)
    columns |= _told_memory(model, deployment, system, requests, memory)
    columns |= _money(system, columns["tokens_per_s"])
    fits = columns["device_memory_bytes"] <= system.usable_hbm_bytes
    return InferenceResult(
        columns={c.name: columns[c.name] for c in SERVED_COLUMNS}, memory=memory, parts=_parts(run, middle),
        feasible=fits, reason="" if fits else "memory",
        assumptions=(*_notices(model, requests), *model.notes, *system.assumptions, *system.chip.assumptions),
    )  # fmt: skip


def _lengths(requests: Requests) -> tuple[float, ...]:
    """Lengths of the cache at which a decoded token is priced."""
    steps = np.linspace(0.0, requests.output - 1.0, min(requests.output, LENGTHS))
    return tuple((requests.context + np.unique(np.rint(steps))).tolist())


def _weights(lengths: tuple[float, ...]) -> np.ndarray:
    """What turns seconds at these lengths into the mean over all lengths between: trapezoids."""
    if len(lengths) == 1:
        return np.ones(1)
    at = np.array(lengths)
    wide = np.diff(at)
    ends = np.zeros(len(at))
    ends[:-1] += wide / 2.0
    ends[1:] += wide / 2.0
    return np.asarray(ends / (at[-1] - at[0]))


def _decoded(
    model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests, seconds: np.ndarray,
    weights: np.ndarray,
) -> dict[str, float]:  # fmt: skip
    """Columns of decode; the prompt before it is one on each replica, in the same layout."""
    mean = float(weights @ seconds)
    first = float("nan")
    if not _is_decode_only(model):
        run = _run(model, deployment, system, ServingPhase.PREFILL, 1, (float(requests.context),))
        first = float(run.once[0]) + (deployment.pp - 1) * run.hop + STEP_HOST_S
    return {
        "time_to_first_token_s": first, "time_per_output_token_s": mean, "first_output_token_s": float(seconds[0]),
        "last_output_token_s": float(seconds[-1]), "request_s": first + (requests.output - 1) * mean,
        "tokens_per_s": requests.batch / mean, "tokens_per_s_per_sequence": 1.0 / mean,
    }  # fmt: skip


def _is_decode_only(model: ModelSpec) -> bool:
    return isinstance(model, CapturedModel) and model.captured.phase == "decode"


def _micro_batches(sequences: int, pp: int) -> int:
    """Micro-batches of equal size: as many as stages where the sequences divide, else fewer."""
    return max(m for m in range(1, pp + 1) if sequences % m == 0)


def _run(
    model: ModelSpec, deployment: Deployment, system: SystemSpec, phase: ServingPhase, sequences: int,
    lengths: tuple[float, ...],
) -> _Run:  # fmt: skip
    m, pp = _micro_batches(sequences, deployment.pp), deployment.pp
    halves = 2 if deployment.overlap_ep and deployment.ep > 1 and sequences // m > 1 else 1
    found = priced_pass(
        model, deployment, system, phase, sequences=sequences / m / halves, contexts=lengths, overlap=halves > 1
    )
    layout = layout_of(model, found.kinds, Schedule.ONE_F_ONE_B, pp, 1)

    def by_stage(name: str) -> np.ndarray:
        """Of one micro-batch [C, R]."""
        values = [np.broadcast_to(np.asarray(getattr(found.blocks[k], name)), len(lengths)) for k in found.kinds]
        return np.asarray(layout.counts @ np.stack(values)) * halves

    stages = by_stage("seconds")
    stride = float(deployment.tp * replicas(deployment, system))
    hop = float(np.asarray(point_to_point(system, np.array([stride])).seconds(found.hop_bytes))[0]) if pp > 1 else 0.0
    return _Run(
        price=found, layout=layout, micro_batches=m, halves=halves, once=stages.sum(axis=0),
        slowest=stages.max(axis=0), hop=hop,
        sums={column: by_stage(name).sum(axis=0) for column, name in SUMMED.items()},
    )  # fmt: skip


SUMMED = {"compute_s": "compute_s", "attention_s": "attention_s", "exposed_comm_tp_s": "tp_s",
          "exposed_comm_ep_s": "ep_s", "host_s": "host_s"}  # fmt: skip
"""Columns that are sums over blocks, and what they sum up."""


def _shares(
    run: _Run, weights: np.ndarray, mean: float, deployment: Deployment, system: SystemSpec
) -> dict[str, float]:  # fmt: skip
    """Of peak bandwidth and of peak FLOP/s, over the ranks of a pipeline."""
    read, flops = np.zeros(len(weights)), np.zeros(len(weights))
    for kind, times in Counter(run.price.sequence).items():
        for op in run.price.blocks[kind].ops:
            read = read + times * op.read_bytes
            flops = flops + times * (op.price.work.flops if op.price and op.price.work.matrix else 0.0)
    passes = run.micro_batches * run.halves / deployment.pp
    chip, peak = system.chip, system.peak(deployment.formats.recipe.gemm)
    return {
        "mbu": float(weights @ read) * passes / (mean * chip.hbm_bytes_per_s),
        "mfu": float(weights @ flops) * passes / (mean * peak),
    }


def _memory(
    model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests, run: _Run
) -> dict[str, float]:  # fmt: skip
    """Line items of the rank with most."""
    kinds, layout = run.price.kinds, run.layout
    sequences = requests.batch // replicas(deployment, system)
    longest = float(requests.longest)
    kept = np.array([0.0 if k.layer is None else layer_bytes(k.layer, model, deployment, longest) for k in kinds])
    held = np.array([run.price.blocks[k].weight_bytes for k in kinds])
    work = np.array([run.price.blocks[k].working_bytes for k in kinds])
    stages = [
        served_items(
            weights=float(layout.held[c] @ held), cache=float(layout.counts[c] @ kept) * sequences,
            activations=float(max(work[layout.counts[c] > 0])), exchange=run.price.exchange_bytes,
        )
        for c in range(deployment.pp)
    ]  # fmt: skip
    return max(stages, key=lambda items: sum(items.values()))


def _told_memory(
    model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests, memory: dict[str, float]
) -> dict[str, float]:  # fmt: skip
    peak = sum(memory.values())
    return {
        "weight_bytes": memory["weights"], "kv_cache_bytes": memory["kv_cache"],
        "kv_cache_bytes_per_token": bytes_per_token(model, deployment.but(tp=1), float(requests.context)),
        "activation_bytes": memory["activations"] + memory["exchange_buffers"] + memory["workspace"],
        "peak_memory_bytes": peak, "device_memory_bytes": peak * RESERVED_FACTOR + system.chip.context_bytes,
    }  # fmt: skip


def _money(system: SystemSpec, tokens_per_s: float) -> dict[str, float]:
    return {
        "num_gpus": float(system.num_chips), "tokens_per_s_per_gpu": tokens_per_s / system.num_chips,
        "cost_usd_per_mtoken": system.price_usd_per_s / tokens_per_s * 1e6,
        "energy_j_per_token": system.power_w / tokens_per_s,
    }  # fmt: skip


def _notices(model: ModelSpec, requests: Requests) -> tuple[str, ...]:
    if not model.max_positions or requests.longest <= model.max_positions:
        return ()
    return (f"context and output ({requests.longest} tokens) are beyond the model's {model.max_positions} positions",)


def _parts(run: _Run, row: int) -> tuple[PricedPart, ...]:
    """Parts of the model in one pass at one length of the cache; traffic by its group."""
    found: dict[str, list[float]] = {}
    for kind, times in Counter(run.price.sequence).items():
        for op in run.price.blocks[kind].ops:
            name = op.op.component.value if op.price else f"{op.op.group.value if op.op.group else ''} traffic"
            bound = op.price is not None and _at(op.price.memory_s, row) > _at(op.price.compute_s, row)
            seconds = _at(op.seconds, row)
            more = (
                seconds, seconds if bound else 0.0, _at(op.price.work.nbytes, row) if op.price else 0.0,
                _at(op.price.work.flops, row) if op.price else 0.0,
            )  # fmt: skip
            found[name] = [a + times * b for a, b in zip(found.get(name, [0.0] * 4), more, strict=True)]
    return tuple(
        PricedPart(part=name, seconds=s, memory_bound_s=b, hbm_bytes=n, flops=f)
        for name, (s, b, n, f) in found.items() if s > 0.0
    )  # fmt: skip


def _at(value: Array, row: int) -> float:
    values = np.atleast_1d(np.asarray(value, dtype=np.float64))
    return float(values[row] if len(values) > 1 else values[0])
