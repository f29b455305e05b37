"""What is trained: the shape of a causal language model. Knows nothing of how it is split or what it costs.

Parameter counts here are closed forms over the shape alone: the oracle that a graph's own count is held against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, overload

import numpy as np

from estimator.hf_config import read_hf_config

__all__ = ["LayerKind", "MLASpec", "MoESpec", "ModelSpec", "Norm"]


MAX_LAYERS = 10**5  # each has a place in a layout
MAX_SIZE = 10**9


class LayerKind(Enum):
    """Transformer layers by their MLP."""

    DENSE = "dense"
    MOE = "moe"


class Norm(Enum):
    """Normalisation before each half of a layer."""

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    q_lora_rank: int  # 0: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        _require_at_least(self, 1, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        _require_at_least(self, 0, "q_lora_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Mixture-of-experts MLP. Experts are gated or not, and biased or not, as the model's MLP is."""

    num_experts: int
    top_k: int
    ffn: int  # intermediate size of one routed expert
    num_shared_experts: int = 0
    shared_ffn: int = 0  # intermediate size of all shared experts together
    num_dense_layers: int = 0  # the first layers have a dense MLP
    capacity_factor: float | None = None  # None: dropless
    max_nodes_per_token: int | None = None  # node-limited routing; None: as it falls
    # One correction per expert, moved by a rule instead of a gradient (DeepSeek-V3, arXiv:2412.19437, Eq. 16).
    router_correction_bias: bool = False

    def __post_init__(self) -> None:
        _require_at_least(self, 1, "num_experts", "top_k", "ffn")
        _require_at_least(self, 0, "num_shared_experts", "shared_ffn", "num_dense_layers")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts}); a token visits an expert once"
            )
        if (self.num_shared_experts > 0) != (self.shared_ffn > 0):
            raise ValueError(
                f"num_shared_experts ({self.num_shared_experts}) and shared_ffn ({self.shared_ffn}) must both be "
                "positive or both be 0; shared_ffn is the intermediate size of all shared experts together"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError(
                f"capacity_factor must be a finite number above 0, but got {self.capacity_factor}; "
                "leave it out for dropless routing"
            )
        if self.max_nodes_per_token is not None and self.max_nodes_per_token < 1:
            raise ValueError(
                f"max_nodes_per_token must be at least 1, but got {self.max_nodes_per_token}; "
                "leave it out when routing is not limited"
            )


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
    qk_norm: bool = False  # an RMSNorm of head_dim weights over each query and key head
    attention_bias: bool = False  # on q, k, v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    max_positions: int = 0  # learned position embeddings; 0: rotary or none
    mla: MLASpec | None = None
    moe: MoESpec | None = None
    num_mtp_layers: int = 0  # multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2)
    vocab_multiple: int = 128  # the vocabulary is padded to a multiple of this times tp

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty; it labels results, for example 'llama3_8b'")
        positive = ("num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab", "vocab_multiple")
        _require_at_least(self, 1, *positive)
        _require_at_least(self, 0, "max_positions", "num_mtp_layers")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be divisible by num_kv_heads ({self.num_kv_heads}); "
                f"try num_kv_heads in {_divisors(self.num_heads)}"
            )
        if self.moe is not None and self.moe.num_dense_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers ({self.moe.num_dense_layers}) must be at most num_layers ({self.num_layers}); "
                "it counts the first layers, whose MLP is dense"
            )
        if self.mla is not None:
            self._check_mla()

    def _check_mla(self) -> None:
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads ({self.num_kv_heads}) must equal num_heads ({self.num_heads}) with mla; "
                "its keys and values are per query head"
            )
        for name in ("qk_norm", "attention_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} must be false with mla, whose projections have none; but got true")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any] | str | Path, *, name: str | None = None) -> ModelSpec:
        """From a Hugging Face config: a mapping, a JSON file, or a folder that holds `config.json`.

        hf_config.py says which architectures are known and what makes a key an error.
        """
        where = "" if isinstance(config, Mapping) else f"{config}: "
        try:
            fields = read_hf_config(config)
            mla, moe = fields.pop("mla", None), fields.pop("moe", None)
            return cls(
                **fields | {"name": name or fields["name"]},
                mla=MLASpec(**mla) if mla else None,
                moe=MoESpec(**moe) if moe else None,
            )
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The transformer layers in order, without MTP."""
        num_dense = self.num_layers - self.num_moe_layers
        return (LayerKind.DENSE,) * num_dense + (LayerKind.MOE,) * self.num_moe_layers

    @property
    def num_moe_layers(self) -> int:
        """Transformer layers with experts, without MTP."""
        return 0 if self.moe is None else self.num_layers - self.moe.num_dense_layers

    @property
    def mtp_layer_kind(self) -> LayerKind:
        """The layer inside an MTP module: MoE where the model has experts."""
        return LayerKind.DENSE if self.moe is None else LayerKind.MOE

    @property
    def qk_head_dim(self) -> int:
        """Width of one head of queries and keys."""
        return self.head_dim if self.mla is None else self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim

    @property
    def v_head_dim(self) -> int:
        """Width of one head of values."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def norm_parameters(self) -> int:
        """One norm over the hidden size: weights, and biases of a LayerNorm."""
        return self.hidden * (2 if self.norm is Norm.LAYER else 1)

    @property
    def attention_parameters(self) -> int:
        """Projections, biases and inner norms of one layer's attention."""
        output = self.num_heads * self.v_head_dim * self.hidden + self.attention_output_bias * self.hidden
        if self.mla is not None:
            return self._mla_input_parameters(self.mla) + output
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.hidden * qkv + self.attention_bias * qkv + self.qk_norm * 2 * self.head_dim + output

    def _mla_input_parameters(self, mla: MLASpec) -> int:
        # DeepSeek-V2 (arXiv:2405.04434), Eqs. 9 to 15; each latent passes an RMSNorm before it is projected up.
        q = self.num_heads * self.qk_head_dim
        query = mla.q_lora_rank * (self.hidden + 1 + q) if mla.q_lora_rank else self.hidden * q
        down = self.hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
        up = mla.kv_lora_rank * self.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return query + down + up

    def mlp_parameters(self, ffn: int) -> int:
        """One MLP of intermediate size `ffn`: the dense one, an expert, or the shared experts together."""
        inner = ffn * (2 if self.gated_mlp else 1)
        return self.hidden * (inner + ffn) + self.mlp_bias * (inner + self.hidden)

    def layer_parameters(self, kind: LayerKind) -> int:
        """One transformer layer with all its experts, its two norms and its router correction bias."""
        rest = self.attention_parameters + 2 * self.norm_parameters
        if kind is LayerKind.DENSE:
            return rest + self.mlp_parameters(self.ffn)
        moe = self._moe_of(kind)
        router = moe.num_experts * (self.hidden + moe.router_correction_bias)
        shared = self.mlp_parameters(moe.shared_ffn) if moe.shared_ffn else 0
        return rest + router + moe.num_experts * self.mlp_parameters(moe.ffn) + shared

    def active_layer_parameters(self, kind: LayerKind) -> int:
        """One layer with only the `top_k` routed experts that a token visits."""
        if kind is LayerKind.DENSE:
            return self.layer_parameters(kind)
        return self.layer_parameters(kind) - self._idle_layer_parameters(self._moe_of(kind))

    def _idle_layer_parameters(self, moe: MoESpec) -> int:
        return (moe.num_experts - moe.top_k) * self.mlp_parameters(moe.ffn)

    def _moe_of(self, kind: LayerKind) -> MoESpec:
        if self.moe is None:
            raise ValueError(f"{self.name} has no {kind.value} layers; give it moe, or ask for LayerKind.DENSE")
        return self.moe

    @property
    def mtp_parameters(self) -> int:
        """What all MTP modules add; embedding and head are the main model's (arXiv:2412.19437, Eqs. 21 to 23).

        A module has two input norms, the projection of their concatenation, a layer, and a norm before the head.
        """
        module = 3 * self.norm_parameters + 2 * self.hidden * self.hidden + self.layer_parameters(self.mtp_layer_kind)
        return self.num_mtp_layers * module

    def num_parameters(self, include_mtp: bool = False) -> int:
        """All parameters, vocabulary unpadded.

        Counts the router correction bias, as the publisher's checkpoint does: DeepSeek-V3 is 671,026,419,200.
        Frameworks that hold it as a buffer count `num_router_biases()` less, which is also what a gradient trains.
        """
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2) + self.max_positions * self.hidden
        layers = (self.num_layers - self.num_moe_layers) * self.layer_parameters(LayerKind.DENSE)
        if self.num_moe_layers:
            layers += self.num_moe_layers * self.layer_parameters(LayerKind.MOE)
        return embeddings + layers + self.norm_parameters + include_mtp * self.mtp_parameters

    def num_router_biases(self, include_mtp: bool = False) -> int:
        """Those of `num_parameters` that a rule updates: no gradient and no optimizer state."""
        if self.moe is None or not self.moe.router_correction_bias:
            return 0
        return (self.num_moe_layers + include_mtp * self.num_mtp_layers) * self.moe.num_experts

    def num_active_parameters(self, include_input_embedding: bool = True) -> int:
        """Parameters that one token meets, without MTP. The field uses two conventions.

        With the input embedding: the whole table counts, as in "37 B activated" of DeepSeek-V3. Without it: only what
        multiplies, as in 6 N FLOPs per token; learned positions go too, a tied table stays because the head uses it.
        """
        idle = 0 if self.moe is None else self.num_moe_layers * self._idle_layer_parameters(self.moe)
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


def _require_at_least(spec: object, minimum: int, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, but got {value}")
        most = MAX_LAYERS if name.endswith("layers") else MAX_SIZE
        if value > most:
            raise ValueError(f"{name} must be at most {most}, but got {value}")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, min(n, 1024) + 1) if n % d == 0]
