"""What the row mapping of `search validate` assumes: for an empty cell, and for what has no column.

One table, so that every assumption is counted and listed. An assumption follows from configuration columns only: never
from a row's source, family or the name of its model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from estimator.strategy import Fusion
from search.measured import Row

__all__ = ["ASSUMED_COLUMNS", "Cells", "generation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assumption:
    """What an empty cell of `column` stands for. `fill` gives the text of the cell, or '' where nothing is assumed."""

    column: str
    fill: Callable[[Cells], str]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a framework does where a row does not say. `prefix` starts the row's `framework` cell."""

    prefix: str
    flash_attention: int = 1
    fusion: frozenset[Fusion] = frozenset()  # beyond what all have
    dp_overlap: int = 0
    tp_overlap: int = 0
    bf16_grads: bool = False  # where a recipe of that kind exists
    dropout: float = 0.0  # of attention and hidden states of GPT stacks, where an argument has to turn it off
    software: str = ""  # of hardware/catalog/software.yaml


ONE_GEMM = frozenset({Fusion.FUSED_QKV, Fusion.FUSED_GATE_UP})  # linear_qkv and linear_fc1, Wqkv
LOSS = ONE_GEMM | {Fusion.FUSED_LOSS}
EAGER = ONE_GEMM | {Fusion.FUSED_DROPOUT, Fusion.FUSED_SOFTMAX}  # bias_dropout_fusion, masked_softmax_fusion

_GENERATIONS = (
    # The performance presets of both set cross_entropy_loss_fusion, overlap_grad_reduce and tp_comm_overlap, and reduce
    # gradients in bf16 (grad_reduce_in_fp32 off).
    Generation(
        prefix="megatron-bridge", fusion=LOSS, dp_overlap=1, tp_overlap=1, bf16_grads=True, software="megatron_moe"
    ),
    Generation(prefix="nemo", fusion=LOSS, dp_overlap=1, tp_overlap=1, bf16_grads=True, software="megatron_moe"),
    # loss_fn: fused_crossentropy is its default; FSDP prefetches the next layer.
    Generation(prefix="llm-foundry", fusion=LOSS, dp_overlap=1, software="fsdp_2023"),
    # On Transformer Engine 2: its attention, and Megatron Core's fused cross-entropy.
    Generation(prefix="megatron-lm v0.12", fusion=LOSS, dp_overlap=1, software="megatron_moe"),
    # Their own layers; --use-flash-attn has to be asked for, --attention-dropout and --hidden-dropout are 0.1.
    Generation(prefix="megatron-lm", flash_attention=0, dropout=0.1, fusion=EAGER, software="eager_2022"),
    Generation(prefix="megatron-deepspeed", flash_attention=0, dropout=0.1, fusion=EAGER, software="eager_2022"),
    # Everything else: nothing but the attention kernel that all have used since 2023.
    Generation(prefix=""),
)


def generation(framework: str) -> Generation:
    """The documented generation of a framework: the first whose prefix fits.

    >>> generation("nemo/megatron-core").software
    'megatron_moe'
    """
    return next(known for known in _GENERATIONS if framework.startswith(known.prefix))


class Cells:
    """The cells of a row with the empty ones filled in. `assumed` lists what was filled in, in order of use."""

    __slots__ = ("assumed", "row")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.assumed: list[str] = []

    def text(self, column: str) -> str:
        """The cell, or what is assumed for it; ValueError where there is neither."""
        if self.row.has(column):
            return self.row.cells[column]
        assumption = _BY_COLUMN.get(column)
        value = assumption.fill(self) if assumption else ""
        if not assumption or not value:
            raise ValueError(f"column {column} is empty, and nothing is assumed for it")
        self.note(f"{column}={value}", assumption.why)
        return value

    def integer(self, column: str, *, least: int = 1) -> int:
        """The cell as a whole number of at least `least`."""
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            raise self.row.bad(column, f"must be a whole number, but got {text!r}") from None
        if not (least <= value <= _MOST and value == int(value)):
            raise self.row.bad(column, f"must be a whole number of at least {least}, but got {text}")
        return int(value)

    def flag(self, column: str) -> bool:
        """The cell as 0 or 1."""
        value = self.integer(column, least=0)
        if value > 1:
            raise self.row.bad(column, f"must be 0 or 1, but got {value}")
        return value == 1

    def note(self, what: str, why: str) -> None:
        """Lists one assumption, once."""
        line = f"{what}: {why}"
        if line not in self.assumed:
            self.assumed.append(line)


_MOST = 10**15  # Larger than any size of a training run, and still exact in a float.


def _constant(value: str) -> Callable[[Cells], str]:
    return lambda _cells: value


def _head_dim(cells: Cells) -> str:
    if cells.text("attention") == "mla":
        return str(cells.integer("qk_nope_dim") + cells.integer("qk_rope_dim"))
    hidden, heads = cells.integer("hidden"), cells.integer("heads")
    return "" if hidden % heads else str(hidden // heads)


def _is_gpt(cells: Cells, yes: str, no: str) -> str:
    return yes if cells.text("arch") == "gpt" else no


def _flash_attention(cells: Cells) -> str:
    kernel = cells.row.cells["attention_kernel"]
    if kernel:
        return "0" if kernel == "unfused" else "1"
    return str(generation(cells.row.cells["framework"]).flash_attention)


def _schedule(cells: Cells) -> str:
    if cells.integer("pp") == 1:
        return "none"
    return "interleaved" if cells.integer("vpp") > 1 else "1f1b"


def _vpp(cells: Cells) -> str:
    """As few chunks a rank as interleaving can have and layers allow; one where nothing is interleaved."""
    if cells.row.cells["schedule"] != "interleaved":
        return "1"
    per_rank, left = divmod(cells.integer("layers"), cells.integer("pp"))
    return str(next((v for v in range(2, per_rank + 1) if per_rank % v == 0 and not left), 2))


def _dp(cells: Cells) -> str:
    world = cells.integer("tp") * cells.integer("cp") * cells.integer("pp")
    return str(cells.integer("n_gpus") // world)


def _n_gpus(cells: Cells) -> str:
    """What the degrees need, where the row says how many replicas there are."""
    if not cells.row.has("dp"):
        return ""
    return str(cells.integer("tp") * cells.integer("cp") * cells.integer("pp") * cells.integer("dp"))


def _global_batch(cells: Cells) -> str:
    """As many micro-batches as there are stages to fill."""
    return str(cells.integer("micro_batch") * cells.integer("dp") * cells.integer("pp"))


def _heads(cells: Cells) -> str:
    hidden = cells.integer("hidden")
    widths = (cells.integer("head_dim"),) if cells.row.has("head_dim") else (128, 64, 96, 80)
    return next((str(hidden // width) for width in widths if hidden % width == 0), "")


def _ffn(cells: Cells) -> str:
    """moe_ffn, else 4 h, of which a gated MLP with its three matrices takes two thirds, in whole multiples of 256."""
    hidden = cells.integer("hidden")
    wide = str(-(-8 * hidden // (3 * 256)) * 256) if cells.flag("gated_mlp") else str(4 * hidden)
    return cells.row.cells["moe_ffn"] or wide


_VOCABULARIES = {"gpt": "50257", "llama": "32000", "moe-mixtral": "32000", "moe-deepseek": "129280"}
_TOP_K = {"moe-mixtral": "2", "moe-deepseek": "8"}


def _by_arch(values: Mapping[str, str]) -> Callable[[Cells], str]:
    return lambda cells: values.get(cells.text("arch"), "")


_ASSUMPTIONS = (
    _Assumption(
        column="ffn",
        fill=_ffn,
        why="the experts' width, else 4 hidden (Vaswani 2017), 8/3 in gated MLPs (LLaMA, arXiv:2302.13971)",
    ),
    _Assumption(column="heads", fill=_heads, why="heads 128 wide, or else 64, 96 or 80"),
    _Assumption(column="kv_heads", fill=lambda c: c.text("heads"), why="multi-head attention"),
    _Assumption(column="head_dim", fill=_head_dim, why="hidden / heads, or the query-key width of MLA"),
    _Assumption(
        column="vocab", fill=_by_arch(_VOCABULARIES), why="of GPT-2, Llama 2, Mixtral or DeepSeek-V3, by architecture"
    ),
    _Assumption(column="gated_mlp", fill=lambda c: _is_gpt(c, "0", "1"), why="as the architecture was published"),
    _Assumption(column="tied_embeddings", fill=lambda c: _is_gpt(c, "1", "0"), why="as the architecture was published"),
    _Assumption(
        column="attention",
        fill=lambda c: "mha" if c.text("kv_heads") == c.text("heads") else "gqa",
        why="from the numbers of heads",
    ),
    _Assumption(
        column="flash_attention",
        fill=_flash_attention,
        why="as attention_kernel says, else the default of the framework's generation",
    ),
    _Assumption(column="top_k", fill=_by_arch(_TOP_K), why="of Mixtral or DeepSeek-V3, by architecture"),
    _Assumption(column="kv_lora_rank", fill=_constant("512"), why="as in DeepSeek-V2 and V3"),
    _Assumption(column="qk_nope_dim", fill=_constant("128"), why="as in DeepSeek-V2 and V3"),
    _Assumption(column="qk_rope_dim", fill=_constant("64"), why="as in DeepSeek-V2 and V3"),
    _Assumption(column="v_head_dim", fill=_constant("128"), why="as in DeepSeek-V2 and V3"),
    _Assumption(column="moe_ffn", fill=lambda c: c.text("ffn"), why="experts as wide as the dense MLP"),
    _Assumption(column="shared_experts", fill=_constant("0"), why="no shared expert is published"),
    _Assumption(column="first_dense_layers", fill=_constant("0"), why="every layer has experts"),
    _Assumption(column="mtp_layers", fill=_constant("0"), why="no multi-token prediction is published"),
    _Assumption(column="q_lora_rank", fill=_constant("0"), why="queries are projected directly"),
    _Assumption(column="moe_routing", fill=_constant("balanced"), why="benchmarks force balanced routing"),
    _Assumption(
        column="gpus_per_node",
        fill=lambda c: "4" if c.text("gpu") in {"gb200", "gb300"} else "8",
        why="the usual node of that chip",
    ),
    _Assumption(column="n_gpus", fill=_n_gpus, why="tp * cp * pp * dp"),
    _Assumption(column="tp", fill=_constant("1"), why="off unless published"),
    _Assumption(column="pp", fill=_constant("1"), why="off unless published"),
    _Assumption(
        column="sp",
        fill=lambda c: "1" if c.row.cells["tp_comm_overlap"] == "1" else "0",
        why="overlap of tensor-parallel traffic needs it; off otherwise",
    ),
    _Assumption(column="cp", fill=_constant("1"), why="off unless published"),
    _Assumption(column="vpp", fill=_vpp, why="one chunk a rank, interleaved the fewest that layers allow"),
    _Assumption(column="ep", fill=_constant("1"), why="off unless published"),
    _Assumption(column="etp", fill=_constant("1"), why="experts are not split unless published"),
    _Assumption(column="dp", fill=_dp, why="n_gpus / (tp * cp * pp)"),
    _Assumption(column="zero_stage", fill=_constant("0"), why="plain data parallelism unless published"),
    _Assumption(column="schedule", fill=_schedule, why="Megatron's schedule for that pp and vpp"),
    _Assumption(column="micro_batch", fill=_constant("1"), why="the usual micro-batch of large models"),
    _Assumption(column="global_batch", fill=_global_batch, why="a micro-batch for each pipeline rank"),
    _Assumption(column="recompute", fill=_constant("none"), why="off unless published"),
    _Assumption(
        column="precision",
        fill=lambda c: "fp16" if c.text("gpu").startswith("v100") else "bf16",
        why="the half precision that the chip has",
    ),
    _Assumption(column="optimizer", fill=_constant("adam"), why="the usual optimizer of language models"),
    _Assumption(
        column="tp_comm_overlap",
        fill=lambda c: str(generation(c.row.cells["framework"]).tp_overlap),
        why="default of the framework's generation",
    ),
    _Assumption(
        column="dp_overlap",
        fill=lambda c: str(generation(c.row.cells["framework"]).dp_overlap),
        why="default of the framework's generation",
    ),
    _Assumption(
        column="ep_overlap",
        fill=lambda c: "1" if c.row.cells["cuda_graph"] == "full_iteration" else "0",
        why="with graphs of whole iterations, as wherever both are published; off unless published",
    ),
)
_BY_COLUMN = {assumption.column: assumption for assumption in _ASSUMPTIONS}
ASSUMED_COLUMNS = {assumption.column: assumption.why for assumption in _ASSUMPTIONS}
"""Columns that may be empty, and what is assumed then."""
