"""Formats of a model that answers: of weights, of what products read, of the cache. Knows no model and no chip.

Weights that take fewer bytes than the inputs of products load as few and are made wider on the way: products run in the
inputs' format. Embedding, head, router and norms keep two bytes, attention multiplies in half precision. Ignores the
arithmetic of making weights and cache wider, which kernels do beside their loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from estimator.precision import PrecisionRecipe
from hardware.dtype import DType

__all__ = ["ACTIVATIONS", "CACHES", "STORED_BYTES", "WEIGHTS", "Formats"]

STORED_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": DType.FP8.nbytes,
    "mxfp8": DType.MXFP8.nbytes,
    "int8": DType.INT8.nbytes,
    "nvfp4": DType.NVFP4.nbytes,
    "mxfp4": 0.5 + 1.0 / 32.0,  # an E8M0 scale per 32 elements: OCP Microscaling Formats v1.0, section 5.2
    "int4": 0.5 + 2.0 / 128.0,  # groups of 128 with a scale in half precision, as AWQ has them (arXiv:2306.00978)
}
"""Bytes of an element, block scales included. Scales of whole rows and tensors are ignored."""
WEIGHTS = ("bf16", "fp16", "fp8", "mxfp8", "int8", "nvfp4", "mxfp4", "int4")
ACTIVATIONS = ("bf16", "fp16", "fp8", "mxfp8", "int8", "nvfp4")  # what matrix engines multiply
CACHES = ("bf16", "fp16", "fp8", "int8", "nvfp4", "int4")
HALVES = ("bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """`weights` of linear layers, `activations` that enter their products, `kv_cache`.

    >>> Formats(weights="int4").recipe.gemm, Formats(weights="fp8", activations="fp8").recipe.gemm
    (<DType.BF16: 'bf16'>, <DType.FP8: 'fp8'>)
    """

    weights: str = "bf16"
    activations: str = "bf16"
    kv_cache: str = "bf16"

    def __post_init__(self) -> None:
        for name, known in (("weights", WEIGHTS), ("activations", ACTIVATIONS), ("kv_cache", CACHES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {list(known)}, but got {getattr(self, name)!r}")
        wide, narrow = STORED_BYTES[self.weights], STORED_BYTES[self.activations]
        if wide > narrow:
            raise ValueError(
                f"weights ({self.weights}) must take no more bytes than activations ({self.activations}), for a "
                "product reads both in one format; narrow the weights too, or widen the activations"
            )

    @property
    def half(self) -> DType:
        """What is not quantised."""
        return DType.FP16 if "fp16" in (self.weights, self.activations) else DType.BF16

    @property
    def recipe(self) -> PrecisionRecipe:
        """What passes and prices take."""
        return _recipe(self)


@lru_cache(maxsize=256)
def _recipe(f: Formats) -> PrecisionRecipe:
    half, gemm, weight = f.half, DType(f.activations), STORED_BYTES[f.weights]
    sent = gemm if gemm.nbytes <= 1.1 else half  # rows travel to experts as their products read them
    return PrecisionRecipe(
        name=f"{f.weights}-{f.activations}-{f.kv_cache}", gemm=half if gemm.nbytes == half.nbytes else gemm,
        attention=half, activation=half, linear_input=gemm, gate_input=half, dispatch=sent, combine=half,
        linear_weight_bytes=weight, other_weight_bytes=half.nbytes, grad_bytes=0, master_bytes=0, moment_bytes=0,
        attention_output_bytes=half.nbytes, stored_weight_bytes=weight, cache_bytes=STORED_BYTES[f.kv_cache],
        source="formats of a model that answers (docs/inference.md)",
    )  # fmt: skip
