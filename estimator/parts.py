"""Parts that some models have and others lack: their sizes, their laws, and the parameters that they hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CompressedSpec", "HyperSpec", "IndexerSpec", "LinearAttentionSpec", "MLASpec", "MambaSpec", "MoESpec",
           "divisors", "require_at_least"]  # fmt: skip

MAX_LAYERS = 10**5  # each has a place in a layout
MAX_SIZE = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    q_lora_rank: int  # 0: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        require_at_least(self, 1, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        require_at_least(self, 0, "q_lora_rank")

    @property
    def qk_head_dim(self) -> int:
        """Width of one head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def input_parameters(self, hidden: int, num_heads: int) -> int:
        """Everything before the core: DeepSeek-V2, Eqs. 9 to 15; each latent passes an RMSNorm before it goes up."""
        q = num_heads * self.qk_head_dim
        query = self.q_lora_rank * (hidden + 1 + q) if self.q_lora_rank else hidden * q
        down = hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        up = self.kv_lora_rank * num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + down + up


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Mixture-of-experts MLP. Experts are gated or not, and biased or not, as the model's MLP is."""

    num_experts: int
    top_k: int
    ffn: int  # intermediate size of one routed expert
    num_shared_experts: int = 0
    shared_ffn: int = 0  # intermediate size of all shared experts together
    num_dense_layers: int = 0  # the first layers have a dense MLP; a model that lists its layers says so there
    capacity_factor: float | None = None  # None: dropless
    max_nodes_per_token: int | None = None  # node-limited routing; None: as it falls
    # One correction per expert, moved by a rule instead of a gradient (DeepSeek-V3, arXiv:2412.19437, Eq. 16).
    router_correction_bias: bool = False
    router_bias: bool = False  # on the router's scores, trained (GPT-OSS)
    shared_expert_gate: bool = False  # a learned share of the shared experts' output, one score per token (Qwen)
    latent: int = 0  # width in which routed experts work, between projections that all share; 0: the hidden size

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_experts", "top_k", "ffn")
        require_at_least(self, 0, "num_shared_experts", "shared_ffn", "num_dense_layers", "latent")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts}); a token visits an expert once"
            )
        if (self.num_shared_experts > 0) != (self.shared_ffn > 0):
            raise ValueError(
                f"num_shared_experts ({self.num_shared_experts}) and shared_ffn ({self.shared_ffn}) must both be "
                "positive or both be 0; shared_ffn is the intermediate size of all shared experts together"
            )
        if self.shared_expert_gate and not self.num_shared_experts:
            raise ValueError("shared_expert_gate needs shared experts; give num_shared_experts and shared_ffn")
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
class MambaSpec:
    """Mamba-2 mixer (Dao and Gu 2024, arXiv:2405.21060, section 7): heads with a scalar decay, B and C per group."""

    num_heads: int
    head_dim: int
    state: int  # width of the recurrent state of a channel
    groups: int  # heads of a group share B and C
    conv: int = 4  # taps of the causal convolution over x, B and C
    chunk: int = 128  # tokens that the scan treats as one matrix
    conv_bias: bool = True

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_heads", "head_dim", "state", "groups", "conv", "chunk")
        if self.num_heads % self.groups:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be divisible by groups ({self.groups}); "
                f"try groups in {divisors(self.num_heads)}"
            )

    @property
    def inner(self) -> int:
        """Width of x, of its gate and of the output."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    def parameters(self, hidden: int) -> int:
        """Projections, convolution, decay, step bias and skip of each head, and the gated norm."""
        projections = hidden * (self.inner + self.conv_width + self.num_heads) + self.inner * hidden
        return projections + self.conv_width * (self.conv + self.conv_bias) + 3 * self.num_heads + self.inner


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionSpec:
    """Gated delta net (Yang 2024, arXiv:2412.06464), as Qwen3.5 has it: value heads share keys."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv: int = 4  # taps of the causal convolution over q, k and v
    chunk: int = 64  # tokens that the scan treats as one matrix

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv", "chunk")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads ({self.num_value_heads}) must be divisible by num_key_heads ({self.num_key_heads}); "
                f"try num_key_heads in {divisors(self.num_value_heads)}"
            )

    @property
    def key_width(self) -> int:
        """Of all key heads; queries are as wide."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Of all value heads; the output gate is as wide."""
        return self.num_value_heads * self.value_head_dim

    def parameters(self, hidden: int) -> int:
        """Projections (q, k, v, gate, decay, step; output), convolution, decay and its bias per head, gated norm."""
        convolved = 2 * self.key_width + self.value_width
        projections = hidden * (convolved + self.value_width + 2 * self.num_value_heads) + self.value_width * hidden
        return projections + convolved * self.conv + 2 * self.num_value_heads + self.value_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

    Light heads score every earlier key; attention proper sees the `top_k` best.
    """

    num_heads: int
    head_dim: int
    top_k: int

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_heads", "head_dim", "top_k")

    def query_parameters(self, hidden: int, rank: int) -> int:
        """Queries from the query latent of `rank`, and a weight of each head for each token."""
        return rank * self.num_heads * self.head_dim + hidden * self.num_heads

    def parameters(self, hidden: int, rank: int) -> int:
        """Queries, and one key head with its LayerNorm."""
        return self.query_parameters(hidden, rank) + hidden * self.head_dim + 2 * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSpec:
    """Attention of DeepSeek-V4: one head of keys that are the values too, low-rank queries and grouped outputs.

    Each layer sees the tokens of its window and, with `compression` m, one entry for every m earlier tokens: their
    weighted sum. Indexed layers overlap two such sums and let an indexer choose `top_k` entries.
    """

    q_lora_rank: int
    o_groups: int  # heads are projected group by group
    o_lora_rank: int  # width of a group behind that
    qk_rope_head_dim: int  # of head_dim, the part that rotates

    def __post_init__(self) -> None:
        require_at_least(self, 1, "q_lora_rank", "o_groups", "o_lora_rank", "qk_rope_head_dim")

    def parameters(self, hidden: int, num_heads: int, head_dim: int) -> int:
        """Queries, keys and outputs, with the norms of the query latent and of the keys."""
        q = self.q_lora_rank * (hidden + 1 + num_heads * head_dim)
        out = num_heads * head_dim * self.o_lora_rank + self.o_groups * self.o_lora_rank * hidden
        return q + hidden * head_dim + head_dim + out

    @staticmethod
    def compressor_parameters(hidden: int, width: int, compression: int, *, overlaps: bool) -> int:
        """Entries of `width`: their projection, its weights with a bias per place, and the norm behind the sum."""
        columns = width * (2 if overlaps else 1)
        return 2 * hidden * columns + compression * columns + width

    def indexer_parameters(self, indexer: IndexerSpec, hidden: int, compression: int) -> int:
        """The indexer's own compressed keys, and its queries."""
        keys = self.compressor_parameters(hidden, indexer.head_dim, compression, overlaps=True)
        return keys + indexer.query_parameters(hidden, self.q_lora_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperSpec:
    """Manifold-constrained hyper-connections (arXiv:2512.24880): `streams` residual streams, mixed at each branch.

    The mixing matrix is made doubly stochastic by Sinkhorn's iterations.
    """

    streams: int
    sinkhorn_iterations: int = 20

    def __post_init__(self) -> None:
        require_at_least(self, 2, "streams")
        require_at_least(self, 1, "sinkhorn_iterations")

    @property
    def num_weights(self) -> int:
        """Of one branch and token: into it, out of it, and between streams."""
        return self.streams * (2 + self.streams)

    def parameters(self, hidden: int) -> int:
        """One branch: a projection of all streams to the weights, their biases, and three scales."""
        return self.num_weights * (self.streams * hidden + 1) + 3

    def head_parameters(self, hidden: int) -> int:
        """What brings the streams together before the last norm."""
        return self.streams * (self.streams * hidden + 1) + 1


def require_at_least(spec: object, minimum: int, *names: str) -> None:
    """Sizes from `minimum` up to what a layout or a count can hold."""
    for name in names:
        value = getattr(spec, name)
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, but got {value}")
        most = MAX_LAYERS if name.endswith("layers") else MAX_SIZE
        if value > most:
            raise ValueError(f"{name} must be at most {most}, but got {value}")


def divisors(n: int) -> list[int]:
    """Small divisors, for a remedy."""
    return [d for d in range(1, min(n, 1024) + 1) if n % d == 0]
