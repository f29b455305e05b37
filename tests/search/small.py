"""Small spaces that differ in what they stress, random ones, and what a search of them finds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from search.launch import final_front
from search.space import Space
from search.structures import enumerate_space
from search.sweep import prepare, sweep_plan
from tests.search.naive import space_of

__all__ = ["MIDDLE", "SMALL", "any_space", "enumerated", "swept"]

Front = dict[int, tuple[float, ...]]


def swept(space: Space, *, prune: bool = True, reverse: bool = False, shuffled: bool = False) -> Front:
    """Objectives by id of the front that a search of the space ends with; `shuffled`: structures in any order."""
    plan = prepare(space, prune=prune)
    if shuffled:
        plan.order = np.random.default_rng(0).permutation(plan.order)
    ids, columns = final_front(plan, sweep_plan(plan, reverse=reverse))
    rows = zip(*(columns[o.column] for o in space.objectives), strict=True) if len(ids) else ()
    return {int(i): tuple(map(float, row)) for i, row in zip(ids, rows, strict=True)}


def enumerated(space: Space) -> Front:
    """The same from the worker's own enumeration: every candidate in batches, no nest, no staircase, no bounds."""
    plan = prepare(space, prune=False)
    plan = replace(plan, bounded=False)
    found = sweep_plan(plan)
    return {int(i): tuple(map(float, row)) for i, row in zip(found.ids, found.values, strict=True)}


TWO = "objectives: [step_time_s, peak_memory_bytes]\n"
CONSTRAINED = """\
constraints: ['tp * zero_stage <= 4', 'overlap_dp == 0 or bucket_bytes > 0', 'peak_memory_bytes <= 60e9']
"""
SMALL = {
    "tensor and context": space_of(
        "tp: [1, 2, 4], pp: [1, 2], cp: [1, 2], context_parallel: [ulysses, ring, all-gather], "
        "sequence_parallel: [true, false], zero_stage: [0, 1, 3], overlap: {tp: [0, 1], dp: [1, 0]}, "
        "bucket_bytes: [0, 50e6]"
    ),
    "reductions beside weight gradients": space_of(
        "tp: [1, 2, 4], pp: [1, 2, 4], sequence_parallel: [true, false], schedule: [1f1b, zb-h1, zb-v], vpp: [1, 2], "
        "zero_stage: [0, 2], overlap: {tp: [0, 1], dp: [1, 0]}",
        system="{cluster: dgx_h100, num_chips: 16, software: megatron_moe}",
    ),
    "more ranks than kv heads": space_of(
        "tp: [8, 16], cp: [1, 2], context_parallel: [ulysses, ring], sequence_parallel: [false, true], "
        "zero_stage: [1, 0]"
    ),
    "every schedule": space_of(
        "pp: [1, 2, 4], vpp: [1, 2], schedule: [gpipe, 1f1b, interleaved, zb-h1, dualpipe], recompute: [none, "
        "selective, block, full], recompute_layers: [0, 2, 8, 40], zero_stage: [0, 2], overlap: {pp: [0, 1]}"
    ),
    "walked schedules": space_of(
        "pp: [2, 4], vpp: [1, 2], schedule: [zb-h2, zb-1p, zb-2p, zb-v, v-half, v-min, dualpipe-v, breadth-first], "
        "recompute: [none, full], zero_stage: [0, 2], overlap: {pp: [0, 1], dp: [0, 1]}",
        batch=64,
    ),
    "groups of micro-batches": space_of(
        "pp: [2, 4], vpp: [1, 2], ep: [1, 4], schedule: [interleaved, 1f1b, dualpipe-v], "
        "interleave_group: [0, 2, 4, 8], overlap: {ep: [0, 1]}, recompute: [none, full]",
        model="mixtral", batch=64, chips="32",
    ),
    "blocks without full": space_of(
        "pp: [2, 4], recompute: [block, layernorm+mla_up_proj, layernorm], recompute_layers: {range: [1, 20]}, "
        "zero_stage: [0, 3], micro_batch: [2, 1]"
    ),
    "latent attention and prediction": space_of(
        "pp: [4, 8], ep: [8, 16, 32], schedule: [1f1b, dualpipe], recompute: [mla_up_proj, mlp_act, block, "
        "full], recompute_layers: [3, 20], zero_stage: [1, 3], overlap: {ep: [0, 1], dp: [0, 1]}, bucket_bytes: "
        "[0, 100e6], precision: [bf16, fp8_block]",
        model="deepseek", chips="512", cluster="dgx_h800", batch=1024,
    ),
    "experts": space_of(
        "tp: [1, 2], ep: [1, 4, 8], etp: [1, 2], pp: [1, 2], sequence_parallel: [false, true], recompute: [none, "
        "moe, moe_act, mla_up_proj], zero_stage: [1, 2, 3], overlap: {ep: [0, 1], dp: [0, 1]}, bucket_bytes: [0, "
        "1e6, 1e12]",
        model="mixtral", chips="32",
    ),
    "scans, attention and experts in a pattern": space_of(
        "tp: [1, 2], cp: [1, 2], pp: [2, 4], ep: [1, 8], sequence_parallel: [true], recompute: [none, core_attn, mlp, "
        "mlp_act, block, full], recompute_layers: [0, 5, 9], zero_stage: [1, 3], overlap: {ep: [0, 1], dp: [0, 1]}",
        model="hybrid", chips="64", batch=128,
    ),
    "windows in turn": space_of(
        "tp: [1, 2, 4], cp: [1, 2], context_parallel: [ring, all-gather, ulysses], pp: [1, 2], ep: [4, 8], "
        "sequence_parallel: [true], recompute: [none, mlp, moe_act], zero_stage: [0, 1], micro_batch: [1, 2]",
        model="windows", chips="32",
    ),
    "compressed keys": space_of(
        "tp: [1, 8, 16], cp: [1, 2], context_parallel: [all-gather, ring], fusion: [[flash_attention], [fused_norm]], "
        "pp: [4, 8], ep: [8, 32], sequence_parallel: [true], schedule: [1f1b, dualpipe], recompute: [none, layernorm, "
        "full], zero_stage: [1, 3]",
        model="compressed", chips="256", batch=512,
    ),
    "one layout": space_of(
        "pp: [2, 4], layout: [9, 7, 8, 8], recompute: [full, block], recompute_layers: [8, 9, 10], zero_stage: "
        "[0, 1]"
    ),
    "chunks without layers": space_of(
        "pp: 2, vpp: [16, 17, 18], schedule: interleaved, recompute: [none, block, full], recompute_layers: [1, 2], "
        "zero_stage: [0, 1], overlap: {pp: [0, 1]}"
    ),
    "several layouts": space_of(
        "pp: [1, 2, 4], layout: [auto, even, [9, 7, 8, 8], 'Et*8|(t*8|)*2t*8L', Et*17|t*15L], zero_stage: [0, 1], "
        "recompute: [none, full, block], recompute_layers: [4, 8, 16]"
    ),
    "even and balanced": space_of(
        "pp: [4, 8], ep: [8, 16], vpp: [1, 2], schedule: [1f1b, interleaved, dualpipe], layout: [even, auto], "
        "recompute: [layernorm, block, full], recompute_layers: [3, 5, 9], zero_stage: [1, 3], overlap: {ep: [0, 1]}",
        model="deepseek", chips="512", cluster="dgx_h800", batch=1024,
    ),
    "balanced alone": space_of(
        "pp: [1, 2, 4], micro_batch: [1, 2], layout: auto, zero_stage: [0, 3], recompute: [none, full]",
        model="mixtral", chips="32",
    ),
    "no data parallelism": space_of(
        "tp: 4, pp: 4, sequence_parallel: [true, false], zero_stage: [3, 1], overlap: {dp: [1, 0], pp: [1, 0]}, "
        "bucket_bytes: [7, 9], recompute: [none, full]"
    ),
    "two copies": space_of(
        "pp: [4, 8, 16], schedule: [1f1b, dualpipe], zero_stage: [0, 1, 3], overlap: {dp: [0, 1]}, bucket_bytes: "
        "[0, 1e8]",
        batch=64,
    ),
    "replicas and what is gathered when": space_of(
        "tp: [1, 2], cp: [1, 2], pp: [1, 2], ep: [1, 4], sequence_parallel: true, zero_stage: [0, 1, 2, 3], "
        "dp_replicate: [2, 1, 4], reshard_after_forward: [1, 0], prefetch_blocks: [2, 0, 1], overlap: {dp: [0, 1]}, "
        "bucket_bytes: [0, 50e6]",
        model="mixtral", chips="32",
    ),
    "offload": space_of(
        "pp: [1, 4], schedule: [1f1b, zb-h1], recompute: [none, full], zero_stage: [0, 1, 3], dp_replicate: [1, 2], "
        "offload: {activations: [0, 0.5], parameters: [0, 1], gradients: [0, 1], states: [0, 0.4, 1]}, "
        "overlap: {dp: [0, 1]}"
    ),
    "rank orders": space_of(
        "tp: [1, 2], cp: [1, 2], pp: [1, 2, 8], ep: [1, 2, 4], sequence_parallel: true, zero_stage: [0, 1], "
        "rank_order: [tp-cp-pp-dp, tp-cp-dp-pp], recompute: full",
        model="mixtral", chips="32",
    ),
    "layers recomputed by chunk": space_of(
        "pp: [1, 2, 4], vpp: [1, 2], schedule: [1f1b, interleaved, zb-h1], recompute: [none, block, full, layernorm], "
        "recompute_layers: [3, 0, 16, 2], recompute_per_chunk: [[2, 1, 0, 3], null, [16, 0], [3, 3], [0, 0], [32]], "
        "zero_stage: [0, 1], overlap: {pp: [0, 1], tp: [0, 1]}"
    ),
    "layers recomputed by chunk under a constraint": space_of(
        "pp: 2, layout: [15, 17], recompute: [block, none], recompute_layers: [1, 2], recompute_per_chunk: "
        "[[15, 17], [15, 16], [0, 18], null], zero_stage: [0, 3]",
        more="constraints: ['recompute_layers != 1']\n",
    ),
    "pieces of tensor-parallel traffic": space_of(
        "tp: [1, 2, 4], sequence_parallel: [true, false], zero_stage: [0, 1], overlap: {tp: [1, 0], dp: [0, 1]}, "
        "tp_chunks: [2, {attention_in: 1, mlp_out: 8}, 4], recompute: [none, full], micro_batch: [1, 2]"
    ),
    "buckets of experts": space_of(
        "ep: [1, 4, 8, 32], pp: [1, 2], zero_stage: [0, 1, 2, 3], overlap: {dp: [0, 1], ep: [0, 1]}, "
        "bucket_bytes: [0, 1e8, 1e12], expert_bucket_bytes: [4e8, null, 0, 1e7]",
        model="mixtral", chips="32",
    ),
    "buckets of no experts": space_of(
        "tp: [1, 4], pp: [1, 4], zero_stage: [0, 1], overlap: {dp: [0, 1]}, expert_bucket_bytes: [1e7, null]",
    ),
    "skewed routing and copies of experts": space_of(
        "ep: [1, 4, 8, 16], pp: [1, 2], zero_stage: [0, 1, 3], overlap: {dp: [0, 1], ep: [0, 1]}, recompute: [none, "
        "moe], redundant_experts: [8, 0, 4, 99]",
        model="mixtral", chips="32", skew=0.6,
    ),
    "copies of no experts": space_of("tp: [1, 2], pp: [1, 2], zero_stage: [0, 1], redundant_experts: [4, 0]"),
    "variants of kernels": space_of(
        "tp: [1, 2], cp: [1, 2], sequence_parallel: true, precision: [bf16, fp8], overlap: {cp: [0, 1], tp: [0, 1]}, "
        "fusion: [[flash_attention], [fused_norm, flash_attention, fused_loss]], tp_chunks: [1, 4], "
        "cuda_graph: [none, layer], zero_stage: [0, 3], recompute: [none, full]"
    ),
    "kernels of experts under a constraint": space_of(
        "ep: [1, 4], pp: [1, 2], precision: [fp8, bf16], zero_stage: [0, 1, 3], overlap: {dp: [0, 1]}, "
        "expert_bucket_bytes: [null, 1e7], fusion: [[flash_attention], [flash_attention, fused_permute]], "
        "offload: {states: [0, 1]}",
        model="mixtral", chips="32", more="constraints: [\"precision == 'bf16' or zero_stage >= 1\", "
        "'overlap_dp + offload_states <= 1']\n",
    ),
    "muon beside what is on the host": space_of(
        "pp: [1, 2], optimizer: [adam, muon, sgd], offload: {states: [0, 0.5, 1], gradients: [0, 1]}, "
        "zero_stage: [0, 2, 3], reshard_after_forward: [1, 0], recompute: [none, full]"
    ),
    "a recipe that a chip cannot run": space_of(
        "tp: [1, 2], precision: [fp8, bf16, fp16], zero_stage: [0, 1], cuda_graph: [layer, none]",
        system="[{cluster: dgx_a100, num_chips: 16}, {cluster: dgx_h100, num_chips: 16}]",
    ),
    "two systems": space_of(
        "tp: [1, 2], pp: [1, 2], zero_stage: [0, 1, 3], recompute: [none, full]",
        system="[{cluster: dgx_h100, num_chips: [8, 12]}, {cluster: dgx_a100, num_chips: 16}]", batch=48, more=TWO,
    ),
    "cost over chip counts": space_of(
        "tp: [1, 2, 4], pp: [1, 2], zero_stage: [0, 1, 3], recompute: [none, selective, full], micro_batch: [1, "
        "2]",
        chips="[4, 8, 16, 32]", more="objectives: [step_time_s, peak_memory_bytes, num_gpus, cost_usd_per_mtoken]\n",
    ),
    "cost, energy and CO2 over chip counts": space_of(
        "tp: [1, 2, 4], pp: [1, 2], zero_stage: [0, 1, 3], recompute: [none, selective, full]",
        system="[{cluster: dgx_h100, num_chips: [8, 16, 32], grid: france}, {cluster: dgx_a100, num_chips: [16, 32], "
        "pue: 1.1, electricity_usd_per_kwh: 0.08, price_usd_per_hour: 0.5}]",
        more="objectives: [cost_usd_per_mtoken, energy_j_per_token, co2_kg_per_mtoken, peak_memory_bytes]\n"
        "constraints: ['co2_kg_per_mtoken <= 0.5', 'energy_j_per_token < 20']\n",
    ),
    "three objectives over five chip counts": space_of(
        "tp: [1, 2, 4], pp: [1, 2], zero_stage: [0, 1, 3], recompute: [none, full], micro_batch: [1, 2]",
        chips="[4, 8, 16, 32, 64]", more="objectives: [step_time_s, peak_memory_bytes, cost_usd_per_mtoken]\n",
    ),
    "two kinds of chips in one pipeline": space_of(
        "tp: [1, 2], pp: [1, 2, 4], schedule: [1f1b, gpipe, zb-h1, dualpipe], layout: [even, auto], zero_stage: [0, 1, "
        "3], recompute: [none, full], overlap: {dp: [0, 1]}, bucket_bytes: [0, 1e8]",
        system="{name: mixed, segments: [{cluster: dgx_h200, num_chips: 8}, {cluster: dgx_a100_40g, num_chips: 8}], "
        "link: {bytes_per_s: 100 Gb/s, latency_s: 20 us, efficiency: 0.8}}",
        more="objectives: [step_time_s, device_memory_bytes, cost_usd_per_mtoken, mfu_bf16]\n",
    ),
    "only chips": space_of("tp: [2, 1], zero_stage: [3, 1]", chips="[16, 8]", more="objectives: [num_gpus]\n"),
    "only memory": space_of("tp: [2, 1], pp: [1, 2], zero_stage: [0, 3]", more="objectives: [device_memory_bytes]\n"),
    "only speed": space_of("tp: [2, 1], pp: [1, 2], zero_stage: [0, 3]", more="objectives: {tokens_per_s: max}\n"),
    "maximised": space_of(
        "tp: [1, 2], sequence_parallel: [true, false], zero_stage: [0, 1, 3], recompute: [none, selective, full]",
        more="objectives: {mfu_bf16: maximise, reserved_memory_bytes: minimise, tokens_per_s_per_gpu: maximise}\n",
    ),
    "not bounded": space_of(
        "pp: [1, 2, 4], schedule: [1f1b, gpipe, zb-h1], zero_stage: [0, 1, 3], recompute: [none, full]",
        more="objectives: [bubble_s, step_time_s, exposed_comm_dp_s]\n"
        "constraints: ['bubble_s > 0', 'zero_stage < 3']\n",
    ),
    "against the grain": space_of(
        "tp: [1, 2], zero_stage: [0, 1, 3], recompute: [none, full]",
        more="objectives: {step_time_s: max, peak_memory_bytes: min}\n",
    ),
    "constraints": space_of(
        "tp: [1, 2, 4], pp: [1, 2], sequence_parallel: [true, false], zero_stage: [0, 1, 2, 3], recompute: "
        "[none, selective, "
        "full], overlap: {dp: [0, 1]}, bucket_bytes: [0, 50e6, 200e6]", more=CONSTRAINED,
    ),
    "constraints on texts": space_of(
        "pp: [1, 2, 4], schedule: [1f1b, gpipe], recompute: [none, full, block, mla_up_proj], recompute_layers: "
        "[2, 4], zero_stage: [0, 3]",
        more="constraints: [\"schedule != 'gpipe' and recompute != 'none'\", "
        "'step_time_s <= 20 and tokens_per_s > 1']\n",
    ),
    "a constraint on jitter": space_of(
        "tp: [1, 2], zero_stage: [0, 1, 3], recompute: [none, full]", more="constraints: ['jitter_s <= 0.01']\n"
    ),
}  # fmt: skip


AXES: Mapping[str, Sequence[str]] = {
    "tp": ("1", "2", "4", "8"), "cp": ("1", "2", "4"), "pp": ("1", "2", "4", "8"), "ep": ("1", "4", "8", "16"),
    "etp": ("1", "2"), "vpp": ("1", "2", "4"), "micro_batch": ("1", "2", "4"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe"), "sequence_parallel": ("true", "false"),
    "context_parallel": ("ring", "all-gather", "ulysses"), "rank_order": ("tp-cp-dp-pp", "tp-cp-pp-dp"),
    "precision": ("bf16", "fp8"),
    "recompute": (
        "none", "selective", "full", "block", "[layernorm]", "[mlp_act]", "[mla_up_proj]", "[moe]", "[moe, mlp]",
    ),
    "zero_stage": ("0", "1", "2", "3"), "bucket_bytes": ("0", "3e5", "25e6", "1e9", "1e13"),
    "tp_chunks": ("4", "1", "{attention_out: 2, mlp_in: 9}"), "expert_bucket_bytes": ("null", "0", "1e7", "1e12"),
    "redundant_experts": ("0", "8", "32"),
    "fusion": ("[flash_attention]", "[flash_attention, fused_norm]", "[flash_attention, fused_loss]", "[fused_norm]"),
    "cuda_graph": ("none", "layer", "attention"), "optimizer": ("adam", "muon", "sgd"), "dp_replicate": ("1", "2", "4"),
    "reshard_after_forward": ("1", "0"), "prefetch_blocks": ("1", "0", "2", "3"), "layout": ("even", "auto"),
}  # fmt: skip
UNLIKELY = {
    "cp", "vpp", "etp", "rank_order", "tp_chunks", "expert_bucket_bytes", "redundant_experts", "fusion", "cuda_graph",
    "dp_replicate", "reshard_after_forward", "prefetch_blocks", "layout", "optimizer",
}  # fmt: skip
SHARES = ("0", "0.25", "0.5", "1")
LAYERS = ("1", "2", "3", "7", "16", "40")
OBJECTIVES = (
    "step_time_s: min", "peak_memory_bytes: min", "num_gpus: min", "cost_usd_per_mtoken: min", "tokens_per_s: max",
    "mfu_bf16: max", "device_memory_bytes: min", "energy_j_per_token: min", "co2_kg_per_mtoken: min",
    "bubble_s: min", "hfu: max", "exposed_comm_dp_s: min", "model_tflops_per_gpu: max",
)  # fmt: skip
CONSTRAINTS = (
    "tp * pp <= 8", "zero_stage >= 1", "step_time_s <= 30", "peak_memory_bytes <= 50e9", "schedule != 'gpipe'",
    "dp > 1 and zero_stage != 2", "overlap_dp + overlap_pp <= 1", "mfu_bf16 >= 0.05", "num_micro_batches % 2 == 0",
    "recompute != 'full'", "bubble_s < 5", "min(step_time_s, 1e9) < 100 and micro_batch < 4",
    "num_gpus >= 16 or tp > 1",
)  # fmt: skip
SCALE = {"llama": (("8", "16", "32"), 64), "mixtral": (("32", "64"), 64), "qwen": (("128", "256"), 256),
         "deepseek": (("512", "768"), 768)}  # fmt: skip


def any_space(seed: int) -> Space:
    """A random space of at most a few thousand points, its axes in random order."""
    draw = random.Random(seed)
    model = draw.choice(sorted(SCALE))
    chips, batch = SCALE[model]

    def some(values: Sequence[str], most: int) -> str:
        return f"[{', '.join(draw.sample(values, min(draw.choice((1, 1, 2, most)), len(values))))}]"

    while True:
        unlikely = UNLIKELY | ({"ep"} if model == "llama" else set())
        axes = {n: some(v, 3) for n, v in AXES.items() if draw.random() < (0.15 if n in unlikely else 0.6)}
        if "block" in axes.get("recompute", ""):
            axes["recompute_layers"] = f"[{', '.join(sorted(draw.sample(LAYERS, draw.choice((1, 2, 4))), key=int))}]"
        chances = {"tp": 0.6, "ep": 0.6, "pp": 0.6, "dp": 0.6, "cp": 0.15}
        flags = {name: some(("0", "1"), 2) for name, chance in chances.items() if draw.random() < chance}
        kinds = ("activations", "parameters", "gradients", "states")
        shares = {name: some(SHARES, 3) for name in kinds if draw.random() < 0.1}
        if shares:
            axes["offload"] = f"{{{', '.join(f'{name}: {values}' for name, values in shares.items())}}}"
        flag_text = ", ".join(f"{name}: {values}" for name, values in flags.items())
        strategy = ", ".join(f"{name}: {values}" for name, values in axes.items()) + f", overlap: {{{flag_text}}}"
        some_objectives = OBJECTIVES[:2] + tuple(draw.sample(OBJECTIVES[2:], draw.choice((0, 0, 1, 2))))
        others = draw.sample(OBJECTIVES, draw.choice((1, 2, 3)))
        objectives = ", ".join(some_objectives if draw.random() < 0.7 else others)
        constraints = [f'"{text}"' for text in draw.sample(CONSTRAINTS, draw.choice((0, 0, 1)))]
        cluster, seq = draw.choice(("dgx_h100", "dgx_h200", "dgx_b300")), draw.choice((2048, 4096))
        space = space_of(
            strategy.lstrip(", "), model=model, cluster=cluster, seq=seq, batch=batch,
            chips=f"[{', '.join(draw.sample(chips, draw.choice((1, 1, 2))))}]",
            more=f"objectives: {{{objectives}}}\nconstraints: [{', '.join(constraints)}]\n",
        )  # fmt: skip
        if 50 <= space.raw_size <= 3000 and 20 <= enumerate_space(space).legal <= 600:
            return space


MIDDLE = {
    "dense": space_of(
        "tp: [1, 2, 4, 8], pp: [1, 2, 4], cp: [1, 2], vpp: [1, 2], micro_batch: [1, 2], schedule: [gpipe, 1f1b, "
        "interleaved, zb-h1, dualpipe], sequence_parallel: [true, false], recompute: [none, selective, block, "
        "full], recompute_layers: {range: [1, 8]}, zero_stage: [0, 1, 2, 3], overlap: {tp: [0, 1], pp: [0, 1], "
        "dp: [0, 1]}, bucket_bytes: [0, 2e7, 1e8, 1e9]",
        chips="[16, 32]", batch=64, more="objectives: [step_time_s, peak_memory_bytes, num_gpus]\n",
    ),
    "experts": space_of(
        "tp: [1, 2], pp: [4, 8], ep: [8, 32], schedule: [1f1b, interleaved, dualpipe], vpp: [1, 2], "
        "sequence_parallel: true, recompute: [none, layernorm+mla_up_proj, block, full], recompute_layers: [1, "
        "2, 3, 5, 9], zero_stage: [1, 2, 3], overlap: {ep: [0, 1], pp: [0, 1], dp: [0, 1]}, bucket_bytes: [0, "
        "1e7, 1e8], precision: [bf16, fp8_block]",
        model="deepseek", chips="512", cluster="dgx_h800", batch=1024,
    ),
}  # fmt: skip
