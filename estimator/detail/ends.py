"""What begins and ends a step: gradients to their owners, the update, and the new weights back to all.

Gradients travel in buckets as soon as the last micro-batch has completed them; weights come back in buckets before the
first forward that reads them (of the same step: a step is replayed as if the one before had been like it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from estimator.compose import Constants, Net
from estimator.detail.instances import Instances
from estimator.detail.passes import BlockRun, Shares
from estimator.detail.script import Lane, Visit
from estimator.detail.traffic import GradientTraffic, Transfer
from estimator.gradients import pieces_of, update_parts
from estimator.graph import BlockKind
from estimator.keep import Keep
from estimator.layout import Layout
from estimator.rules import Case
from estimator.schedule import Kind
from estimator.tasks import Category, Shield

__all__ = ["MAX_BUCKETS", "Ends"]

MAX_BUCKETS = 300_000
"""Of all ranks and one direction, some seconds of unrolling; 405 B parameters in 1 MB buckets over tp 8 are 200 K."""

ROUNDING = 1e-9  # of a bucket: divided parts may sum to a little less


class _Group(NamedTuple):
    """Whose gradients a stream of buckets carries, and the bytes of a bucket."""

    dense: bool
    expert: bool
    bucket: float

    def of(self, dense: float, expert: float) -> tuple[float, float]:
        """Its part of a block's elements."""
        return dense * self.dense, expert * self.expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Adds those tasks to the instances of all passes. `passes`: per rank and pass, its one or two instances."""

    made: Instances
    case: Case
    constants: Constants
    traffic: GradientTraffic
    shares: Shares
    keep: Keep
    shared: bool
    chunks: Sequence[tuple[BlockRun, ...]]
    layout: Layout
    passes: Sequence[Sequence[tuple[int, ...]]]
    apart_s: Sequence[float]  # per rank, what the update takes beyond what it does to all parameters

    def write(self) -> None:
        """Gradients, norm, update, weights. ValueError where there are more buckets than can be replayed."""
        self._refuse_endless()
        ranks = range(len(self.passes))
        reduced = [self._reduce(rank) for rank in ranks]
        everything = [
            task for rank in ranks
            for under_way in (self._last_tails(rank), self._before("reduce", rank), self._before("down", rank))
            for task in under_way
        ]  # fmt: skip
        everything += [task for mine in reduced for task in mine]
        nothing = np.zeros(self.made.num_links)
        norm = self.made.extra(
            0, Lane.DP, "gradient norm", Transfer(self.constants.norm_latency_s, nothing, 0.0),
            Category.OPTIMIZER_COMM, Shield.NOTHING, everything,
        )  # fmt: skip
        for rank in ranks:
            updates = self._update(rank, norm)
            if self.shared and self.keep.zero in {1, 2}:
                self._gather(rank, updates)

    def _refuse_endless(self) -> None:
        if not self.shared or self.keep.zero >= 3 or not self.case.sizes["overlap_dp"][0]:
            return
        held = [group.of(*self._held(rank)) for rank in range(len(self.passes)) for group in self._groups()]
        buckets = [group.bucket for _ in self.passes for group in self._groups()]
        number = sum(
            float(pieces_of(sum(elements) * self.constants.grad_bytes, bucket))
            for elements, bucket in zip(held, buckets, strict=True)
        )
        if number > MAX_BUCKETS:
            raise ValueError(
                f"a step must send at most {MAX_BUCKETS} buckets of gradients to be replayed, but bucket_bytes "
                f"{int(self.case.sizes['bucket_bytes'][0])} makes {number:.0f}; raise it (and expert_bucket_bytes)"
            )

    # ------------------------------------------------------------------------------------------------------ gradients

    def _reduce(self, rank: int) -> list[int]:
        """Gradients of stages 0 and 1: bucket by bucket beside the last backward passes, or all at the end.

        Of stages 2 and 3, the sum over the replicas of HSDP.
        """
        alone = not self.shared and self.traffic.expert.per_byte == 0  # copies of experts share gradients all the same
        if alone or self.keep.zero >= 2:
            return self._sum_replicas(rank) if self.keep.zero >= 2 and self.traffic.replicated else []
        times = 2.0 if self.keep.zero == 0 else 1.0
        dense, expert = self._held(rank)
        if not (self.shared and self.case.sizes["overlap_dp"][0]):
            what = self.traffic.transfer(dense * self.constants.grad_bytes, expert * self.constants.grad_bytes, times)
            after = self._last_tails(rank)
            done = self._dp(rank, "gradients.reduce", what, Shield.NOTHING, after)
            return self._across(rank, dense, expert, Shield.NOTHING, [done]) or [done]
        out: list[int] = []
        for group in self._groups():
            parts = list(self._completed(rank, group))
            for share_dense, share_expert, after in _buckets(parts, group.bucket, self.constants):
                what = self.traffic.transfer(share_dense, share_expert, times)
                done = self._dp(rank, "gradients.reduce", what, Shield.BACKWARD, after)
                elements = share_dense / self.constants.grad_bytes, share_expert / self.constants.grad_bytes
                out += self._across(rank, *elements, Shield.BACKWARD, [done]) or [done]
        return out

    def _across(self, rank: int, dense: float, expert: float, shield: Shield, after: list[int]) -> list[int]:
        """What shards hold of so many elements, summed over the replicas, where there are any."""
        if not self.traffic.replicated:
            return []
        what = self.traffic.across(dense * self.constants.grad_bytes, expert * self.constants.grad_bytes)
        lane = Lane.REPLICAS if self.keep.zero >= 2 else Lane.DP  # FSDP2's stream, Megatron's one for both
        return [self.made.extra(rank, lane, "gradients.sum", what, Category.DP, shield, after)]

    def _sum_replicas(self, rank: int) -> list[int]:
        """Stages 2 and 3: after the last reduce-scatters, block by block (3) or bucket by bucket, or all at the end."""
        if not self.case.sizes["overlap_dp"][0]:
            return self._across(rank, *self._held(rank), Shield.NOTHING, self._last_tails(rank))
        parts = []
        for instance in self._last_backwards(rank):
            chunk = self.made.chunk[instance]
            for visit in self.made.of(instance).visits:
                done = self.made.global_ids(instance, [visit.reduce])
                parts.append((*self._elements(rank, self.chunks[chunk][visit.block][0]), done))
        if self.keep.zero >= 3:
            return [task for d, e, done in parts for task in self._across(rank, d, e, Shield.BACKWARD, done)]
        out: list[int] = []
        for group in self._groups():
            mine = [(*group.of(d, e), done) for d, e, done in parts]
            for d, e, done in _buckets([part for part in mine if part[0] + part[1] > 0], group.bucket, self.constants):
                elements = d / self.constants.grad_bytes, e / self.constants.grad_bytes
                out += self._across(rank, *elements, Shield.BACKWARD, done)
        return out

    def _groups(self) -> list[_Group]:
        """Streams of buckets: one for all gradients, or one for the dense and one for the experts."""
        mine, experts = float(self.case.sizes["bucket_bytes"][0]), self.constants.expert_bucket
        return [_Group(True, True, mine)] if experts < 0 else [_Group(True, False, mine), _Group(False, True, experts)]

    def _completed(self, rank: int, group: _Group) -> Iterator[tuple[float, float, list[int]]]:
        """Dense and expert gradient elements in the order in which they are complete, with the tasks that do it.

        A block's are complete bit by bit along its backward: it is cut into parts of about a bucket.
        """
        for instance in self._last_backwards(rank):
            chunk = self.made.chunk[instance]
            twin = self._twin(rank, chunk)
            for visit in self.made.of(instance).visits:
                kind = self.chunks[chunk][visit.block][0]
                dense, expert = group.of(*self._elements(rank, kind))
                if dense + expert <= 0:
                    continue
                parts = int(pieces_of((dense + expert) * self.constants.grad_bytes, group.bucket))
                for part in range(1, parts + 1):
                    after = self._at(instance, visit, part / parts)
                    if twin is not None:
                        after += self._at(twin, self._visit(twin, visit.block), part / parts)
                    yield dense / parts, expert / parts, after

    def _at(self, instance: int, visit: Visit, share: float) -> list[int]:
        """The tasks of a visit that end a share of it; of one without tasks, an embedding's, what it follows."""
        if share >= 1 or visit.start == visit.stop:
            return self.made.global_ids(instance, visit.tails)
        return self.made.global_ids(instance, [visit.start + int(share * (visit.stop - visit.start))])

    def _visit(self, instance: int, block: int) -> Visit:
        return next(visit for visit in self.made.of(instance).visits if visit.block == block)

    def _last_backwards(self, rank: int) -> list[int]:
        """The last pass of each chunk that completes gradients, in the rank's order."""
        last: dict[int, int] = {}
        for parts in self.passes[rank]:
            for i in parts:
                if self.made.kind[i] in {Kind.BW, Kind.W}:
                    last.pop(self.made.chunk[i], None)
                    last[self.made.chunk[i]] = i
        return list(last.values())

    def _twin(self, rank: int, chunk: int) -> int | None:
        """The other rank's last pass of a chunk of which two ranks hold copies (DualPipe)."""
        if self.case.sizes["copies"][0] < 2:
            return None
        other = len(self.passes) - 1 - rank
        return next(i for i in self._last_backwards(other) if self.made.chunk[i] == chunk)

    def _last_tails(self, rank: int) -> list[int]:
        return [task for part in self.passes[rank][-1] for task in self.made.tails(part)]

    def _before(self, what: str, rank: int) -> list[int]:
        """Reduce-scatters, or transfers to the host, that may still be under way: a stream's last one ends last."""
        for parts in reversed(self.passes[rank]):
            for i in reversed(parts):
                for visit in reversed(self.made.of(i).visits):
                    if getattr(visit, what) >= 0:
                        return self.made.global_ids(i, [getattr(visit, what)])
        return []

    # ------------------------------------------------------------------------------------------------ update, weights

    def _update(self, rank: int, norm: int) -> list[int]:
        """The chip's share of the update; beside it that of the host, and what travels between them."""
        told = update_parts(*self._held(rank), self.keep, self._net, self.constants)
        after = [norm]
        if told.returned > 0:
            after = [self._alone(rank, Lane.UP, "host.fetch", told.returned, Category.OPTIMIZER, after)]
        done = [self._alone(rank, Lane.COMPUTE, "update", told.chip + self.apart_s[rank], Category.OPTIMIZER, after)]
        lanes = (
            (Lane.HOST, "update", told.host),
            (Lane.DOWN, "host.store", told.down),
            (Lane.UP, "host.fetch", told.up),
        )
        for lane, name, seconds in lanes:
            if seconds > 0:
                done.append(self._alone(rank, lane, name, seconds, Category.OPTIMIZER, after))
        return done

    def _alone(self, rank: int, lane: Lane, name: str, seconds: float, category: Category, after: list[int]) -> int:
        what = Transfer(seconds, np.zeros(self.made.num_links), 0.0)
        return self.made.extra(rank, lane, name, what, category, Shield.NOTHING, after)

    @property
    def _net(self) -> np.ndarray:
        """The members of the groups, as `update_parts` looks them up."""
        net, x = np.zeros(len(Net)), self.traffic
        net[[Net.DP, Net.EDP, Net.SHARDS, Net.ESHARDS]] = x.dense_ranks, x.expert_ranks, x.dense_shards, x.expert_shards
        return net

    def _gather(self, rank: int, updates: list[int]) -> None:
        """New weights of stages 1 and 2: beside the first forwards where that overlaps, else after the update."""
        width = self.constants.gather_bytes
        dense, expert = self._held(rank)
        if not self.case.sizes["overlap_dp"][0]:
            what = self.traffic.transfer(dense * width, expert * width)
            self._dp(rank, "weights.gather", what, Shield.NOTHING, updates, Category.OPTIMIZER_COMM)
            return
        scale = width / self.constants.grad_bytes
        for group in self._groups():
            waiting: list[tuple[float, float, list[int]]] = []
            for chunk, instance in self._first_forwards(rank).items():
                for visit in self.made.of(instance).visits:
                    d, e = group.of(*self._elements(rank, self.chunks[chunk][visit.block][0]))
                    if d + e <= 0:
                        continue
                    parts = int(pieces_of((d + e) * self.constants.grad_bytes, group.bucket))
                    waiting += [(d / parts, e / parts, self.made.global_ids(instance, visit.heads))] * parts
            for share_dense, share_expert, heads in _buckets(waiting, group.bucket, self.constants):
                what = self.traffic.transfer(share_dense * scale, share_expert * scale)
                task = self._dp(rank, "weights.gather", what, Shield.FORWARD, [], Category.OPTIMIZER_COMM)
                self.made.link([task], heads)

    def _first_forwards(self, rank: int) -> dict[int, int]:
        """The first pass of each chunk."""
        first: dict[int, int] = {}
        for parts in self.passes[rank]:
            for i in parts:
                if self.made.kind[i] is Kind.F:
                    first.setdefault(self.made.chunk[i], i)
        return first

    # ---------------------------------------------------------------------------------------------------------- counts

    def _held(self, rank: int) -> tuple[float, float]:
        """Dense and expert parameters of a rank."""
        held = dict(zip(self.shares.dense, self.layout.held[rank].tolist(), strict=True))
        return (
            sum(n * self.shares.dense[kind] for kind, n in held.items()),
            sum(n * self.shares.expert[kind] for kind, n in held.items()),
        )

    def _elements(self, rank: int, kind: BlockKind) -> tuple[float, float]:
        """Of one block of a kind on a rank: a weight that several blocks share is divided among them."""
        k = list(self.shares.dense).index(kind)
        runs = sum(run[0] is kind for chunk in self.layout.chunks_of[rank] for run in self.chunks[chunk])
        share = float(self.layout.held[rank, k]) / runs
        return share * self.shares.dense[kind], share * self.shares.expert[kind]

    def _dp(
        self, rank: int, name: str, what: Transfer, shield: Shield, after: list[int], category: Category = Category.DP
    ) -> int:
        return self.made.extra(rank, Lane.DP, name, what, category, shield, after)


def _buckets(
    parts: Sequence[tuple[float, float, list[int]]], bucket_bytes: float, c: Constants
) -> Iterator[tuple[float, float, list[int]]]:
    """Parts (elements and tasks) joined to equal buckets: dense and expert bytes, and all their tasks.

    As many as the estimate counts (`pieces_of`). A part that does not fit into what is left of a bucket is divided:
    both buckets wait for its tasks.
    """
    total = sum(d + e for d, e, _ in parts) * c.grad_bytes
    each = total / pieces_of(total, bucket_bytes)
    dense, expert, tasks = 0.0, 0.0, list[int]()
    for d, e, more in parts:
        left = (d + e) * c.grad_bytes
        while left > 0:
            take = min(left, each - (dense + expert))
            share = take / (d + e)
            dense, expert, tasks = dense + d * share, expert + e * share, [*tasks, *more]
            left = left - take if left - take > ROUNDING * each else 0.0
            if dense + expert >= (1.0 - ROUNDING) * each:
                yield dense, expert, tasks
                dense, expert, tasks = 0.0, 0.0, []
    if dense + expert > 0:
        yield dense, expert, tasks
