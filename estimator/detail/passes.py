"""One pass of one model chunk as a script: its blocks in order, with what ZeRO-2 and ZeRO-3 move for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from estimator.cost.table import Base, PriceTable
from estimator.detail.block import BlockWriter
from estimator.detail.script import Lane, Script, Visit
from estimator.detail.traffic import GradientTraffic, Transfer
from estimator.graph import BlockKind, OpGraph
from estimator.precision import PrecisionRecipe
from estimator.schedule import Kind
from estimator.strategy import Strategy
from estimator.tasks import Category, Shield
from hardware.system import SystemSpec

__all__ = ["BlockRun", "PassWriter", "Shares"]

BlockRun = tuple[BlockKind, bool]
"""A block and whether its forward runs again in backward."""

PREFETCHED = 2  # blocks whose weights are on the chip at once under ZeRO-3: the one at work and the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What a block moves over data-parallel ranks: parameters of its two groups, bytes of each on the wire."""

    dense: dict[BlockKind, float]
    expert: dict[BlockKind, float]
    weight_bytes: dict[BlockKind, float]  # of the gathered block, in memory
    grad_bytes: float
    gather_bytes: float

    @classmethod
    def of(cls, prices: PriceTable, grad_bytes: float, gather_bytes: float) -> Shares:
        """From the price table of one row."""

        def column(name: str) -> dict[BlockKind, float]:
            return dict(zip(prices.kinds, prices.base[0, :, Base[name]].tolist(), strict=True))

        dense_w, expert_w = column("DENSE_WEIGHT_BYTES"), column("EXPERT_WEIGHT_BYTES")
        return cls(
            dense=column("DENSE_PARAMS"), expert=column("EXPERT_PARAMS"),
            weight_bytes={kind: dense_w[kind] + expert_w[kind] for kind in prices.kinds},
            grad_bytes=grad_bytes, gather_bytes=gather_bytes,
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class PassWriter:
    """Writes passes. `graphs`: blocks by whether their forward runs again."""

    graphs: dict[bool, OpGraph]
    strategy: Strategy
    system: SystemSpec
    recipe: PrecisionRecipe
    traffic: GradientTraffic
    shares: Shares
    zero: int  # 0 where nobody shares anything
    joined_s: float = 0.0  # as of Script
    _writers: dict[tuple[BlockRun, bool], BlockWriter] = field(default_factory=dict)

    def write(self, blocks: Sequence[BlockRun], kind: Kind) -> Script:
        """The script of one micro-batch's pass over a chunk of these blocks (in model order)."""
        script = Script(num_links=self.system.num_tiers, joined_s=self.joined_s)
        is_forward = kind is Kind.F
        places = range(len(blocks)) if is_forward else range(len(blocks) - 1, -1, -1)
        for place in places:
            self._visit(script, place, blocks[place], kind)
        if not script.tail:  # a chunk without blocks, or without weights
            script.compute("nothing", 0.0, Category.FORWARD if is_forward else Category.BACKWARD)
        return script

    def _visit(self, script: Script, place: int, run: BlockRun, kind: Kind) -> None:
        start, written, before = len(script), len(script.edges), set(script.tail)
        if self.zero >= 3 and kind is not Kind.W:
            self._gather(script, run[0])
        if self.strategy.overlap.dp and len(script.visits) >= PREFETCHED:
            earlier = script.visits[-PREFETCHED].reduce  # its buffer is wanted again
            script.tail += [earlier] if earlier >= 0 else []
        writer = self._writer(run, splits=kind in {Kind.B, Kind.W})
        if kind is Kind.F:
            writer.forward(script)
        elif kind is Kind.W:
            writer.weight_gradients(script)
        else:
            writer.backward(script)
        if self.zero >= 3 and kind is not Kind.W:
            script.free_bytes[script.tail[-1]] += self.shares.weight_bytes[run[0]]
        reduce = self._reduce(script, run[0]) if self.zero >= 2 and kind in {Kind.BW, Kind.W} else -1
        heads = {task for other, task in script.edges[written:] if other in before}
        heads |= {task for task in script.entries if task >= start}
        script.visits.append(
            Visit(
                block=place, start=start, stop=len(script), heads=tuple(sorted(heads)), tails=tuple(script.tail),
                reduce=reduce,
            )
        )  # fmt: skip

    def _writer(self, run: BlockRun, *, splits: bool) -> BlockWriter:
        key = (run, splits)
        if key not in self._writers:
            block = self.graphs[run[1]].blocks[run[0]]
            self._writers[key] = BlockWriter(block, self.strategy, self.system, self.recipe, splits)
        return self._writers[key]

    def _gather(self, script: Script, kind: BlockKind) -> None:
        """ZeRO-3: a block's weights, fetched while the block before it runs where that overlaps."""
        what = self._moved(kind, self.shares.gather_bytes)
        nbytes = self.shares.weight_bytes[kind]
        if not self.strategy.overlap.dp:
            script.transfer("weights.gather", Lane.DP, what, Category.DP, Shield.NOTHING, alloc=nbytes)
            return
        done = len(script.visits)
        if not script.tail:  # what the pass itself waits for, which the gather does not
            script.compute("begin", 0.0, Category.FORWARD)
        after = list(script.visits[-PREFETCHED].tails) if done >= PREFETCHED else []
        waits = list(script.tail)
        task = script.transfer(
            "weights.gather", Lane.DP, what, Category.DP, Shield.NEIGHBOURS, after=after, alloc=nbytes
        )
        if not after:
            script.entries.remove(task)
            script.ahead.append((task, PREFETCHED - done))
        script.tail = [*waits, task]

    def _reduce(self, script: Script, kind: BlockKind) -> int:
        """ZeRO-2 and ZeRO-3: a block's gradients, reduced to their owners."""
        what = self._moved(kind, self.shares.grad_bytes)
        if not self.strategy.overlap.dp:
            return script.transfer("gradients.reduce", Lane.DP, what, Category.DP, Shield.NOTHING)
        return script.transfer(
            "gradients.reduce", Lane.DP, what, Category.DP, Shield.NEIGHBOURS, after=list(script.tail)
        )

    def _moved(self, kind: BlockKind, nbytes: float) -> Transfer:
        return self.traffic.transfer(self.shares.dense[kind] * nbytes, self.shares.expert[kind] * nbytes)
