"""Precision recipes: which dtype each role of a training step uses. Knows nothing of models or chips."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from hardware.dtype import DType

__all__ = ["RECIPES", "PrecisionRecipe", "Role", "Tag", "apart", "recipe", "with_bf16_grads"]


class Tag(Enum):
    """An enum whose members hash by identity, in C: ops are looked up by their tags a thousand times per price row."""

    __hash__ = object.__hash__


class Role(Tag):
    """What a tensor or a GEMM is for; a recipe gives each role its dtype."""

    ACTIVATION = "activation"  # residual stream, attention inputs, norms
    LINEAR_INPUT = "linear_input"  # kept by a linear layer for its weight gradient
    GATE_INPUT = "gate_input"  # kept by the MLP's activation function
    ATTENTION_OUTPUT = "attention_output"  # kept by attention and by the projection behind it
    LOGITS = "logits"
    DISPATCH = "dispatch"  # rows on their way to experts
    COMBINE = "combine"  # rows on their way back
    FULL = "full"  # fp32 whatever the recipe: router scores, log-sum-exp, loss
    INDEX = "index"  # 32-bit row maps
    MASK = "mask"  # what dropout let through, a byte an element
    CACHE = "cache"  # keys and values of earlier tokens, of a model that answers


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRecipe:
    """Dtypes by role, and bytes per parameter.

    `linear_weight_bytes` for GEMM weights of layers (working copies of every kind together), `other_weight_bytes` for
    embedding, head and norms; states are master + two Adam moments.
    `attention_output_bytes` is what attention's output takes in all the formats it is kept in. `remake_activation`:
    the activation function's output is formed again from its kept inputs when the weight gradient needs it.
    `linear_input_bytes` stands where scales or a mixture make it other than `linear_input` has. A share `sensitive` of
    the linear layers multiplies in the attention's dtype: a mean over layers, whichever of them these are.
    `cast_passes`: how often a cast reads its tensor. `stored_weight_bytes`: of a linear weight that lies in another
    format than products have, as kernels read it; 0: the product's. `cache_bytes`: of an element of the cache.
    """

    name: str
    gemm: DType
    attention: DType
    activation: DType
    linear_input: DType
    gate_input: DType
    dispatch: DType
    combine: DType
    linear_weight_bytes: float
    other_weight_bytes: float
    grad_bytes: float
    master_bytes: float
    moment_bytes: float
    attention_output_bytes: float
    source: str
    remake_activation: bool = False
    linear_input_bytes: float = 0.0  # 0: those of the dtype
    sensitive: float = 0.0
    cast_passes: float = 1.0
    stored_weight_bytes: float = 0.0
    cache_bytes: float = 2.0
    widths: dict[Role, float] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        dtypes = {
            Role.ACTIVATION: self.activation, Role.LINEAR_INPUT: self.linear_input, Role.GATE_INPUT: self.gate_input,
            Role.DISPATCH: self.dispatch, Role.COMBINE: self.combine,
        }  # fmt: skip
        widths = {role: dtype.nbytes for role, dtype in dtypes.items()}
        widths |= {Role.ATTENTION_OUTPUT: self.attention_output_bytes}
        widths |= {Role.LINEAR_INPUT: self.linear_input_bytes} if self.linear_input_bytes else {}
        kept = {Role.FULL: 4.0, Role.INDEX: 4.0, Role.MASK: 1.0, Role.LOGITS: self.activation.nbytes,
                Role.CACHE: self.cache_bytes}  # fmt: skip
        object.__setattr__(self, "widths", widths | kept)

    @property
    def state_bytes(self) -> float:
        """Optimizer bytes per parameter: master copy and two moments."""
        return self.master_bytes + 2 * self.moment_bytes

    @property
    def updated_bytes(self) -> float:
        """Bytes of a parameter's weight that an update moves: written; read as well where it has no master copy."""
        return self.activation.nbytes * (1.0 if self.master_bytes else 2.0)

    def nbytes(self, role: Role) -> float:
        """Bytes of one element in that role."""
        return self.widths[role]


@lru_cache(maxsize=64)
def apart(r: PrecisionRecipe) -> tuple[PrecisionRecipe, PrecisionRecipe]:
    """The recipe of the linear layers that multiply in the narrow format, and of the sensitive ones."""
    return replace(r, sensitive=0.0), replace(r, gemm=r.attention, sensitive=0.0)


def _half(name: str, dtype: DType) -> PrecisionRecipe:
    return PrecisionRecipe(
        name=name, gemm=dtype, attention=dtype, activation=dtype, linear_input=dtype, gate_input=dtype,
        dispatch=dtype, combine=dtype, linear_weight_bytes=2, other_weight_bytes=2, grad_bytes=4, master_bytes=4,
        moment_bytes=4, attention_output_bytes=2,
        source="Micikevicius 2018, arXiv:1710.03740, with fp32 gradient accumulation",
    )  # fmt: skip


def _te(name: str, gemm: DType, *, weight_bytes: float, input_bytes: float, source: str) -> PrecisionRecipe:
    """Transformer Engine's way: a bf16 weight and the casts of both its layouts, kept over the micro-batches.

    Inputs of linear layers are kept in the layout of the weight gradient only; everything between them is bf16.
    """
    return PrecisionRecipe(
        name=name, gemm=gemm, attention=DType.BF16, activation=DType.BF16, linear_input=gemm, gate_input=DType.BF16,
        dispatch=DType.BF16, combine=DType.BF16, linear_weight_bytes=2 + 2 * weight_bytes, other_weight_bytes=2,
        grad_bytes=4, master_bytes=4, moment_bytes=4, linear_input_bytes=input_bytes,
        attention_output_bytes=2 + input_bytes, source=source,
    )  # fmt: skip


SENSITIVE = 0.15  # of the linear layers, most of them the last ones: arXiv:2509.25149, section 4

RECIPES: dict[str, PrecisionRecipe] = {
    "fp32": PrecisionRecipe(
        name="fp32", gemm=DType.FP32, attention=DType.FP32, activation=DType.FP32, linear_input=DType.FP32,
        gate_input=DType.FP32, dispatch=DType.FP32, combine=DType.FP32, linear_weight_bytes=4, other_weight_bytes=4,
        grad_bytes=4, master_bytes=0, moment_bytes=4, attention_output_bytes=4,
        source="plain fp32 training, whose weights are their own master copy: PyTorch's default dtype",
    ),
    "bf16": _half("bf16", DType.BF16),
    "fp16": _half("fp16", DType.FP16),
    "fp8": PrecisionRecipe(
        name="fp8", gemm=DType.FP8, attention=DType.BF16, activation=DType.BF16, linear_input=DType.FP8,
        gate_input=DType.BF16, dispatch=DType.BF16, combine=DType.BF16,
        # bf16 weight, its fp8 cast and the transpose that Hopper's fp8 GEMM layout needs, kept over the micro-batches
        linear_weight_bytes=2 + 1 + 1, other_weight_bytes=2, grad_bytes=4, master_bytes=4, moment_bytes=4,
        attention_output_bytes=2 + 1,  # bf16 for attention's backward, fp8 for the projection's weight gradient
        source="Micikevicius 2022, arXiv:2209.05433, per-tensor scaling as in Transformer Engine's documentation",
    ),
    "fp8_block": PrecisionRecipe(
        name="fp8_block", gemm=DType.FP8, attention=DType.BF16, activation=DType.BF16, linear_input=DType.FP8,
        gate_input=DType.FP8, dispatch=DType.FP8, combine=DType.BF16,
        # 128x128 blocks serve both layouts: one fp8 copy, 4 bytes of scale per 16384 elements
        linear_weight_bytes=1 + 4 / 16384, other_weight_bytes=2, grad_bytes=4, master_bytes=4, moment_bytes=2,
        attention_output_bytes=1.5,  # one E5M6 copy serves both
        remake_activation=True,
        source="DeepSeek-V3, arXiv:2412.19437, section 3.3 (fp8 caches and dispatch, E5M6, SwiGLU outputs formed "
        "again, bf16 moments)",
    ),
    "fp8_1x128": _te(
        "fp8_1x128", DType.FP8,
        # Weights in blocks of 128x128, activations and gradients of 1x128, a scale of 4 bytes each; Hopper's products
        # want both layouts of a weight, and the weight gradient a copy of its input scaled along tokens.
        weight_bytes=1 + 4 / 16384, input_bytes=1 + 4 / 128,
        source="Transformer Engine, user guide, FP8 blockwise scaling (Float8BlockScaling)",
    ),
    "mxfp8": _te(
        "mxfp8", DType.MXFP8,
        # A scale of 8 bits for 32 elements along the inner axis of a product: each layout is a cast of its own.
        weight_bytes=DType.MXFP8.nbytes, input_bytes=DType.MXFP8.nbytes,
        source="OCP Microscaling Formats v1.0, section 5.2; Mishra 2025, arXiv:2506.08027; Transformer Engine, user "
        "guide, MXFP8BlockScaling",
    ),
    "nvfp4": replace(
        _te(
            "nvfp4", DType.NVFP4,
            # Scales of 16x16 blocks let both layouts of a weight hold the same numbers; they are two copies all the
            # same. Sensitive layers keep bf16 alone.
            weight_bytes=(1 - SENSITIVE) * DType.NVFP4.nbytes,
            input_bytes=(1 - SENSITIVE) * DType.NVFP4.nbytes + SENSITIVE * DType.BF16.nbytes,
            source="NVIDIA 2025, arXiv:2509.25149, section 4: 15 % of linear layers in bf16, Hadamard transforms of "
            "16x16 on inputs of weight gradients, stochastic rounding of gradients, two-dimensional scales of weights",
        ),
        sensitive=SENSITIVE,
        # The largest value of a tensor (and of its transform) has to be known before its scales are: two reads, of the
        # layers that are cast at all. The transform's 32 FLOPs an element and the rounding hide behind them.
        cast_passes=2.0 * (1 - SENSITIVE),
    ),
}  # fmt: skip

GRADS = "bf16_grads"  # ends the names of recipes that accumulate and reduce gradients in bf16
for _name in ("bf16", "fp8", "fp8_1x128", "mxfp8", "nvfp4"):
    _halved = GRADS if _name == "bf16" else f"{_name}_{GRADS}"
    RECIPES[_halved] = replace(
        RECIPES[_name], name=_halved, grad_bytes=2,
        source=f"{RECIPES[_name].source}; gradients in bf16: Megatron-Core's accumulate_allreduce_grads_in_fp32 off",
    )  # fmt: skip


def with_bf16_grads(name: str) -> str:
    """The recipe that differs in its gradients alone, where there is one."""
    told = GRADS if name == "bf16" else f"{name}_{GRADS}"
    return told if told in RECIPES else name


def recipe(name: str) -> PrecisionRecipe:
    """The recipe of that name; ValueError names the known ones."""
    if name not in RECIPES:
        raise ValueError(f"precision must be one of {sorted(RECIPES)}, but got {name!r}")
    return RECIPES[name]
