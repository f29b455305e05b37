"""Rows of measured steps for tests: one plausible row, changed cell by cell, and a predictor that sees every field."""

from __future__ import annotations

import csv
import zlib
from dataclasses import dataclass
from pathlib import Path

from estimator.model import ModelSpec
from estimator.strategy import Strategy
from estimator.workload import Workload
from hardware.system import SystemSpec

HEADER = (
    "case_id,family,complete,source,source_url,model,arch,layers,hidden,ffn,heads,kv_heads,head_dim,vocab,seq,gated_mlp,"
    "tied_embeddings,attention,flash_attention,experts,top_k,moe_ffn,shared_experts,first_dense_layers,mtp_layers,"
    "q_lora_rank,kv_lora_rank,qk_nope_dim,qk_rope_dim,v_head_dim,params_b,gpu,gpus_per_node,n_gpus,intra_node,inter_node,"
    "tp,sp,cp,pp,vpp,ep,etp,dp,zero_stage,schedule,micro_batch,global_batch,recompute,recompute_modules,recompute_layers,"
    "cuda_graph,pp_layout,ep_overlap,fsdp_mode,moe_routing,attention_kernel,compiled,precision,grad_accum_dtype,optimizer,"
    "framework,tp_comm_overlap,dp_overlap,step_time_s,tokens_per_s_per_gpu,tflops_per_gpu,mfu,hfu,peak_mem_gib,mem_kind,"
    "peer,peer_step_time_s,peer_mfu,peer_mem_gib,notes"
).split(",")

_BASE = dict.fromkeys(HEADER, "") | {
    "case_id": "a", "family": "made-up", "complete": "1", "arch": "llama", "layers": "32", "hidden": "4096",
    "ffn": "14336", "heads": "32", "kv_heads": "8", "head_dim": "128", "vocab": "128256", "seq": "8192",
    "gated_mlp": "1", "tied_embeddings": "0", "attention": "gqa", "flash_attention": "1", "gpu": "h100-80g-sxm",
    "gpus_per_node": "8", "n_gpus": "64", "intra_node": "nvlink4-900", "inter_node": "ib-ndr-8x400g", "tp": "4",
    "sp": "1", "cp": "1", "pp": "2", "vpp": "1", "ep": "1", "etp": "1", "dp": "8", "zero_stage": "1",
    "schedule": "1f1b", "micro_batch": "1", "global_batch": "128", "recompute": "none", "precision": "bf16",
    "optimizer": "adam", "framework": "megatron-lm", "tp_comm_overlap": "0", "dp_overlap": "0", "step_time_s": "2.0",
}  # fmt: skip
MOE = {
    "arch": "moe-mixtral", "experts": "8", "top_k": "2", "moe_ffn": "14336", "ep": "8", "etp": "1",
    "moe_routing": "balanced",
}  # fmt: skip
MLA = {
    "attention": "mla", "kv_heads": "32", "head_dim": "", "q_lora_rank": "1536", "kv_lora_rank": "512",
    "qk_nope_dim": "128", "qk_rope_dim": "64", "v_head_dim": "128",
}  # fmt: skip


def cells(**changes: str) -> dict[str, str]:
    """The plain row with some cells changed."""
    unknown = set(changes) - set(HEADER)
    assert not unknown, unknown
    return _BASE | changes


def write(path: Path, *rows: dict[str, str]) -> Path:
    """A table of those rows."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, HEADER)
        writer.writeheader()
        writer.writerows(rows)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a predictor of a test says."""

    step_time_s: float
    peak_memory_bytes: float = 1e9
    reserved_memory_bytes: float = 2e9
    device_memory_bytes: float = 3e9
    reason: str = ""


def fingerprint(model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload) -> Told:
    """A step time that changes with any field of the configuration."""
    fusion = sorted(f.value for f in strategy.fusion)
    text = repr((model, strategy.sizes(), strategy.layout, strategy.schedule, strategy.precision, strategy.zero_stage,
                 strategy.sequence_parallel, str(strategy.recompute), fusion, system, workload))  # fmt: skip
    return Told(step_time_s=1.0 + zlib.crc32(text.encode()))
