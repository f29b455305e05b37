"""One measured row to the model, strategy, system and workload that it ran: the row mapping of `search validate`.

Reads configuration columns only: never source, source_url, family, case_id, the model's name, notes, measured values or
what a peer predicted. Refuses, with a reason, what the product cannot model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from estimator.layers import LayerSpec, Mlp
from estimator.layout import even_layers
from estimator.model import MLASpec, ModelSpec, MoESpec, Norm
from estimator.precision import RECIPES, with_bf16_grads
from estimator.strategy import (
    DEFAULT_FUSION,
    CudaGraph,
    Fusion,
    Optimizer,
    Overlap,
    Recompute,
    RecomputeKind,
    Schedule,
    Strategy,
)
from estimator.workload import Workload
from hardware.catalog import system_of
from hardware.software import software
from hardware.system import SystemSpec
from search.assumptions import Cells, generation
from search.layout import chunk_layers, filled_layers
from search.measured import Row

__all__ = ["Configuration", "configuration"]

_ARCHES = frozenset({"gpt", "llama", "moe-mixtral", "moe-deepseek"})
_ATTENTIONS = frozenset({"mha", "gqa", "mla", "window"})
_MEGATRON_VOCAB_MULTIPLE = 128  # --make-vocab-size-divisible-by, times tp
_NOT_CHOICES = (
    # (column, values without effect, why the rest is ignored)
    ("fsdp_mode", {""}, "gathers use the dtypes of the precision recipe"),
    ("compiled", {"", "0"}, "kernels are fused as `fusion` says"),
    ("grad_accum_dtype", {"", "fp32"}, "gradients have the dtype of the precision recipe"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a row ran. `assumed` lists what the row did not say."""

    model: ModelSpec
    strategy: Strategy
    system: SystemSpec
    workload: Workload
    assumed: tuple[str, ...]


def configuration(row: Row) -> Configuration:
    """The configuration of a row. ValueError where a cell is unusable or the product cannot model it."""
    if row.defect:
        raise ValueError(row.defect)
    cells = Cells(row)
    model = _model(cells)
    workload = Workload(seq=cells.integer("seq"), global_batch=cells.integer("global_batch"))
    strategy = _strategy(cells, model)
    system = _system(cells)
    for column, without_effect, why in _NOT_CHOICES:
        if row.cells[column] not in without_effect:
            cells.note(f"{column}={row.cells[column]} ignored", why)
    return Configuration(model=model, strategy=strategy, system=system, workload=workload, assumed=tuple(cells.assumed))


def _model(cells: Cells) -> ModelSpec:
    arch, attention = cells.text("arch"), cells.text("attention")
    if arch not in _ARCHES:
        raise ValueError(f"arch {arch} is not modelled; modelled are {', '.join(sorted(_ARCHES))}")
    if attention not in _ATTENTIONS:
        raise ValueError(f"attention {attention} is not modelled; modelled are {', '.join(sorted(_ATTENTIONS))}")
    is_gpt = arch == "gpt"
    cells.note("norm and biases", "LayerNorm with biases" if is_gpt else "RMSNorm without biases")
    dropout = generation(cells.row.cells["framework"]).dropout if is_gpt else 0.0
    if dropout:
        cells.note(f"attention_dropout={dropout}, hidden_dropout={dropout}", "default of the framework's generation")
    vocab_multiple = 1 if cells.row.has("vocab") else _MEGATRON_VOCAB_MULTIPLE
    moe = _moe(cells) if arch.startswith("moe-") else None
    layers = _windowed(cells, moe) if attention == "window" else None
    return ModelSpec(
        name=arch,
        num_layers=cells.integer("layers"),
        hidden=cells.integer("hidden"),
        ffn=cells.integer("ffn"),
        num_heads=cells.integer("heads"),
        num_kv_heads=cells.integer("kv_heads"),
        head_dim=cells.integer("head_dim"),
        vocab=cells.integer("vocab"),
        gated_mlp=cells.flag("gated_mlp"),
        tied_embeddings=cells.flag("tied_embeddings"),
        norm=Norm.LAYER if is_gpt else Norm.RMS,
        attention_bias=is_gpt,
        attention_output_bias=is_gpt,
        mlp_bias=is_gpt,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        mla=_mla(cells) if attention == "mla" else None,
        layers=layers,
        moe=replace(moe, num_dense_layers=0) if moe and layers else moe,
        num_mtp_layers=_num_mtp_layers(cells, arch),
        vocab_multiple=vocab_multiple,
    )


def _windowed(cells: Cells, moe: MoESpec | None) -> tuple[LayerSpec, ...]:
    """The layers of a model of which some see a window; the table has no columns for its width and pattern."""
    width, every = (128, 2) if moe else (4096, 1)
    cells.note(
        f"window={width}, one layer of {every} has it",
        "as GPT-OSS (arXiv:2508.10925)" if moe else "as Mistral 7B (arXiv:2310.06825)",
    )
    return tuple(
        LayerSpec(
            window=0 if i % every else width,
            mlp=Mlp.DENSE if moe is None or i < moe.num_dense_layers else Mlp.MOE,
        )
        for i in range(cells.integer("layers"))
    )


def _num_mtp_layers(cells: Cells, arch: str) -> int:
    """Only DeepSeek's architecture comes with such layers, so that an empty cell of another says nothing."""
    known = cells.row.has("mtp_layers") or arch == "moe-deepseek"
    return cells.integer("mtp_layers", least=0) if known else 0


def _mla(cells: Cells) -> MLASpec:
    return MLASpec(
        q_lora_rank=cells.integer("q_lora_rank", least=0),
        kv_lora_rank=cells.integer("kv_lora_rank"),
        qk_nope_head_dim=cells.integer("qk_nope_dim"),
        qk_rope_head_dim=cells.integer("qk_rope_dim"),
        v_head_dim=cells.integer("v_head_dim"),
    )


def _moe(cells: Cells) -> MoESpec:
    routing = cells.text("moe_routing")
    if routing not in {"balanced", "token-drop"}:
        raise cells.row.bad("moe_routing", f"must be balanced or token-drop, but got {routing!r}")
    shared, ffn = cells.integer("shared_experts", least=0), cells.integer("moe_ffn")
    if shared:
        cells.note(f"shared_ffn={shared * ffn}", "a shared expert is as wide as a routed one")
    return MoESpec(
        num_experts=cells.integer("experts"),
        top_k=cells.integer("top_k"),
        ffn=ffn,
        num_shared_experts=shared,
        shared_ffn=shared * ffn,
        num_dense_layers=cells.integer("first_dense_layers", least=0),
        # What is captured whole has shapes that routing does not change.
        capacity_factor=1.0 if routing == "token-drop" or cells.row.cells["cuda_graph"] == "full_iteration" else None,
    )


def _system(cells: Cells) -> SystemSpec:
    try:
        system, assumed = _system_of(
            gpu=cells.text("gpu"),
            gpus_per_node=cells.integer("gpus_per_node"),
            n_gpus=cells.integer("n_gpus"),
            intra_node=cells.row.cells["intra_node"],
            inter_node=cells.row.cells["inter_node"],
        )
    except ValueError as error:
        raise cells.row.bad("gpu, gpus_per_node, n_gpus, intra_node or inter_node", str(error)) from error
    for line in assumed:
        cells.note("system", line)
    known = generation(cells.row.cells["framework"]).software
    if known:
        cells.note(f"software={known}", "default of the framework's generation")
        system = system.running(software(known))
    return system


_system_of = lru_cache(maxsize=1024)(system_of)  # a table has few


def _strategy(cells: Cells, model: ModelSpec) -> Strategy:
    tp, cp, pp, vpp = (cells.integer(column) for column in ("tp", "cp", "pp", "vpp"))
    is_moe = model.moe is not None
    ep, etp = (cells.integer(column) if is_moe or cells.row.has(column) else 1 for column in ("ep", "etp"))
    dp = _data_parallel(cells, tp * cp * pp)
    schedule = _schedule(cells, pp, vpp)
    overlap = _overlap(cells, tp=tp, ep=ep, dp=dp, pp=pp, schedule=schedule)
    zero_stage = cells.integer("zero_stage", least=0)
    if cp > 1:
        cells.note("context_parallel=ring", "Megatron's and this product's default")
    recompute, recompute_layers = _recompute(cells)
    return Strategy(
        tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp, schedule=schedule,
        micro_batch=cells.integer("micro_batch"),
        layout=_layout(cells, num_chunks=pp * vpp, model=model),
        sequence_parallel=cells.flag("sp") and tp > 1,
        zero_stage=zero_stage,
        recompute=recompute,
        recompute_layers=recompute_layers,
        precision=_precision(cells),
        optimizer=_optimizer(cells),
        overlap=overlap,
        cuda_graph=_cuda_graph(cells),
        bucket_bytes=_bucket_bytes(cells, dp) if overlap.dp and dp > 1 and zero_stage < 3 else 0,
        fusion=_fusion(cells),
    )  # fmt: skip


def _data_parallel(cells: Cells, model_parallel: int) -> int:
    num_gpus = cells.integer("n_gpus")
    if num_gpus % model_parallel:
        raise cells.row.bad("n_gpus", f"must be divisible by tp * cp * pp ({model_parallel}), but got {num_gpus}")
    dp = cells.integer("dp")
    if dp * model_parallel != num_gpus:
        raise cells.row.bad("dp", f"must be n_gpus / (tp * cp * pp) = {num_gpus // model_parallel}, but got {dp}")
    return dp


def _schedule(cells: Cells, pp: int, vpp: int) -> Schedule:
    name = cells.text("schedule")
    if name == "none":
        if pp * vpp > 1:
            raise cells.row.bad("schedule", f"must name a pipeline schedule where pp ({pp}) or vpp ({vpp}) is above 1")
        return Schedule.ONE_F_ONE_B
    if name == "interleaved" and vpp == 1:
        return Schedule.ONE_F_ONE_B  # One chunk a rank has nothing to interleave.
    if name not in {schedule.value for schedule in Schedule}:
        raise ValueError(f"schedule {name} is not modelled; modelled are {', '.join(s.value for s in Schedule)}")
    return Schedule(name)


def _overlap(cells: Cells, *, tp: int, ep: int, dp: int, pp: int, schedule: Schedule) -> Overlap:
    """Flags of traffic that there is; Megatron overlaps stage-to-stage sends only where it interleaves."""
    interleaved = schedule is Schedule.INTERLEAVED
    if pp > 1:
        cells.note(f"overlap_pp={int(interleaved)}", "Megatron overlaps sends between stages where it interleaves")
    return Overlap(
        tp=int(tp > 1 and cells.flag("tp_comm_overlap")),
        ep=int(ep > 1 and cells.flag("ep_overlap")),
        dp=int(dp > 1 and cells.flag("dp_overlap")),
        pp=int(interleaved),
    )


def _bucket_bytes(cells: Cells, dp: int) -> float:
    # Megatron Core's DistributedDataParallel: max(40M, 1M * dp) parameters a bucket, of fp32 gradients.
    nbytes = 4 * max(40_000_000, 1_000_000 * dp)
    cells.note(f"bucket_bytes={nbytes}", "Megatron Core's default bucket")
    return float(nbytes)


def _layout(cells: Cells, *, num_chunks: int, model: ModelSpec) -> tuple[int, ...] | None:
    """Layers per chunk; None: equally many. Explicit otherwise: an end may hold embedding or loss and no layer."""
    if num_chunks > 1 and cells.row.has("pp_layout"):
        try:
            return chunk_layers(
                cells.row.cells["pp_layout"],
                num_chunks=num_chunks,
                num_layers=model.num_layers,
                num_mtp_layers=model.num_mtp_layers,
            )
        except ValueError as error:
            raise cells.row.bad("pp_layout", str(error)) from error
    if model.num_layers % num_chunks == 0:
        return None
    filled = filled_layers(num_layers=model.num_layers, num_chunks=num_chunks) if model.num_mtp_layers else None
    if filled is not None:
        cells.note(f"pp_layout={filled[0]} ... {filled[-1]}", "Megatron's layout of models with MTP")
        return filled
    layout = even_layers(model.num_layers, num_chunks)
    cells.note(
        f"pp_layout={layout[0]} ... {layout[-1]}", "as even as it goes; the ends, with embedding and loss, stay short"
    )
    return layout


def _recompute(cells: Cells) -> tuple[Recompute, int]:
    """What is run again, and of how many layers where the kind is block."""
    text, setting = cells.text("recompute"), cells.row.cells["recompute_layers"]
    block = re.fullmatch(r"block(?:-(\d{1,6}))?", text)
    if block:
        count = int(block[1]) if block[1] else cells.integer("recompute_layers", least=0)
        return (Recompute(kind=RecomputeKind.BLOCK), count) if count else (Recompute(), 0)
    if text == "full" and setting == "0":
        return Recompute(), 0
    modules = [name.strip() for name in re.split(r"[,;]", cells.row.cells["recompute_modules"]) if name.strip()]
    if text != "selective" or modules == ["unset"]:
        modules = []
    if text not in {"none", "full", "selective"}:
        raise cells.row.bad("recompute", f"must be none, selective, full or block-N, but got {text!r}")
    if text == "selective" and not modules:
        cells.note("recompute_modules=core_attn", "what selective recompute means in Megatron")
    try:
        return Recompute.parse(modules or text), 0
    except ValueError as error:
        raise cells.row.bad("recompute_modules", str(error)) from error


def _precision(cells: Cells) -> str:
    name = cells.text("precision")
    if name not in RECIPES:
        raise ValueError(f"precision {name} is not modelled; modelled are {', '.join(sorted(RECIPES))}")
    if cells.row.has("grad_accum_dtype") or not generation(cells.row.cells["framework"]).bf16_grads:
        return name
    halved = with_bf16_grads(name)
    if halved != name:
        cells.note(f"precision={halved}", "gradients in bf16, default of the framework's generation")
    return halved


def _cuda_graph(cells: Cells) -> CudaGraph:
    """What a framework's graphs hold, as far as scopes here tell: the iteration, whole layers, or their attention."""
    implementation, _, scopes = cells.row.cells["cuda_graph"].partition(":")
    if implementation in {"", "none"}:
        return CudaGraph.NONE
    if implementation == "full_iteration":
        return CudaGraph.FULL
    if scopes:
        cells.note("cuda_graph=attention", f"of {scopes}, the part that no routing decides")
        return CudaGraph.ATTENTION
    cells.note("cuda_graph=layer", f"{implementation} captures layer by layer")
    return CudaGraph.LAYER


def _optimizer(cells: Cells) -> Optimizer:
    name = cells.text("optimizer")
    if name == "lamb":
        cells.note("optimizer=adam", "LAMB has Adam's states; its norm of every layer is left out")
    name = "adam" if name in {"adamw", "lamb"} else name  # Weight decay adds no state and no traffic.
    if name not in {optimizer.value for optimizer in Optimizer}:
        raise ValueError(f"optimizer {name} is not modelled; modelled are {', '.join(o.value for o in Optimizer)}")
    return Optimizer(name)


def _fusion(cells: Cells) -> frozenset[Fusion]:
    fusion = set(DEFAULT_FUSION - {Fusion.FLASH_ATTENTION})
    if cells.flag("flash_attention"):
        fusion.add(Fusion.FLASH_ATTENTION)
    more = generation(cells.row.cells["framework"]).fusion
    if more:
        names = ", ".join(sorted(kernel.value for kernel in more))
        cells.note(f"fusion has {names}", "default of the framework's generation")
    return frozenset(fusion | more)
