"""What a block sends to the host and fetches from it in one pass, as transfers of the link's two directions.

Knows shares and bytes; which task waits for which is written in passes.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator.compose import Constants
from estimator.cost.table import Base, PriceTable
from estimator.detail.lifetimes import kept_bytes
from estimator.detail.traffic import GradientTraffic, Transfer
from estimator.graph import Block, BlockKind
from estimator.keep import Keep
from estimator.precision import PrecisionRecipe

__all__ = ["HostTraffic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """Shares on the host, and by block kind the bytes of weights that come up and of gradients that go down."""

    keep: Keep
    constants: Constants
    weight_bytes: dict[BlockKind, float]
    grad_bytes: dict[BlockKind, float]
    num_links: int

    @classmethod
    def of(
        cls, prices: PriceTable, keep: Keep, constants: Constants, traffic: GradientTraffic, num_links: int
    ) -> HostTraffic:
        """From the price table of one row. ZeRO-3 fetches shards, ZeRO-2 and 3 send them."""
        row = dict(zip(prices.kinds, prices.base[0], strict=True))
        dense, expert = traffic.dense_shards, traffic.expert_shards
        by = {stage: (dense, expert) if keep.zero >= stage else (1.0, 1.0) for stage in (2, 3)}
        return cls(
            keep=keep, constants=constants, num_links=num_links,
            weight_bytes={
                kind: float(x[Base.DENSE_WEIGHT_BYTES] / by[3][0] + x[Base.EXPERT_WEIGHT_BYTES] / by[3][1])
                for kind, x in row.items()
            },
            grad_bytes={
                kind: float(x[Base.DENSE_PARAMS] / by[2][0] + x[Base.EXPERT_PARAMS] / by[2][1]) * constants.grad_bytes
                for kind, x in row.items()
            },
        )  # fmt: skip

    def activations(self, block: Block, recipe: PrecisionRecipe) -> float:
        """Bytes of a block's saved tensors that go to the host."""
        return self.keep.activations * kept_bytes(block, recipe) if self.keep.activations else 0.0

    def weights(self, kind: BlockKind) -> float:
        """Bytes of a block's weights that come up for each pass."""
        return self.keep.parameters * self.weight_bytes[kind]

    def moved(self, nbytes: float) -> Transfer:
        """Bytes over the link, one way: beside the network's links, by copy engines."""
        return Transfer(nbytes * self.constants.host_s_per_byte, np.zeros(self.num_links), 0.0)

    def gradients(self, kind: BlockKind) -> Transfer:
        """A block's gradients, which the host adds to those that it has."""
        nbytes = self.keep.gradients * self.grad_bytes[kind]
        return Transfer(nbytes * self.constants.host_sum_s_per_byte, np.zeros(self.num_links), 0.0)
