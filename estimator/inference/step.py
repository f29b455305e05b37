"""infer(model, deployment, system, requests): when the first token comes, how long the others take, what fits.

The growing cache, prompts that are read in chunks beside decoded tokens, drafts that a pass checks, and the memory of
the rank with most. Prices one deployment at a time. Neglected: how requests arrive and wait, the transfer of a cache
from machines that prefill to machines that decode.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from estimator.captured import CapturedModel
from estimator.graph import BlockKind
from estimator.inference.cache import bytes_per_token, layer_bytes
from estimator.inference.deployment import Deployment
from estimator.inference.laws import check_deployment, chunk_share, replicas
from estimator.inference.passes import priced_pass, served
from estimator.inference.result import SERVED_COLUMNS, InferenceResult, PricedPart
from estimator.inference.run import STEP_HOST_S, Run, decode_run, run_of
from estimator.inference.workload import Requests, ServingPhase
from estimator.memory import RESERVED_FACTOR, served_items
from estimator.model import ModelSpec
from estimator.op import Array
from hardware.system import SystemSpec

__all__ = ["NEGLECTED", "infer"]

LENGTHS = 33  # of the cache, from the first to the last decoded token: seconds are nearly straight lines in between
NEGLECTED = "queues of requests, caches of prefixes, draft models of their own, moving a cache between machines"


def infer(model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests) -> InferenceResult:
    """Price one deployment. ValueError (law, offence, remedy) where it is illegal; what does not fit is infeasible."""
    check_deployment(model, deployment, system, requests)
    whole, model = model, served(model)
    dp = replicas(deployment, system)
    tokens, parts = 1.0, tuple[tuple[float, Run], ...]()  # that a pass gives each sequence; passes that differ
    columns = dict.fromkeys((c.name for c in SERVED_COLUMNS), float("nan"))
    if requests.phase is ServingPhase.PREFILL:
        run = most = _prompts(model, deployment, system, requests, requests.batch // dp)
        seconds = run.once + (run.micro_batches - 1) * run.slowest + (deployment.pp - 1) * run.hop + STEP_HOST_S
        back_to_back = run.micro_batches * run.slowest + STEP_HOST_S
        columns["time_to_first_token_s"] = columns["request_s"] = float(seconds[0])
        columns["tokens_per_s"] = requests.batch * requests.context / float(back_to_back[0])
        weights, middle = np.ones(1), 0
    else:
        lengths = _lengths(requests)
        run = most = decode_run(whole, deployment, system, requests, lengths, model)
        seconds, longest, tokens = run.pass_seconds(deployment), None, requests.tokens_a_pass(deployment.drafts)
        weights, middle = _weights(lengths), len(lengths) // 2
        if deployment.chunk:
            share = chunk_share(deployment, system, requests)
            most = decode_run(whole, deployment, system, requests, lengths, model, chunk=deployment.chunk)
            longest = most.pass_seconds(deployment)
            seconds = (1.0 - share) * seconds + share * longest
            parts = ((1.0 - share, run), (share, most))
            run = run._replace(sums={n: (1.0 - share) * run.sums[n] + share * most.sums[n] for n in run.sums})
        columns |= _decoded(model, deployment, system, requests, seconds / tokens, weights, longest)
    mean = float(weights @ seconds)
    columns |= {name: float(weights @ value) / tokens for name, value in run.sums.items() if name in columns}
    columns["host_s"] += STEP_HOST_S / tokens
    told = sum(columns[n] for n in ("compute_s", "exposed_comm_tp_s", "exposed_comm_ep_s", "host_s"))
    columns["pipeline_s"] = max(mean / tokens - told, 0.0)
    columns |= _shares(parts or ((1.0, run),), weights, mean, deployment, system)
    memory = _memory(model, deployment, system, requests, most, whole)
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
    weights: np.ndarray, longest: np.ndarray | None,
) -> dict[str, float]:  # fmt: skip
    """Columns of decode. Its prompt is one on each replica, in the same layout, or is read in `longest` passes."""
    mean = float(weights @ seconds)
    first = float("nan")
    if longest is not None:
        first = -(-requests.context // deployment.chunk) * float(weights @ longest)
    elif not _is_decode_only(model):
        run = _prompts(model, deployment, system, requests, 1)
        first = float(run.once[0]) + (deployment.pp - 1) * run.hop + STEP_HOST_S
    return {
        "time_to_first_token_s": first, "time_per_output_token_s": mean, "first_output_token_s": float(seconds[0]),
        "last_output_token_s": float(seconds[-1]),
        "longest_pass_s": float("nan") if longest is None else float(longest[-1]),
        "request_s": first + (requests.output - 1) * mean,
        "tokens_per_s": requests.batch / mean, "tokens_per_s_per_sequence": 1.0 / mean,
    }  # fmt: skip


def _prompts(
    model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests, prompts: int
) -> Run:  # fmt: skip
    return run_of(model, deployment, system, requests, ServingPhase.PREFILL, prompts, (float(requests.context),))


def _is_decode_only(model: ModelSpec) -> bool:
    return isinstance(model, CapturedModel) and model.captured.phase == "decode"


def _shares(
    parts: tuple[tuple[float, Run], ...], weights: np.ndarray, mean: float, deployment: Deployment, system: SystemSpec
) -> dict[str, float]:  # fmt: skip
    """Of peak bandwidth and of peak FLOP/s, over the ranks of a pipeline; `parts`: kinds of passes with their shares.

    What tokens of prompts see of one another counts in neither.
    """
    read, flops = np.zeros(len(weights)), np.zeros(len(weights))
    for share, run in parts:
        passes = share * run.micro_batches * run.halves / deployment.pp
        for kind, times in Counter(run.price.sequence).items():
            for op in run.price.blocks[kind].ops:
                read = read + passes * times * op.read_bytes
                work = op.price.work if op.price else None
                flops = flops + passes * times * (work.flops if work and work.matrix else 0.0)
    chip, peak = system.chip, system.peak(deployment.formats.recipe.gemm)
    return {
        "mbu": float(weights @ read) / (mean * chip.hbm_bytes_per_s),
        "mfu": float(weights @ flops) / (mean * peak),
    }


def _memory(
    model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests, run: Run, whole: ModelSpec
) -> dict[str, float]:  # fmt: skip
    """Line items of the rank with most; what makes drafts counts there, wherever the pipeline has it."""
    kinds, layout = run.price.kinds, run.layout
    sequences = requests.batch // replicas(deployment, system)
    longest = float(requests.longest)
    kept = np.array([0.0 if k.layer is None else layer_bytes(k.layer, model, deployment, longest) for k in kinds])
    held = np.array([run.price.blocks[k].weight_bytes for k in kinds])
    work = np.array([run.price.blocks[k].working_bytes for k in kinds])
    more, keeps = _of_drafts(whole, deployment, system, requests)
    stages = [
        served_items(
            weights=float(layout.held[c] @ held) + more, cache=float(layout.counts[c] @ kept + keeps) * sequences,
            activations=float(max(work[layout.counts[c] > 0])), exchange=run.price.exchange_bytes,
        )
        for c in range(deployment.pp)
    ]  # fmt: skip
    return max(stages, key=lambda items: sum(items.values()))


def _of_drafts(
    model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests
) -> tuple[float, float]:  # fmt: skip
    """Weights of the modules that make drafts, without the embedding and head that they share, and what each keeps."""
    if not deployment.drafts:
        return 0.0, 0.0
    found = priced_pass(model, deployment, system, ServingPhase.DECODE, sequences=1.0, contexts=(1.0,))
    after = found.sequence[found.sequence.index(BlockKind.HEAD) + 1 :]
    weights = sum(found.blocks[kind].weight_bytes for kind in after)
    weights -= model.num_mtp_layers * found.blocks[BlockKind.HEAD].weight_bytes
    layers = [kind.layer for kind in after if kind.layer is not None]
    return max(weights, 0.0), sum(layer_bytes(layer, model, deployment, float(requests.longest)) for layer in layers)


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


def _parts(run: Run, row: int) -> tuple[PricedPart, ...]:
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
