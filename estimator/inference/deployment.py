"""How a model is laid over a cluster to answer. Knows nothing of what that costs.

Ranks are numbered tp, dp, pp from the inside out; experts fold over tp and dp as etp, ep. `dp` is what is left of the
chips: replicas of attention, each with its share of the sequences; where ep spans them, they answer in step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from estimator.inference.formats import Formats
from estimator.strategy import CudaGraph, Fusion, OwnFusion, Strategy

__all__ = ["SERVED_FUSION", "Deployment"]

SERVED_FUSION: frozenset[Fusion | OwnFusion] = frozenset(Fusion) - {
    Fusion.FUSED_LOSS,
    Fusion.FUSED_DROPOUT,
    Fusion.FUSED_SOFTMAX,
}
"""Kernels that inference engines have; those of training alone do nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One way to answer.

    `overlap_ep`: two halves of the batch take turns, so that one's expert traffic runs beside the other's compute.
    `absorb`: decode multiplies latent attention's queries into the latents instead of projecting these up
    (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
    `redundant_experts`: copies of hot experts over all of ep. `drafts`: tokens that the model's own prediction module
    proposes in every pass of decode, which the pass checks. `chunk`: tokens of prompts that a replica reads beside the
    tokens that it decodes, in as many passes as its prompts need; 0: prompts are read elsewhere.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    formats: Formats = Formats()
    cuda_graph: CudaGraph | None = None  # None: full in decode, none in prefill
    fusion: frozenset[Fusion | OwnFusion] = SERVED_FUSION
    overlap_ep: bool = False
    absorb: bool = True
    redundant_experts: int = 0
    drafts: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but got {getattr(self, name)}")
        for name in ("redundant_experts", "drafts", "chunk"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, but got {getattr(self, name)}")

    def strategy(self, *, sequences: float, has_experts: bool, graphs: CudaGraph) -> Strategy:
        """What the passes read, for a pass of so many sequences on a replica.

        Tokens are split over tp between the halves of layers that have experts, so that each is sent to them once.
        """
        return Strategy(
            tp=self.tp, pp=self.pp, ep=self.ep, etp=self.etp, micro_batch=sequences, fusion=self.fusion,
            sequence_parallel=has_experts and self.tp > 1, cuda_graph=graphs,
            redundant_experts=self.redundant_experts,
        )  # fmt: skip

    def but(self, **changes: object) -> Deployment:
        """A copy with some choices changed."""
        return replace(self, **changes)  # type: ignore[arg-type]  # names are checked by replace
