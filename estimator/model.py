"""What is trained: the shape of a causal language model. Knows nothing of how it is split or what it costs.

Parameter counts here are closed forms over the shape alone: the oracle that a graph's own count is held against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from estimator.hf_config import read_hf_config
from estimator.layers import LayerSpec, Mixer, Mlp, expand_layers
from estimator.mapping import from_mapping, shown
from estimator.parts import (
    CompressedSpec,
    HyperSpec,
    IndexerSpec,
    LinearAttentionSpec,
    MambaSpec,
    MLASpec,
    MoESpec,
    divisors,
    require_at_least,
)

if TYPE_CHECKING:
    from estimator.graph import OpGraph

T = TypeVar("T")

__all__ = ["LayerSpec", "MLASpec", "Mixer", "Mlp", "MoESpec", "ModelSpec", "Norm", "QKNorm"]


class Norm(Enum):
    """Normalisation before each half of a layer."""

    RMS = "rms"
    LAYER = "layer"


class QKNorm(Enum):
    """RMSNorm of queries and keys. A model file may write true for `head` and false for `none`."""

    NONE = "none"
    HEAD = "head"  # over each head, one weight vector of a head's width for all
    FULL = "full"  # over all heads together, as many weights (MiniMax-M2's "per_layer")
    UNWEIGHTED = "unweighted"  # over each head, without weights (Llama 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    >>> model = ModelSpec(name="tiny", num_layers=2, hidden=8, ffn=32, num_heads=2, num_kv_heads=1, head_dim=4,
    ...                   vocab=10)
    >>> model.num_parameters()  # 2 layers of (192 + 768 + 16), 2 embeddings of 80, a final norm of 8
    2120
    """

    name: str
    num_layers: int
    hidden: int
    ffn: int  # intermediate size of a dense MLP
    num_heads: int
    num_kv_heads: int  # equals num_heads with MLA, which caches a latent instead
    head_dim: int  # not used with MLA, which has its own
    vocab: int
    gated_mlp: bool = True
    tied_embeddings: bool = False
    norm: Norm = Norm.RMS
    qk_norm: QKNorm = QKNorm.NONE
    attention_bias: bool = False  # on q, k, v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    max_positions: int = 0  # learned position embeddings; 0: rotary or none
    attention_sinks: bool = False  # a learned logit per head that takes weight from the keys (GPT-OSS)
    attention_gate: bool = False  # the query projection also gives a gate of the output (Qwen3.5)
    attention_dropout: float = 0.0  # of attention's probabilities; what is above 0 costs the same
    hidden_dropout: float = 0.0  # of embeddings, and of what attention and MLP add to the residual stream
    parallel_block: bool = False  # attention and MLP read the same norm and share the residual (GPT-J, Command-R)
    layers: tuple[LayerSpec, ...] | None = None  # one per layer; None: attention, dense MLPs first and then MoE
    mtp_layer: LayerSpec | None = None  # the layer inside an MTP module; None: as the last of the model
    mla: MLASpec | None = None
    moe: MoESpec | None = None
    mamba: MambaSpec | None = None
    linear: LinearAttentionSpec | None = None
    indexer: IndexerSpec | None = None
    compressed: CompressedSpec | None = None
    hyper: HyperSpec | None = None
    num_mtp_layers: int = 0  # multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2)
    vocab_multiple: int = 128  # the vocabulary is padded to a multiple of this times tp
    notes: tuple[str, ...] = field(default=(), compare=False)  # what the spec leaves out, told among the assumptions

    def __hash__(self) -> int:
        # A look-up by model is made for every row of a search: a few numbers tell models apart, equality compares all.
        return hash((self.name, self.num_layers, self.hidden, self.ffn, self.vocab))

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty; it labels results, for example 'llama3_8b'")
        positive = ("num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab", "vocab_multiple")
        require_at_least(self, 1, *positive)
        require_at_least(self, 0, "max_positions", "num_mtp_layers")
        for name in ("attention_dropout", "hidden_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, but got {getattr(self, name)}; 0 has none")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be divisible by num_kv_heads ({self.num_kv_heads}); "
                f"try num_kv_heads in {divisors(self.num_heads)}"
            )
        if self.moe is not None and self.moe.num_dense_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers ({self.moe.num_dense_layers}) must be at most num_layers ({self.num_layers}); "
                "it counts the first layers, whose MLP is dense"
            )
        self._check_layers()
        self._check_attention()

    def _check_layers(self) -> None:
        """Every layer has the parts that it names, and every part a layer that uses it."""
        if self.layers is not None:
            if len(self.layers) != self.num_layers:
                raise ValueError(f"layers must list num_layers ({self.num_layers}) layers, but got {len(self.layers)}")
            if self.moe is not None and self.moe.num_dense_layers:
                raise ValueError("num_dense_layers must be left out where layers are listed; write mlp: dense there")
        if self.mtp_layer is not None and not self.num_mtp_layers:
            raise ValueError("mtp_layer needs num_mtp_layers of at least 1; give it, or leave mtp_layer out")
        used = {*self.layer_specs, *((self.mtp_layer_spec,) if self.num_mtp_layers else ())}
        needs = {
            "moe": any(layer.mlp is Mlp.MOE for layer in used),
            "mamba": any(layer.mixer is Mixer.MAMBA for layer in used),
            "linear": any(layer.mixer is Mixer.LINEAR for layer in used),
            "indexer": any(layer.indexed for layer in used),
            "compressed": any(layer.compression for layer in used),
        }
        for part, needed in needs.items():
            given = getattr(self, part) is not None
            if needed and not given:
                raise ValueError(f"{part} is absent, but a layer needs it; give its sizes")
            if given and not needed and part in {"mamba", "linear", "indexer"}:
                raise ValueError(f"{part} is given, but no layer uses it; say so in layers, or leave it out")

    def _check_attention(self) -> None:
        """What the three forms of attention exclude."""
        off = {"qk_norm": self.qk_norm is not QKNorm.NONE, "attention_bias": self.attention_bias,
               "attention_gate": self.attention_gate}  # fmt: skip
        for form, most in (("mla", self.num_heads), ("compressed", 1)):
            if getattr(self, form) is None:
                continue
            if self.num_kv_heads != most:
                law, why = {
                    "mla": (f"equal num_heads ({most})", "its keys and values are per query head"),
                    "compressed": ("be 1", "all heads share one of keys"),
                }[form]
                raise ValueError(f"num_kv_heads ({self.num_kv_heads}) must {law} with {form}; {why}")
            for name, on in off.items():
                if on:
                    value = "none" if name == "qk_norm" else "false"
                    raise ValueError(f"{name} must be {value} with {form}, whose projections have none")
        if self.indexer is not None and self.compressed is None and not (self.mla and self.mla.q_lora_rank):
            raise ValueError("indexer needs mla with a q_lora_rank, or compressed: it reads the query latent")
        if self.compressed is not None:
            c = self.compressed
            if self.mla is not None:
                raise ValueError("compressed and mla must not both be set; a model has one form of attention")
            if (self.num_heads * self.head_dim) % c.o_groups or self.num_heads % c.o_groups:
                raise ValueError(f"num_heads ({self.num_heads}) must be divisible by o_groups ({c.o_groups})")
            if c.qk_rope_head_dim > self.head_dim:
                raise ValueError(f"qk_rope_head_dim ({c.qk_rope_head_dim}) must be at most head_dim ({self.head_dim})")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ModelSpec:
        """From the fields of a model file, every key and type checked; `layers` as expand_layers reads them."""
        values = dict(mapping)
        if isinstance(values.get("qk_norm"), bool):
            values["qk_norm"] = QKNorm.HEAD if values["qk_norm"] else QKNorm.NONE
        num_layers = values.get("num_layers")
        if values.get("layers") is not None and type(num_layers) is int and num_layers >= 1:
            values["layers"] = expand_layers(values["layers"], num_layers)
        else:
            values.pop("layers", None)
        notes = values.get("notes", ())
        if not isinstance(notes, list | tuple) or not all(isinstance(note, str) for note in notes):
            raise ValueError(f"notes must be a list of texts, but got {shown(notes)}")
        return from_mapping(cls, values | {"notes": tuple(notes)})

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any] | str | Path, *, name: str | None = None) -> ModelSpec:
        """From a Hugging Face config: a mapping, a JSON file, or a folder that holds `config.json`.

        The package hf_config says which architectures are known and what makes a key an error.
        """
        where = "" if isinstance(config, Mapping) else f"{config}: "
        try:
            fields = read_hf_config(config)
            return cls.from_mapping(fields | {"name": name or fields["name"]})
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error

    def captured_at(self, seq: int) -> OpGraph | None:
        """The graph at that sequence length of a model that was captured; None where it is built from the sizes."""
        return None

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The layers in order, without MTP."""
        if self.layers is not None:
            return self.layers
        num_dense = self.num_layers if self.moe is None else self.moe.num_dense_layers
        return (LayerSpec(),) * num_dense + (LayerSpec(mlp=Mlp.MOE),) * (self.num_layers - num_dense)

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, without MTP."""
        return sum(layer.mlp is Mlp.MOE for layer in self.layer_specs)

    @property
    def has_shared_experts(self) -> bool:
        """Whether every token passes through some experts beside those that it is routed to."""
        return self.moe is not None and self.moe.num_shared_experts > 0

    @property
    def mtp_layer_spec(self) -> LayerSpec:
        """The layer inside an MTP module."""
        if self.mtp_layer is not None:
            return self.mtp_layer
        if self.layers is not None:
            return self.layers[-1]
        return LayerSpec(mlp=Mlp.DENSE if self.moe is None else Mlp.MOE)

    @property
    def qk_head_dim(self) -> int:
        """Width of one head of queries and keys."""
        return self.head_dim if self.mla is None else self.mla.qk_head_dim

    @property
    def v_head_dim(self) -> int:
        """Width of one head of values."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def norm_parameters(self) -> int:
        """One norm over the hidden size: weights, and biases of a LayerNorm."""
        return self.hidden * (2 if self.norm is Norm.LAYER else 1)

    def mixer_parameters(self, layer: LayerSpec) -> int:
        """Projections, biases and inner norms of one layer's mixer."""
        if layer.mixer is Mixer.NONE:
            return 0
        if layer.mixer is Mixer.MAMBA:
            return _part(self.mamba).parameters(self.hidden)
        if layer.mixer is Mixer.LINEAR:
            return _part(self.linear).parameters(self.hidden)
        sinks = self.attention_sinks * self.num_heads
        if self.compressed is not None:
            return sinks + self._compressed_parameters(layer, self.compressed)
        output = self.num_heads * self.v_head_dim * self.hidden + self.attention_output_bias * self.hidden
        if self.mla is not None:
            rank = self.mla.q_lora_rank
            indexer = _part(self.indexer).parameters(self.hidden, rank) if layer.indexed else 0
            return sinks + self.mla.input_parameters(self.hidden, self.num_heads) + indexer + output
        heads = self.num_heads * (2 if self.attention_gate else 1) + 2 * self.num_kv_heads
        qkv = heads * self.head_dim
        norms = {QKNorm.HEAD: 2, QKNorm.FULL: self.num_heads + self.num_kv_heads}.get(self.qk_norm, 0) * self.head_dim
        return sinks + self.hidden * qkv + self.attention_bias * qkv + norms + output

    def _compressed_parameters(self, layer: LayerSpec, part: CompressedSpec) -> int:
        total = part.parameters(self.hidden, self.num_heads, self.head_dim)
        if layer.compression:
            total += part.compressor_parameters(self.hidden, self.head_dim, layer.compression, overlaps=layer.indexed)
        if layer.indexed:
            total += part.indexer_parameters(_part(self.indexer), self.hidden, layer.compression)
        return total

    def mlp_parameters(self, ffn: int, width: int = 0) -> int:
        """One MLP of intermediate size `ffn` (the dense one, an expert, the shared experts) on `width` (0: hidden)."""
        inner, width = ffn * (2 if self.gated_mlp else 1), width or self.hidden
        return width * (inner + ffn) + self.mlp_bias * (inner + width)

    def layer_parameters(self, layer: LayerSpec) -> int:
        """One layer with all its experts, its norms, hyper-connections and router correction bias."""
        num_norms = 1 if self.parallel_block else layer.num_halves
        total = self.mixer_parameters(layer) + num_norms * self.norm_parameters
        if self.hyper is not None:
            total += layer.num_halves * self.hyper.parameters(self.hidden)
        if layer.mlp is Mlp.NONE:
            return total
        if layer.mlp is Mlp.DENSE:
            return total + self.mlp_parameters(self.ffn)
        if self.moe is None:
            raise ValueError(f"{self.name} has no moe layers; give it moe, or ask for a layer with a dense MLP")
        moe = self.moe
        corrected = moe.router_correction_bias and not layer.hash_routed
        router = moe.num_experts * (self.hidden + moe.router_bias + corrected)
        shared = self.mlp_parameters(moe.shared_ffn) + moe.shared_expert_gate * self.hidden if moe.shared_ffn else 0
        latent = 2 * self.hidden * moe.latent + self.mlp_bias * (moe.latent + self.hidden) if moe.latent else 0
        return total + router + moe.num_experts * self.mlp_parameters(moe.ffn, moe.latent) + shared + latent

    def active_layer_parameters(self, layer: LayerSpec) -> int:
        """One layer with only the `top_k` routed experts that a token visits."""
        idle = 0 if self.moe is None or layer.mlp is not Mlp.MOE else self._idle_parameters(self.moe)
        return self.layer_parameters(layer) - idle

    def _idle_parameters(self, moe: MoESpec) -> int:
        return (moe.num_experts - moe.top_k) * self.mlp_parameters(moe.ffn, moe.latent)

    @property
    def mtp_parameters(self) -> int:
        """What all MTP modules add; embedding and head are the main model's (arXiv:2412.19437, Eqs. 21 to 23).

        A module has two input norms, the projection of their concatenation, a layer, and a norm before the head.
        """
        module = 3 * self.norm_parameters + 2 * self.hidden * self.hidden + self._streams_parameters
        return self.num_mtp_layers * (module + self.layer_parameters(self.mtp_layer_spec))

    @property
    def _streams_parameters(self) -> int:
        return 0 if self.hyper is None else self.hyper.head_parameters(self.hidden)

    def num_parameters(self, include_mtp: bool = False) -> int:
        """All parameters, vocabulary unpadded.

        Counts the router correction bias, as the publisher's checkpoint does: DeepSeek-V3 is 671,026,419,200.
        Frameworks that hold it as a buffer count `num_router_biases()` less, which is also what a gradient trains.
        """
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2) + self.max_positions * self.hidden
        each = {layer: self.layer_parameters(layer) for layer in set(self.layer_specs)}
        layers = sum(each[layer] for layer in self.layer_specs)
        head = self.norm_parameters + self._streams_parameters
        return embeddings + layers + head + include_mtp * self.mtp_parameters

    def num_router_biases(self, include_mtp: bool = False) -> int:
        """Those of `num_parameters` that a rule updates: no gradient and no optimizer state."""
        if self.moe is None or not self.moe.router_correction_bias:
            return 0
        layers = (*self.layer_specs, *(self.mtp_layer_spec,) * (include_mtp * self.num_mtp_layers))
        return sum(layer.mlp is Mlp.MOE and not layer.hash_routed for layer in layers) * self.moe.num_experts

    def num_active_parameters(self, include_input_embedding: bool = True) -> int:
        """Parameters that one token meets, without MTP. The field uses two conventions.

        With the input embedding: the whole table counts, as in "37 B activated" of DeepSeek-V3. Without it: only what
        multiplies, as in 6 N FLOPs per token; learned positions go too, a tied table stays because the head uses it.
        """
        idle = 0 if self.moe is None else self.num_moe_layers * self._idle_parameters(self.moe)
        lookups = (0 if self.tied_embeddings else self.vocab * self.hidden) + self.max_positions * self.hidden
        return self.num_parameters() - idle - (0 if include_input_embedding else lookups)

    @overload
    def padded_vocab(self, tp: int) -> int: ...
    @overload
    def padded_vocab(self, tp: float | np.ndarray) -> float | np.ndarray: ...
    def padded_vocab(self, tp: float | np.ndarray) -> float | np.ndarray:
        """Rows of the embedding with `tp` shards; `[N]` for `[N]` degrees.

        >>> ModelSpec(name="gpt", num_layers=1, hidden=8, ffn=8, num_heads=1, num_kv_heads=1, head_dim=8,
        ...           vocab=50257).padded_vocab(8)
        51200
        """
        multiple = self.vocab_multiple * tp
        return -(-self.vocab // multiple) * multiple


def _part(spec: T | None) -> T:
    assert spec is not None, "checked when the model was made"
    return spec
