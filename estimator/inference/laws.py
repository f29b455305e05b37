"""Which deployments can answer which requests on a system: law, offence and remedy. Knows nothing of what they cost."""

from __future__ import annotations

import math

import numpy as np

from estimator.captured import CapturedModel
from estimator.imbalance import Routing
from estimator.inference.deployment import Deployment
from estimator.inference.workload import Requests, ServingPhase
from estimator.layers import Mixer
from estimator.model import ModelSpec
from estimator.rules import RULES, Case, explain
from estimator.strategy import CudaGraph
from estimator.workload import Workload
from hardware.system import SystemSpec

__all__ = ["check_deployment", "chunk_share", "replicas", "routing_of"]

SHARED = ("sizes", "world", "heads", "kv_heads", "mixer_groups", "ffn", "experts", "redundant_experts", "expert_world",
          "layers")  # fmt: skip
RECURRENT = frozenset({Mixer.MAMBA, Mixer.LINEAR})
"""Rules of training that hold here too: how dims split, and how degrees multiply to the chips."""


def replicas(deployment: Deployment, system: SystemSpec) -> int:
    """Data-parallel degree: what tp and pp leave of the chips."""
    return max(system.num_chips // (deployment.tp * deployment.pp), 1)


def routing_of(model: ModelSpec, requests: Requests) -> Routing:
    """How unevenly tokens load the model's experts."""
    return Routing.of(model, Workload(seq=1, global_batch=1, routing_skew=requests.routing_skew))


def chunk_share(deployment: Deployment, system: SystemSpec, requests: Requests) -> float:
    """Of the passes of decode, those that read a chunk: a batch stays full where prompts come as answers end."""
    sequences = requests.batch / replicas(deployment, system)
    read = sequences * requests.tokens_a_pass(deployment.drafts) * requests.context / requests.output
    if read > deployment.chunk:
        raise ValueError(
            f"chunk: {sequences:g} sequences on a replica end so often that every pass must read {read:.0f} tokens of "
            f"prompts, but chunk is {deployment.chunk}; try {math.ceil(read)}, a smaller batch or longer outputs"
        )
    return read / deployment.chunk


def check_deployment(model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests) -> None:
    """ValueError with the first law that is broken."""
    if system.segments:
        law = f"a model answers from chips of one kind, but {system.name} has {system.told_chips}"
        raise ValueError(f"segments: {law}; name one cluster")
    _check_phase(model, requests)
    routing_of(model, requests)  # refuses a skew that no router has
    _check_several(model, deployment, requests)
    _check_formats(deployment, system)
    _check_degrees(model, deployment, system)
    dp = replicas(deployment, system)
    if requests.batch % dp:
        raise ValueError(
            f"batch: batch ({requests.batch}) must be divisible by dp ({dp}), which is num_chips / (tp * pp); "
            f"try a multiple of {dp}, or degrees that leave another dp"
        )
    if deployment.chunk:
        chunk_share(deployment, system, requests)
    if deployment.overlap_ep and deployment.ep > 1 and requests.batch // dp < 2:
        raise ValueError(f"overlap_ep: two halves of a batch need 2 sequences on each of {dp} replicas, but batch is "
                         f"{requests.batch}; try {2 * dp}, or overlap_ep: false")  # fmt: skip


def _check_phase(model: ModelSpec, requests: Requests) -> None:
    is_decode = isinstance(model, CapturedModel) and model.captured.phase == "decode"
    if is_decode and requests.phase is not ServingPhase.DECODE:
        law = f"{model.name} is a graph of decode, which has no prompt"
        raise ValueError(f"phase: {law}; use one that was captured with --phase prefill")


def _check_several(model: ModelSpec, deployment: Deployment, requests: Requests) -> None:
    """Passes with more than one token of a sequence, or with tokens of prompts."""
    for name in ("drafts", "chunk"):
        if not getattr(deployment, name):
            continue
        if requests.phase is not ServingPhase.DECODE:
            raise ValueError(f"{name}: {name} are of decode, but the phase is prefill; leave {name} out")
        if model.mla is not None and not deployment.absorb:
            raise ValueError(f"{name}: latents of all queries are projected up at once only where they are absorbed; "
                             f"leave absorb: false out, or {name}")  # fmt: skip
    if deployment.drafts and not model.num_mtp_layers:
        raise ValueError(f"drafts: a prediction module of the model's own makes drafts, but {model.name} has none "
                         "(num_mtp_layers is 0); leave drafts out")  # fmt: skip
    if deployment.drafts and any(layer.mixer in RECURRENT for layer in model.layer_specs):
        raise ValueError(f"drafts: states of {model.name} cannot go back to before a refused draft; leave drafts out")
    if not deployment.chunk:
        return
    if isinstance(model, CapturedModel) and model.captured.phase == "decode":
        raise ValueError(
            f"chunk: {model.name} is a graph of decode, which has no prompt; capture it with --phase prefill"
        )
    if deployment.chunk > requests.context:
        raise ValueError(f"chunk: a chunk must be at most a prompt, but got {deployment.chunk} of {requests.context} "
                         f"tokens; lower chunk")  # fmt: skip


def _check_formats(deployment: Deployment, system: SystemSpec) -> None:
    recipe, chip = deployment.formats.recipe, system.chip
    for dtype in dict.fromkeys((recipe.gemm, recipe.attention)):
        if not chip.offers(dtype):
            offered = ", ".join(d.value for d in chip.matrix_flops_per_s)
            raise ValueError(
                f"engine: activations ({deployment.formats.activations}) need a matrix engine for {dtype.value}, but "
                f"{chip.name} has {offered}; choose other activations (weights may be narrower) or another chip"
            )


def _check_degrees(model: ModelSpec, deployment: Deployment, system: SystemSpec) -> None:
    strategy = deployment.strategy(sequences=1, has_experts=model.moe is not None, graphs=CudaGraph.NONE)
    case = Case.of(model, strategy, system, Workload(seq=1, global_batch=replicas(deployment, system)))
    for number, rule in enumerate(RULES):
        if rule.name in SHARED and not np.all(rule.ok(case)):
            raise ValueError(explain(case, number + 1))
