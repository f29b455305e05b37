"""Unrolls a step: every op of every micro-batch on every pipeline rank, with its traffic, as tasks to replay.

One device stands for all ranks of a pipeline stage: tensor-, context-, expert- and data-parallel ranks do the same at
the same time. Streams of a device: compute, and one for each kind of traffic. Links of a device: its share of each
tier. Neglected: what arrives shares no link with what is sent (full duplex); ranks of a stage are equally fast.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

from estimator.build import build
from estimator.detail.buffers import wait_for_buffers
from estimator.detail.ends import Ends
from estimator.detail.host import HostTraffic
from estimator.detail.instances import Instances
from estimator.detail.passes import BlockRun, PassWriter, Shares
from estimator.detail.script import Lane
from estimator.detail.traffic import GradientTraffic, Transfer, stage_hop
from estimator.gradients import apart_seconds
from estimator.graph import BlockKind, OpGraph
from estimator.imbalance import Routing
from estimator.keep import Keep, keep_of
from estimator.layout import Layout, even_layers, layout_of
from estimator.list_schedule import StageWork
from estimator.memory import RESERVED_FACTOR
from estimator.model import ModelSpec
from estimator.passes import lower, recompute
from estimator.passes.fuse import for_chip
from estimator.precision import recipe
from estimator.result import StepResult
from estimator.rules import Case, check, explain
from estimator.schedule import Kind, Order, Pass, order, side_by_side
from estimator.step import evaluate, with_layout
from estimator.strategy import LayoutRule, Offload, RecomputeKind, Strategy
from estimator.tables import FULL, NET_SIZES, ROW_SIZES, TableBuilder, constants_of, twinned_share
from estimator.tasks import Category, Device, Shield, Tasks
from estimator.workload import Workload
from hardware.system import SystemSpec

__all__ = ["MAX_TASKS", "TooLarge", "stage_of", "unroll", "unroll_estimate"]

COARSE_ABOVE = 1_500_000  # tasks; beyond it kernels are joined: a second or two to replay
SHORT_S = 5e-4  # joined kernels of passes that take turns, which would wait for a longer one
MAX_TASKS = 12_000_000  # about 3 GB while they are replayed
STATIC_ITEMS = ("weights", "gradients", "optimizer_states", "buckets", "exchange_buffers", "workspace")


class TooLarge(ValueError):
    """A step of more tasks than are replayed: how many it has."""

    def __init__(self, num_tasks: int, most: int, num_micro_batches: int) -> None:
        super().__init__(
            f"a step must unroll to at most {most} tasks, but {num_micro_batches} micro-batches make {num_tasks}; "
            "replay a smaller workload.global_batch: only the pipeline's fill weighs more there"
        )
        self.num_tasks = num_tasks


def unroll(model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload) -> Tasks:
    """The tasks of one step. ValueError where the strategy is illegal, or the step too large to replay."""
    return unroll_estimate(model, strategy, system, workload)[0]


def unroll_estimate(
    model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload, *, max_tasks: int | None = None
) -> tuple[Tasks, StepResult]:
    """The tasks, and the estimate whose memory of weights, gradients and states they take over."""
    strategy = with_layout(model, strategy, system, workload)
    case = Case.of(model, strategy, system, workload)
    code = check(case)
    if code[0]:
        raise ValueError(explain(case, int(code[0])))
    estimate = evaluate(model, strategy, system, workload)
    return _Unroller(case, estimate, max_tasks or MAX_TASKS).tasks(), estimate


def stage_of(
    model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload, stage: int, num: int
) -> StageWork:  # fmt: skip
    """What one pipeline stage runs of `num` micro-batches, for a list schedule. ValueError where there is none."""
    strategy = with_layout(model, strategy, system, workload)
    case = Case.of(model, strategy, system, workload)
    code = check(case)
    if code[0]:
        raise ValueError(explain(case, int(code[0])))
    return _Unroller(case, evaluate(model, strategy, system, workload), MAX_TASKS).stage_work(stage, num)


class _Unroller:
    """Writes the passes of each rank in the schedule's order, joins them, and adds what begins and ends a step."""

    def __init__(self, case: Case, estimate: StepResult, max_tasks: int) -> None:
        self.case, self.estimate, s, self.max_tasks = case, estimate, case.strategy, max_tasks
        self.p, self.v, self.m = (int(case.sizes[n][0]) for n in ("pp", "vpp", "num_micro_batches"))
        self.recipe = recipe(s.precision)
        self.constants = constants_of(case.system, self.recipe, s.expert_bucket_bytes, s.cuda_graph, s.optimizer)
        self.graphs = self._graphs()
        self.layout: Layout = layout_of(case.model, self.graphs[False].kinds, s.schedule, self.p, self.v, s.layout)
        self.traffic = GradientTraffic.of(
            {name: case.sizes[name] for name in NET_SIZES}, s, case.system, has_experts=case.model.moe is not None,
            twinned=twinned_share(case.model, s),
        )  # fmt: skip
        self.shared = self.traffic.dense_ranks > 1 or self.traffic.expert_ranks > 1
        self.keep = self._keep()
        builder = TableBuilder(case.model, case.system, case.workload, s)
        prices = builder.prices({n: case.sizes[n] for n in ROW_SIZES})
        net = builder.nets({name: case.sizes[name] for name in NET_SIZES})[0]
        self.apart_s = [
            apart_seconds(rank, self.layout.held, prices.base[0], self.keep.zero, net, self.constants)
            for rank in range(self.p)
        ]  # fmt: skip
        self.hop = stage_hop(float(prices.hop_bytes[0]), case.system, self.traffic.stage_stride)
        self.shares = Shares.of(prices, self.constants.grad_bytes, self.constants.gather_bytes)
        self.writer = PassWriter(
            graphs=self.graphs, strategy=s, system=case.system, recipe=self.recipe, traffic=self.traffic,
            shares=self.shares, keep=self.keep,
            host=HostTraffic.of(prices, self.keep, self.constants, self.traffic, case.system.num_tiers),
        )  # fmt: skip
        self.chunks = [self._blocks(j) for j in range(len(self.layout.class_of))]
        self.scripts: dict[tuple[tuple[BlockRun, ...], Kind, bool], int] = {}
        self.turning: set[tuple[int, int]] = set()  # chunk and micro-batch whose backward follows its forward

    def stage_work(self, stage: int, num: int) -> StageWork:
        """The blocks of a rank's chunks in model order, their graphs and traffic."""
        if not 0 <= stage < self.p:
            raise ValueError(f"stage must be from 0 to {self.p - 1}, but got {stage}")
        chunks = sorted({int(chunk) for chunk in self.layout.chunks_of[stage]})

        def reduced(kind: BlockKind) -> Transfer:
            shares, times = self.shares, 2.0 if self.keep.zero == 0 else 1.0
            dense, expert = shares.dense[kind] * shares.grad_bytes, shares.expert[kind] * shares.grad_bytes
            return self.traffic.transfer(dense, expert, times)

        return StageWork(
            graphs=self.graphs, blocks=tuple(run for chunk in chunks for run in self.chunks[chunk]),
            strategy=self.case.strategy, system=self.case.system, recipe=self.recipe, num=num,
            hop=self.hop if self.p > 1 else None, is_first=0 in chunks,
            is_last=len(self.layout.class_of) - 1 in chunks, reduced=reduced if self.shared else None,
        )  # fmt: skip

    def _keep(self) -> Keep:
        """What the strategy means: ZeRO-0 without overlap where nobody shares anything, as in `compose_rows`."""
        sizes = {name: float(values[0]) for name, values in self.case.sizes.items()}
        shares = [sizes[f"offload_{f.name}"] for f in fields(Offload)]
        zero, overlap = (int(sizes[name]) if self.shared else 0 for name in ("zero_stage", "overlap_dp"))
        asked = Keep(zero, int(sizes["reshard_after_forward"]), sizes["prefetch_blocks"], *shares)
        keep: Keep = keep_of(asked, zero, overlap)
        return keep

    def _graphs(self) -> dict[bool, OpGraph]:
        """Blocks as they run without and with the strategy's recompute."""
        c, s = self.case, self.case.strategy
        on_chip = replace(s, fusion=for_chip(s.fusion, c.system.chip.name))
        plain = lower(build(c.model, c.workload.seq), on_chip, self.recipe, Routing.of(c.model, c.workload))
        return {False: plain, True: recompute(plain, FULL if s.recompute.kind is RecomputeKind.BLOCK else s.recompute)}

    def _blocks(self, chunk: int) -> tuple[BlockRun, ...]:
        """Blocks of a chunk in the order in which forward runs them: a stretch of the model's sequence.

        The last chunk looks tokens up once more, for what MTP layers read.
        """
        model, s, sequence = self.case.model, self.case.strategy, self.graphs[False].sequence
        num_chunks, head = len(self.layout.class_of), sequence.index(BlockKind.HEAD)
        assert not isinstance(s.layout, LayoutRule), "a layout that is a rule is settled first"
        layers = s.layout or even_layers(model.num_layers, num_chunks)
        first = head - model.num_layers
        start = first + sum(layers[:chunk])
        again = self._again(chunk, layers[chunk])
        everywhere = s.recompute.kind not in {RecomputeKind.NONE, RecomputeKind.BLOCK}
        entry = sequence[:first] if chunk == 0 else ()
        lookup = (BlockKind.EMBEDDING,) if model.num_mtp_layers else ()
        ends = (BlockKind.HEAD, *lookup, *sequence[head + 1 :]) if chunk == num_chunks - 1 else ()
        return (
            *((kind, everywhere) for kind in entry),
            *((kind, n < again) for n, kind in enumerate(sequence[start : start + layers[chunk]])),
            *((kind, everywhere) for kind in ends),
        )

    def _again(self, chunk: int, layers: int) -> int:
        """Layers of a chunk whose forward runs again."""
        s = self.case.strategy
        if s.recompute.kind is RecomputeKind.NONE:
            return 0
        if s.recompute_per_chunk is not None:
            return s.recompute_per_chunk[chunk]
        return int(self.case.sizes["recompute_layers"][0]) if s.recompute.kind is RecomputeKind.BLOCK else layers

    # -------------------------------------------------------------------------------------------------- the schedule

    def tasks(self) -> Tasks:
        """All of it."""
        orders = self._orders()
        made, passes = self._placed(orders)
        if len(made) > COARSE_ABOVE:
            self.writer.joined_s = SHORT_S if self._beside else float("inf")
            self.scripts.clear()
            made, passes = self._placed(orders)
        if len(made) > self.max_tasks:
            raise TooLarge(len(made), self.max_tasks, self.m)
        self._join(made, orders, passes)
        Ends(
            made=made, case=self.case, constants=self.constants, traffic=self.traffic, shares=self.shares,
            keep=self.keep, shared=self.shared, chunks=self.chunks, layout=self.layout, passes=passes,
            apart_s=self.apart_s,
        ).write()  # fmt: skip
        return made.tasks(self._devices(), self.p)

    def _placed(self, orders: Order) -> tuple[Instances, list[list[tuple[int, ...]]]]:
        made = Instances(num_links=self.case.system.num_tiers)
        if self.keep.activations:
            self.turning = {
                (item.chunk, item.micro_batch) for items in orders for item, after in pairwise(items)
                if item.kind is Kind.F and after.kind in {Kind.B, Kind.BW}
                and (item.chunk, item.micro_batch) == (after.chunk, after.micro_batch)
            }  # fmt: skip
        return made, [[self._place(made, rank, item) for item in items] for rank, items in enumerate(orders)]

    @property
    def _beside(self) -> bool:
        """Whether a forward and a backward of two micro-batches run side by side, so that traffic of one can hide."""
        return bool(self.case.sizes["overlap_ep"][0]) and bool(self.case.sizes["ep"][0] > 1)

    def _orders(self) -> Order:
        s = self.case.strategy
        passes = order(s.schedule, self.p, self.m, self.v, s.interleave_group)
        has_pairs = any(item.kind is Kind.PAIR for items in passes for item in items)
        return [side_by_side(items) for items in passes] if self._beside and not has_pairs else passes

    def _place(self, made: Instances, rank: int, item: Pass) -> tuple[int, ...]:
        """Places a pass; its one or two instances."""
        kind = Kind.F if item.kind is Kind.PAIR else item.kind
        first = self._instance(made, rank, kind, item.chunk, item.micro_batch)
        if item.kind is not Kind.PAIR:
            return (first,)
        return first, self._instance(made, rank, Kind.BW, item.back_chunk, item.back_micro_batch)

    def _instance(self, made: Instances, rank: int, kind: Kind, chunk: int, micro_batch: int) -> int:
        key = (self.chunks[chunk], kind, (chunk, micro_batch) in self.turning)
        if key not in self.scripts:
            self.scripts[key] = made.add_script(self.writer.write(*key[:2], turns=key[2]))
        return made.place(rank, self.scripts[key], kind, chunk, micro_batch)

    def _join(self, made: Instances, orders: Order, passes: list[list[tuple[int, ...]]]) -> None:
        """Edges between passes: of a rank one after the other, of neighbours by what they send."""
        runs_at = {
            (made.chunk[i], made.micro_batch[i]): rank
            for rank, items in enumerate(passes) for parts in items for i in parts if made.kind[i] is Kind.F
        }  # fmt: skip
        arrived: dict[tuple[bool, int, int], list[int]] = {}
        for rank, items in enumerate(orders):
            self._follow(made, passes[rank])
            for n, item in enumerate(items):
                parts = passes[rank][n]
                done = self._tails(made, parts)
                for key in self._gives(item):
                    is_gradient, chunk, micro_batch = key
                    target = runs_at[chunk + (-1 if is_gradient else 1), micro_batch]
                    arrived[key] = done if target == rank else self._send(made, rank, key, done, passes[rank][n + 1 :])
        if self.keep.activations:
            self._fetch_after_store(made, passes)
        wait_for_buffers(made, passes, beside=self._beside)
        for rank, items in enumerate(orders):
            for item, parts in zip(items, passes[rank], strict=True):
                starts = parts if self._beside else parts[:1]
                for need in self._needs(item):
                    for part in starts:
                        made.link(arrived[need], made.entries(part), gates=True)

    def _fetch_after_store(self, made: Instances, passes: list[list[tuple[int, ...]]]) -> None:
        """What backward fetches from the host has arrived there."""
        every = [i for items in passes for parts in items for i in parts]
        stored = {
            (made.chunk[i], made.micro_batch[i], visit.block): made.global_ids(i, [visit.down])
            for i in every if made.kind[i] is Kind.F for visit in made.of(i).visits if visit.down >= 0
        }  # fmt: skip
        for i in every:
            for visit in made.of(i).visits if made.kind[i] in {Kind.B, Kind.BW} else ():
                before = stored.get((made.chunk[i], made.micro_batch[i], visit.block))
                if before and visit.up >= 0:
                    made.link(before, made.global_ids(i, [visit.up]))

    def _follow(self, made: Instances, items: list[tuple[int, ...]]) -> None:
        """A rank's passes one after the other; of a pair both at once where they hide each other's traffic."""
        for n, parts in enumerate(items):
            before = items[n - 1] if n else ()
            for part in parts if self._beside else parts[:1]:
                made.follow(part, *before[-1 if not self._beside else 0 :])
            if len(parts) == 2 and not self._beside:
                made.follow(parts[1], parts[0])
            elif len(parts) == 2:
                made.alternate(*parts)

    def _tails(self, made: Instances, parts: tuple[int, ...]) -> list[int]:
        return [task for part in (parts if self._beside else parts[-1:]) for task in made.tails(part)]

    def _send(
        self, made: Instances, rank: int, key: tuple[bool, int, int], done: list[int], later: list[tuple[int, ...]]
    ) -> list[int]:
        """A hop to another rank; a blocking one holds the rank's next pass up."""
        is_gradient, chunk, micro_batch = key
        free = bool(self.case.sizes["overlap_pp"][0])
        hop = made.extra(
            rank, Lane.PP, "gradient.send" if is_gradient else "activation.send", self.hop, Category.PP,
            Shield.STAGES if free else Shield.NOTHING, done, chunk=chunk, micro_batch=micro_batch,
        )  # fmt: skip
        if later and not free:
            for part in later[0] if self._beside else later[0][:1]:
                made.link([hop], made.entries(part))
        return [hop]

    def _gives(self, item: Pass) -> list[tuple[bool, int, int]]:
        """What neighbours wait for: (is it a gradient, chunk, micro-batch)."""
        out = []
        if item.kind in {Kind.F, Kind.PAIR} and item.chunk < len(self.chunks) - 1:
            out.append((False, item.chunk, item.micro_batch))
        chunk, micro_batch = _backward_of(item)
        return [*out, (True, chunk, micro_batch)] if chunk > 0 else out

    def _needs(self, item: Pass) -> list[tuple[bool, int, int]]:
        """What it waits for of its neighbours."""
        out = []
        if item.kind in {Kind.F, Kind.PAIR} and item.chunk > 0:
            out.append((False, item.chunk - 1, item.micro_batch))
        chunk, micro_batch = _backward_of(item)
        return [*out, (True, chunk + 1, micro_batch)] if 0 <= chunk < len(self.chunks) - 1 else out

    def _devices(self) -> list[Device]:
        system, each = self.case.system, self.case.system.num_chips // self.p
        links = tuple(tier.name for tier in system.tiers)
        static = STATIC_ITEMS if self.keep.reshard else (*STATIC_ITEMS, "gathered_weights")
        capacity = (system.usable_hbm_bytes - system.chip.context_bytes) / RESERVED_FACTOR
        return [
            Device(
                name=f"rank {stage.rank}", num_ranks=each, links=links, capacity_bytes=capacity,
                base_bytes=sum(stage.memory[item] for item in static),
            )
            for stage in self.estimate.stages
        ]  # fmt: skip


def _backward_of(item: Pass) -> tuple[int, int]:
    """Chunk and micro-batch whose input gradient the pass computes; chunk -1 where none."""
    if item.kind is Kind.PAIR:
        return item.back_chunk, item.back_micro_batch
    return (item.chunk, item.micro_batch) if item.kind in {Kind.B, Kind.BW} else (-1, -1)
