"""Nanotron's YAML, in only: its sizes, its three degrees and its buckets. Writes none."""

from __future__ import annotations

from collections.abc import Mapping

from results.launchers.job import Given, Imported
from results.launchers.paths import flattened
from results.launchers.reading import data_parallel, finished, model_label, whole_batch
from results.launchers.settings import Settings, Value
from results.launchers.table import Cases, Number, Values, read_rows

__all__ = ["is_nanotron", "read"]

_SHAPE = "model.model_config"
_SIZES = {
    "num_layers": "num_hidden_layers", "hidden": "hidden_size", "ffn": "intermediate_size",
    "num_heads": "num_attention_heads", "vocab": "vocab_size",
}  # fmt: skip
_NO_COST = ("optimizer.clip_grad", "optimizer.optimizer_factory", "optimizer.weight_decay", "optimizer.learning_rate",
            "general", "checkpoints", "logging", "tokenizer", "data_stages", "lighteval", "profiler",
            "model.init_method", "tokens.train_steps", "tokens.val_check_interval", "tokens.limit",
            f"{_SHAPE}.max_position_embeddings", f"{_SHAPE}.hidden_act", f"{_SHAPE}.is_llama_config",
            f"{_SHAPE}.rms_norm_eps", f"{_SHAPE}.rope", f"{_SHAPE}.bos", f"{_SHAPE}.eos", f"{_SHAPE}.pad",
            f"{_SHAPE}.initializer", f"{_SHAPE}.use_cache", f"{_SHAPE}.pretraining_tp")  # fmt: skip
_TABLE = (
    Number(key="tp", name="parallelism.tp"),
    Number(key="pp", name="parallelism.pp"),
    Number(key="ep", name="parallelism.expert_parallel_size"),
    Number(key="micro_batch", name="tokens.micro_batch_size"),
    Number(key="zero_stage", name="optimizer.zero_stage", absent=0, least=0),
    Cases(
        keys=("sequence_parallel",),
        names=("parallelism.tp_mode",),
        cases=(((False,), {}), ((True,), {"parallelism.tp_mode": "REDUCE_SCATTER"})),
        also=(((False,), {"parallelism.tp_mode": "ALL_REDUCE"}),),
    ),
    Cases(
        keys=("schedule",),
        names=("parallelism.pp_engine",),
        cases=((("1f1b",), {}), (("gpipe",), {"parallelism.pp_engine": "afab"})),
        also=((("1f1b",), {"parallelism.pp_engine": "1f1b"}),),
    ),
    Cases(
        keys=("precision",),
        names=("model.dtype", "optimizer.accumulate_grad_in_fp32"),
        cases=(
            (("bf16",), {"model.dtype": "bfloat16", "optimizer.accumulate_grad_in_fp32": True}),
            (("bf16_grads",), {"model.dtype": "bfloat16"}),
            (("fp16",), {"model.dtype": "float16", "optimizer.accumulate_grad_in_fp32": True}),
            (("fp32",), {"model.dtype": "float32"}),
        ),
    ),
    Cases(
        keys=("optimizer",),
        names=("optimizer.optimizer_factory.name",),
        cases=((("adam",), {"optimizer.optimizer_factory.name": "adamW"}),),
        also=((("adam",), {}), (("sgd",), {"optimizer.optimizer_factory.name": "sgd"})),
    ),
    Cases(
        keys=("recompute",),
        names=("parallelism.recompute_layer",),
        cases=((("none",), {}), (("full",), {"parallelism.recompute_layer": True})),
    ),
)


def is_nanotron(content: Mapping[str, object]) -> bool:
    """Whether a YAML is one of Nanotron: its model's sizes stand under `model.model_config`."""
    model = content.get("model")
    return isinstance(model, Mapping) and isinstance(model.get("model_config"), Mapping)


def read(content: Mapping[str, object], text: str, source: str, given: Given) -> Imported:
    """The job of a file."""
    settings = Settings(flattened(content, text, source), source)
    dp = settings.whole("parallelism.dp")
    strategy = read_rows(_TABLE, settings)
    model = None if given.num_layers is not None else _model(settings, model_label(source))
    if "parallelism.tp" not in settings:
        settings.missing.append("parallelism: the file has no such block; give --set strategy.tp=N and its like")
    tp, pp = strategy["tp"], strategy["pp"]
    assert isinstance(tp, int)
    assert isinstance(pp, int)
    num_chips = given.num_chips or (dp * tp * pp if dp else None)
    if num_chips is None:
        settings.missing.append("GPUs: the file does not say how many it runs on; give --gpus N")
    ranks = data_parallel(settings, num_chips, strategy | {"cp": 1})
    steps = settings.whole("tokens.batch_accumulation_per_replica")
    micro = strategy["micro_batch"]
    seq = settings.whole("tokens.sequence_length")
    if seq is None:
        settings.missing.append("sequence length: the file has none; give --set workload.seq=N")
    known = ranks is not None and isinstance(micro, int) and "tokens.micro_batch_size" in settings
    if not known:
        settings.missing.append("global batch: the file has none; give --set workload.global_batch=N")
    batch = whole_batch(settings, None, (steps or 1) * micro, ranks) if known and isinstance(micro, int) else None
    bucket = settings.number("model.ddp_bucket_cap_mb")
    strategy["bucket_bytes"] = int((25.0 if bucket is None else bucket) * 2**20)
    strategy |= {"overlap_dp": 1, "vpp": 1}
    fusion: list[Value] = ["flash_attention", "fused_gate_up", "fused_norm", "fused_qkv"]
    return finished(
        settings, framework="nanotron", model=model, num_chips=num_chips, seq=seq, global_batch=batch,
        strategy=strategy | {"fusion": fusion}, unknown=(), costs=_costs,
    )  # fmt: skip


def _costs(path: str) -> bool | None:
    return False if path.startswith(_NO_COST) else None


def _model(given: Settings, name: str) -> Values | None:
    sizes = {ours: given.whole(f"{_SHAPE}.{theirs}") for ours, theirs in _SIZES.items()}
    kv_heads, tied = given.whole(f"{_SHAPE}.num_key_value_heads"), given.flag(f"{_SHAPE}.tie_word_embeddings")
    multiple = given.whole("model.make_vocab_size_divisible_by")
    lacking = [theirs for ours, theirs in _SIZES.items() if sizes[ours] is None]
    if lacking:
        given.missing.append(f"model: {_SHAPE} lacks {', '.join(lacking)}; give --model NAME")
        return None
    heads, hidden = sizes["num_heads"], sizes["hidden"]
    assert heads is not None
    assert hidden is not None
    if hidden % heads:
        raise given.bad(f"{_SHAPE}.num_attention_heads", f"must divide hidden_size ({hidden})")
    found: Values = {"name": name, **sizes}
    return found | {
        "num_kv_heads": kv_heads or heads,
        "head_dim": hidden // heads,
        "tied_embeddings": bool(tied),
        "vocab_multiple": multiple or 1,
    }
