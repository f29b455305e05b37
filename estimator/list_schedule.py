"""Greedy list scheduling of a priced graph: each op starts once what it needs is there and its stream is free.

A stage of a pipeline runs some micro-batches: kernels on one stream, traffic of tensor, context, expert, data and
pipeline parallelism on one each. Of ops that become ready at the same time the one with the longest way to the end
goes first (Graham 1969, doi:10.1137/0117039). No framework's order is followed: this tells what overlap the data allow,
where a replay (estimator/detail) tells what a schedule makes of it. Streams, links and contention are the replay's.

Left out: launches of the host, offload, gathers of ZeRO-3, memory; other stages answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from estimator.cost.price import price
from estimator.dataflow import BlockFlow, flow_of
from estimator.detail.traffic import Transfer, transfer_of
from estimator.graph import Block, BlockKind, OpGraph
from estimator.op import Group, Op, OpKind, Phase
from estimator.precision import PrecisionRecipe
from estimator.replay import replay
from estimator.strategy import Strategy
from estimator.tasks import CATEGORIES, Category, Device, Stream, Tasks
from estimator.timeline import Timeline
from hardware.system import SystemSpec

__all__ = ["STREAMS", "StageWork", "list_schedule"]

STREAMS = ("compute", "tp", "cp", "ep", "dp", "pp")
STREAM_OF = {Group.TP: 1, Group.CP: 2, Group.EP: 3, Group.ETP: 3}
DP, PP = 4, 5
CATEGORY_OF = {Group.TP: Category.TP, Group.CP: Category.CP, Group.EP: Category.EP, Group.ETP: Category.EP}
OF_PHASE = {
    Phase.FORWARD: Category.FORWARD, Phase.BACKWARD: Category.BACKWARD, Phase.WEIGHT_GRAD: Category.BACKWARD,
    Phase.RECOMPUTE: Category.RECOMPUTE,
}  # fmt: skip
BlockRun = tuple[BlockKind, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What one pipeline stage runs: blocks in order, each with whether its forward runs again, of `num` micro-batches.

    `graphs` by that. `hop`: a micro-batch's activations to the next stage, or its gradients back; `is_first`,
    `is_last`: whether none stands before, none behind. `reduced`: gradients of a block over its data-parallel ranks.
    """

    graphs: dict[bool, OpGraph]
    blocks: tuple[BlockRun, ...]
    strategy: Strategy
    system: SystemSpec
    recipe: PrecisionRecipe
    num: int = 1
    hop: Transfer | None = None
    is_first: bool = True
    is_last: bool = True
    reduced: Callable[[BlockKind], Transfer] | None = None


def list_schedule(work: StageWork) -> Timeline:
    """When each op runs."""
    return replay(_Writer(work).tasks())


@dataclass(slots=True)
class _Writer:
    """Collects tasks and what they wait for."""

    work: StageWork
    stream: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    takes: list[float] = field(default_factory=list)
    loads: list[np.ndarray] = field(default_factory=list)
    category: list[Category] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    scope: list[str] = field(default_factory=list)
    micro_batch: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    flows: dict[BlockRun, BlockFlow] = field(default_factory=dict)
    prices: dict[tuple[BlockRun, int], Transfer] = field(default_factory=dict)

    def tasks(self) -> Tasks:
        weights: dict[int, list[int]] = {}
        for m in range(self.work.num):
            self.micro_batch_of(m, weights)
        if self.work.reduced is not None:
            for place, done in reversed(weights.items()):
                what = self.work.reduced(self.work.blocks[place][0])
                if what.seconds > 0:
                    scope = f"{place}: {self.work.blocks[place][0].value}"
                    self.add("gradients.reduce", DP, what, Category.DP, scope, -1, done)
        return self.sorted()

    def micro_batch_of(self, m: int, weights: dict[int, list[int]]) -> None:
        """Forward through all blocks and backward again; `weights` collects what gives gradients of each block."""
        work, hop = self.work, self.work.hop
        arrived: list[int] = []
        ran: list[dict[int, int]] = []
        if hop is not None and not work.is_first:
            arrived = [self.add("activation.receive", PP, hop, Category.PP, "entry", m, [])]
        for place, run in enumerate(work.blocks):
            tasks = self.phase(place, run, m, (Phase.FORWARD,), {}, arrived)
            ran.append(tasks)
            done = [tasks[i] for i in self.flow(run).exit if i in tasks]
            arrived = arrived if run[0] is BlockKind.HEAD else done or arrived
        if not any(op.phase is Phase.BACKWARD for op in self.block(work.blocks[-1]).ops):
            return
        back: list[int] = list(ran[-1].values())[-1:] if ran else []
        if hop is not None and not work.is_last:
            sent = self.add("activation.send", PP, hop, Category.PP, "exit", m, arrived)
            back = [self.add("gradient.receive", PP, hop, Category.PP, "exit", m, [sent])]
        for place in range(len(work.blocks) - 1, -1, -1):
            run = work.blocks[place]
            phases = (Phase.RECOMPUTE, Phase.BACKWARD, Phase.WEIGHT_GRAD)
            tasks = self.phase(place, run, m, phases, ran[place], back)
            flow = self.flow(run)
            back = [tasks[i] for i in flow.back_exit if i in tasks] or back
            weights.setdefault(place, []).extend(tasks[i] for i in flow.weights if i in tasks)
        if hop is not None and not work.is_first:
            self.add("gradient.send", PP, hop, Category.PP, "entry", m, back)

    def phase(
        self, place: int, run: BlockRun, m: int, phases: tuple[Phase, ...], ran: dict[int, int], arrived: Sequence[int]
    ) -> dict[int, int]:
        """The tasks of a block's ops of some phases, by their place in it; traffic that takes no time is none."""
        block, flow = self.block(run), self.flow(run)
        tasks = dict(ran)
        passed: dict[int, list[int]] = {}
        scope = f"{place}: {run[0].value}"
        waits_at = flow.entry if Phase.FORWARD in phases else flow.back_entry
        for i in flow.order:
            op = block.ops[i]
            if op.phase not in phases:
                continue
            waits = [t for j in flow.waits[i] for t in (passed[j] if j in passed else [tasks[j]] if j in tasks else [])]
            waits += list(arrived) if i in waits_at else []
            what = self.priced(run, i, op)
            if op.kind is OpKind.COLLECTIVE and what.seconds <= 0:
                passed[i] = waits
                continue
            stream, category = 0, OF_PHASE[op.phase]
            if op.kind is OpKind.COLLECTIVE:
                assert op.group is not None
                stream, category = STREAM_OF[op.group], CATEGORY_OF[op.group]
            tasks[i] = self.add(op.name, stream, what, category, scope, m, waits)
        for i, waits in passed.items():
            if i in flow.exit or i in flow.back_exit:
                tasks[i] = waits[-1] if waits else next(iter(tasks.values()), 0)
        return tasks

    def add(
        self, name: str, stream: int, what: Transfer, category: Category, scope: str, m: int, waits: Sequence[int]
    ) -> int:
        task = len(self.seconds)
        self.stream.append(stream)
        self.seconds.append(what.seconds)
        self.takes.append(what.takes)
        self.loads.append(what.loads)
        self.category.append(category)
        self.name.append(name)
        self.scope.append(scope)
        self.micro_batch.append(m)
        for other in dict.fromkeys(waits):
            self.before.append(other)
            self.after.append(task)
        return task

    def priced(self, run: BlockRun, i: int, op: Op) -> Transfer:
        key = (run, i)
        if key not in self.prices:
            work = self.work
            if op.kind is OpKind.COLLECTIVE:
                self.prices[key] = transfer_of(op, work.strategy, work.system)
            else:
                first = op.but(phase=Phase.FORWARD) if op.phase is Phase.RECOMPUTE else op
                seconds = float(price(first, self.block(run), work.system.chip, work.recipe).seconds)
                self.prices[key] = Transfer(seconds, np.zeros(work.system.num_tiers), 0.0)
        return self.prices[key]

    def block(self, run: BlockRun) -> Block:
        return self.work.graphs[run[1]].blocks[run[0]]

    def flow(self, run: BlockRun) -> BlockFlow:
        if run not in self.flows:
            self.flows[run] = flow_of(self.block(run))
        return self.flows[run]

    def sorted(self) -> Tasks:
        """Tasks by the way that is left behind each, the longest first: a stream takes the first of those ready."""
        n = len(self.seconds)
        left = np.array(self.seconds)
        for before, after in sorted(zip(self.before, self.after, strict=True), key=lambda e: -e[1]):
            left[before] = max(left[before], self.seconds[before] + left[after])
        order = np.argsort(-left, kind="stable")
        place = np.empty(n, dtype=np.int64)
        place[order] = np.arange(n)
        names, name = np.unique(np.array(self.name, dtype=object).astype(str), return_inverse=True)
        scopes = list(dict.fromkeys(self.scope))
        at = {scope: i for i, scope in enumerate(scopes)}
        tiers = tuple(tier.name for tier in self.work.system.tiers)
        zeros = np.zeros(n)
        return Tasks(
            devices=(Device(name="stage", links=tiers),),
            streams=tuple(Stream(device=0, name=s, computes=i == 0) for i, s in enumerate(STREAMS)),
            names=tuple(names.tolist()), scopes=tuple(scopes), stream=np.array(self.stream)[order],
            seconds=np.array(self.seconds)[order],
            category=np.array([CATEGORIES.index(c) for c in self.category])[order],
            before=place[np.array(self.before, dtype=np.int64)], after=place[np.array(self.after, dtype=np.int64)],
            name=name[order], scope=np.array([at[s] for s in self.scope])[order],
            micro_batch=np.array(self.micro_batch)[order], chunk=np.full(n, -1), shield=np.zeros(n, dtype=np.int64),
            launch_s=zeros, gates=np.zeros(n, dtype=np.bool_), takes=np.array(self.takes)[order],
            loads=np.array(self.loads)[order], alloc_bytes=zeros, free_bytes=zeros,
        )  # fmt: skip
