"""One pass of one model chunk as a script: its blocks in order, with what ZeRO-2, ZeRO-3 and the host move for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from estimator.cost.table import Base, PriceTable
from estimator.detail.block import BlockWriter
from estimator.detail.host import HostTraffic
from estimator.detail.script import Lane, Script, Visit
from estimator.detail.traffic import GradientTraffic, Transfer
from estimator.graph import BlockKind, OpGraph
from estimator.keep import BUFFERS, Keep
from estimator.precision import PrecisionRecipe
from estimator.schedule import Kind
from estimator.strategy import Strategy
from estimator.tasks import Category, Shield
from hardware.system import SystemSpec

__all__ = ["BlockRun", "PassWriter", "Shares"]

BlockRun = tuple[BlockKind, bool]
"""A block and whether its forward runs again in backward."""


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
    keep: Keep  # ZeRO stage 0 where nobody shares anything
    host: HostTraffic
    joined_s: float = 0.0  # as of Script
    _writers: dict[tuple[BlockRun, bool], BlockWriter] = field(default_factory=dict)

    def write(self, blocks: Sequence[BlockRun], kind: Kind, *, turns: bool = False) -> Script:
        """The script of one micro-batch's pass over a chunk of these blocks (in model order).

        `turns`: its backward follows at once, so that what the last blocks keep stays on the chip.
        """
        script = Script(num_links=self.system.num_tiers, joined_s=self.joined_s)
        is_forward = kind is Kind.F
        places = range(len(blocks)) if is_forward else range(len(blocks) - 1, -1, -1)
        for place in places:
            self._visit(script, place, blocks[place], kind, stays=turns and place >= len(blocks) - BUFFERS)
        if not script.tail:  # a chunk without blocks, or without weights
            script.compute("nothing", 0.0, Category.FORWARD if is_forward else Category.BACKWARD)
        return script

    def _visit(self, script: Script, place: int, run: BlockRun, kind: Kind, *, stays: bool) -> None:
        start, written, before = len(script), len(script.edges), set(script.tail)
        stored = (
            0.0 if stays or kind is Kind.W else self.host.activations(self.graphs[run[1]].blocks[run[0]], self.recipe)
        )
        up = -1 if kind is Kind.W else self._fetch(script, run[0], kind, 0.0 if kind is Kind.F else stored)
        gathers = self.keep.zero >= 3 and (kind is Kind.F or (kind is not Kind.W and bool(self.keep.reshard)))
        if gathers:
            self._gather(script, run[0], up)
        elif up >= 0:
            script.tail = [*script.tail, up]
        if len(script.visits) >= BUFFERS:
            earlier = script.visits[-BUFFERS]  # its buffers are wanted again
            script.tail += [earlier.reduce] if self.strategy.overlap.dp and earlier.reduce >= 0 else []
            script.tail += [earlier.down] if earlier.down >= 0 and earlier.reduce < 0 else []
        writer = self._writer(run, splits=kind in {Kind.B, Kind.W})
        if kind is Kind.F:
            writer.forward(script)
        elif kind is Kind.W:
            writer.weight_gradients(script)
        else:
            writer.backward(script)
        if gathers and self.keep.reshard:
            script.free_bytes[script.tail[-1]] += self.shares.weight_bytes[run[0]]
        reduce = self._reduce(script, run[0]) if self.keep.zero >= 2 and kind in {Kind.BW, Kind.W} else -1
        if kind is Kind.F:
            down = self._store(script, self.host.moved(stored), script.tail, stored)
        elif kind is Kind.B:
            down = -1
        else:
            down = self._store(script, self.host.gradients(run[0]), [reduce] if reduce >= 0 else script.tail, 0.0)
        heads = {task for other, task in script.edges[written:] if other in before}
        heads |= {task for task in script.entries if task >= start}
        script.visits.append(
            Visit(
                block=place, start=start, stop=len(script), heads=tuple(sorted(heads)), tails=tuple(script.tail),
                reduce=reduce, down=down, up=up,
            )
        )  # fmt: skip

    def _writer(self, run: BlockRun, *, splits: bool) -> BlockWriter:
        key = (run, splits)
        if key not in self._writers:
            block = self.graphs[run[1]].blocks[run[0]]
            self._writers[key] = BlockWriter(block, self.strategy, self.system, self.recipe, splits)
        return self._writers[key]

    def _gather(self, script: Script, kind: BlockKind, up: int) -> None:
        """ZeRO-3: a block's weights, fetched while the blocks before it run where that overlaps.

        Weights that are not freed after forward are counted as there all the time. `up`: what fetches a shard, or -1.
        """
        what = self._moved(kind, self.shares.gather_bytes)
        nbytes = self.shares.weight_bytes[kind] if self.keep.reshard else 0.0
        ahead = int(self.keep.prefetch)
        if not self.strategy.overlap.dp or not ahead:
            script.tail += [up] if up >= 0 else []
            script.transfer("weights.gather", Lane.DP, what, Category.DP, Shield.NOTHING, alloc=nbytes)
            return
        waits = self._begun(script)
        task = self._early(
            script, "weights.gather", Lane.DP, what, Category.DP, ahead + 1, after=[up] if up >= 0 else [], alloc=nbytes
        )
        script.tail = [*waits, task]

    def _begun(self, script: Script) -> list[int]:
        """What the pass itself waits for, which a transfer ahead of it does not."""
        if not script.tail:
            script.compute("begin", 0.0, Category.FORWARD)
        return list(script.tail)

    def _early(
        self, script: Script, name: str, lane: Lane, what: Transfer, category: Category, room: int, *,
        after: list[int], alloc: float,
    ) -> int:  # fmt: skip
        """A transfer that starts once the block `room` visits earlier has ended, of a pass before this if need be."""
        done = len(script.visits)
        waits = [*after, *(script.visits[-room].tails if done >= room else ())]
        task = script.transfer(name, lane, what, category, Shield.NEIGHBOURS, after=waits, alloc=alloc)
        if done < room:
            script.ahead.append((task, room - done))
            if not waits:
                script.entries.remove(task)
        return task

    def _fetch(self, script: Script, block: BlockKind, kind: Kind, stored: float) -> int:
        """What a block needs from the host, its weights unless they are still gathered, and what it stored: or -1."""
        weights = self.host.weights(block) if kind is Kind.F or self.keep.reshard else 0.0
        nbytes = weights + stored
        if nbytes <= 0:
            return -1
        self._begun(script)
        what = self.host.moved(nbytes)
        return self._early(script, "host.fetch", Lane.UP, what, Category.OFFLOAD, BUFFERS, after=[], alloc=stored)

    def _store(self, script: Script, what: Transfer, after: list[int], free: float) -> int:
        """What a block leaves on the host: the task, or -1."""
        if what.seconds <= 0:
            return -1
        return script.transfer(
            "host.store", Lane.DOWN, what, Category.OFFLOAD, Shield.NEIGHBOURS, after=list(after), free=free
        )

    def _reduce(self, script: Script, kind: BlockKind) -> int:
        """ZeRO-2 and ZeRO-3: a block's gradients, reduced to their owners."""
        what = self._moved(kind, self.shares.grad_bytes)
        room = script.visits[-BUFFERS].down if len(script.visits) >= BUFFERS else -1  # for the sum, which goes down
        waits = [room] if room >= 0 else []
        if not self.strategy.overlap.dp:
            script.tail += waits
            return script.transfer("gradients.reduce", Lane.DP, what, Category.DP, Shield.NOTHING)
        return script.transfer(
            "gradients.reduce", Lane.DP, what, Category.DP, Shield.NEIGHBOURS, after=[*script.tail, *waits]
        )

    def _moved(self, kind: BlockKind, nbytes: float) -> Transfer:
        return self.traffic.transfer(self.shares.dense[kind] * nbytes, self.shares.expert[kind] * nbytes)
