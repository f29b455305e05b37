"""What fusion rules do to a graph, one firing at a time: what each saves, and why others do not fire.

Rules are put in one after the other as the fuse pass does it, and after each firing the block is priced as the passes
behind leave it: seconds and bytes are those of forward and backward of one micro-batch on one rank, without recompute,
overlap and traffic between ranks. A difference between two firings depends on those before; their sum does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from estimator.cost.price import price
from estimator.cost.table import saved_bytes
from estimator.cost.work import work
from estimator.graph import Block, BlockKind, OpGraph
from estimator.op import Array, Op, OpKind
from estimator.passes import PASSES, Lowering, Pass, run_to
from estimator.passes.fuse import After, Rule, chosen_rules, rule_of
from estimator.passes.fuse.match import can_fire, matches, why_not
from estimator.passes.fuse.rewrite import applied, refusal
from estimator.strategy import Fusion, OwnFusion
from hardware.chip import ChipSpec

__all__ = ["Cost", "Firing", "Missed", "Report", "block_cost", "explain"]

BEFORE = {After.COLLECTIVES: "offload", After.QUANTIZATION: "fuse"}
"""The pass behind which rules of each kind begin; `precision` puts casts in first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One run of a block, forward and backward: seconds of kernels, bytes through HBM, bytes kept, kernels launched."""

    seconds: float = 0.0
    moved_bytes: float = 0.0
    kept_bytes: float = 0.0
    kernels: float = 0.0

    def minus(self, other: Cost) -> Cost:
        """What `other` is less."""
        return Cost(seconds=self.seconds - other.seconds, moved_bytes=self.moved_bytes - other.moved_bytes,
                    kept_bytes=self.kept_bytes - other.kept_bytes, kernels=self.kernels - other.kernels)  # fmt: skip

    def times(self, n: float) -> Cost:
        """Of n runs."""
        return Cost(seconds=self.seconds * n, moved_bytes=self.moved_bytes * n, kept_bytes=self.kept_bytes * n,
                    kernels=self.kernels * n)  # fmt: skip

    def plus(self, other: Cost) -> Cost:
        """Of both."""
        return self.minus(other.times(-1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """One place where a rule fired: the ops that it took, what is there instead, and what one run saves."""

    rule: str
    block: str
    times: int
    ops: tuple[str, ...]
    made: tuple[str, ...]
    saved: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A rule that did not fire, and why: in a block, or anywhere ("")."""

    rule: str
    block: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Firings in the order in which they happened; cost of the whole model, without and with the rules."""

    firings: tuple[Firing, ...]
    missed: tuple[Missed, ...]
    before: Cost
    after: Cost


def explain(
    logical: OpGraph, by: Lowering, chip: ChipSpec, known: Iterable[Fusion | OwnFusion] = tuple(Fusion)
) -> Report:
    """What the strategy's rules do to a logical graph on one chip; of `known` ones, why the others do nothing."""
    chosen = by.strategy.fusion
    on = frozenset(one for one in chosen if rule_of(one).fits(chip.name))
    firings: list[Firing] = []
    missed = [Missed(rule=one.value, block="", why="it is not chosen (fusion)") for one in known if one not in chosen]
    missed += [
        Missed(rule=one.value, block="", why=f"it is for {', '.join(rule_of(one).chips)}, and this is {chip.name}")
        for one in sorted(chosen - on, key=lambda f: f.value)
    ]
    bare = Lowering(strategy=replace(by.strategy, fusion=frozenset()), recipe=by.recipe, routing=by.routing)
    with_rules = Lowering(strategy=replace(by.strategy, fusion=on), recipe=by.recipe, routing=by.routing)
    graph = run_to(logical, bare, "collectives")
    for rule in chosen_rules(on, After.COLLECTIVES):
        graph = _put_in(rule, graph, bare, chip, firings, missed, later="fuse")
    graph = _through(graph, bare, after="fuse", to="precision")
    for rule in chosen_rules(on, After.QUANTIZATION):
        graph = _put_in(rule, graph, bare, chip, firings, missed, later="precision")
    order = {one.value: i for i, one in enumerate(known)}
    return Report(
        firings=tuple(firings), missed=tuple(sorted(missed, key=lambda m: order.get(m.rule, len(order)))),
        before=_whole(run_to(logical, bare, "cuda_graphs"), bare, chip),
        after=_whole(run_to(logical, with_rules, "cuda_graphs"), with_rules, chip),
    )  # fmt: skip


def block_cost(block: Block, by: Lowering, chip: ChipSpec) -> Cost:
    """One run of a block of a graph that all passes are behind."""
    seconds = moved = kernels = 0.0
    for op in block.ops:
        if op.kind is OpKind.COLLECTIVE:
            continue
        seconds += _number(price(op, block, chip, by.recipe).seconds)
        moved += _number(work(op, block, by.recipe).nbytes)
        kernels += not op.rides
    return Cost(seconds=seconds, moved_bytes=moved, kept_bytes=_number(saved_bytes(block, by.recipe)), kernels=kernels)


def _put_in(
    rule: Rule, graph: OpGraph, by: Lowering, chip: ChipSpec, firings: list[Firing], missed: list[Missed], *, later: str
) -> OpGraph:
    """The graph with a rule in place, firing by firing."""
    if graph.phase not in rule.phases:
        why = f"it is for {', '.join(sorted(rule.phases))}, and this is {graph.phase}"
        missed.append(Missed(rule=rule.name, block="", why=why))
        return graph
    blocks, fired = dict(graph.blocks), False
    reasons: list[Missed] = []
    for kind in graph.kinds:
        times, block = graph.sequence.count(kind), blocks[kind]
        for match, behind, why in _steps(rule, block, graph):
            ops = tuple(op.name for op in match)
            if why:
                reasons.append(Missed(rule=rule.name, block=kind.value, why=why))
                continue
            saved = _cost(kind, block, graph, by, chip, later).minus(_cost(kind, behind, graph, by, chip, later))
            made = tuple(op.name for op in behind.ops if op not in block.ops)
            firings.append(Firing(rule=rule.name, block=kind.value, times=times, ops=ops, made=made, saved=saved))
            block, fired = behind, True
        blocks[kind] = block
    missed += reasons
    if not fired and not reasons:
        missed.append(Missed(rule=rule.name, block="", why=_reason(rule, graph)))
    return replace(graph, blocks=blocks)


def _steps(rule: Rule, block: Block, graph: OpGraph) -> Iterator[tuple[Sequence[Op], Block, str]]:
    """What the fuse pass does with a rule: the ops of each match, the block behind it, or why it was left alone."""
    for case in rule.cases:
        if not can_fire(case, frozenset(op.kind for op in block.ops)):
            continue
        for match in matches(case, block, graph.sources):
            why = refusal(case, match, block)
            block = block if why else applied(case, match, block)
            yield list(match.values()), block, why


def _reason(rule: Rule, graph: OpGraph) -> str:
    """Why a rule fires nowhere: what is wrong in the block that comes closest, which has most ops."""
    largest = max(graph.kinds, key=lambda kind: len(graph.blocks[kind].ops))
    told = dict.fromkeys(why_not(case, graph.blocks[kind], graph.sources)
                         for case in rule.cases for kind in (largest, *graph.kinds))  # fmt: skip
    return min(told, key=lambda text: text.startswith("no op is"))


def _cost(kind: BlockKind, block: Block, graph: OpGraph, by: Lowering, chip: ChipSpec, later: str) -> Cost:
    """Of a block that passes up to `later` are behind."""
    alone = replace(graph, blocks={kind: block}, sequence=(kind,))
    return block_cost(_through(alone, by, after=later, to="cuda_graphs").blocks[kind], by, chip)


def _through(graph: OpGraph, by: Lowering, *, after: str, to: str) -> OpGraph:
    """The passes behind one, up to another."""
    names = [p.name for p in PASSES]
    some: Sequence[Pass] = PASSES[names.index(after) + 1 : names.index(to) + 1]
    for one in some:
        graph = graph if one.run is None else one.run(graph, by)
    return graph


def _whole(graph: OpGraph, by: Lowering, chip: ChipSpec) -> Cost:
    total = Cost()
    for kind in graph.kinds:
        total = total.plus(block_cost(graph.blocks[kind], by, chip).times(graph.sequence.count(kind)))
    return total


def _number(value: Array) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
