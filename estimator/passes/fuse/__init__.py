"""Fusion: kernels that do several ops at once and keep less. Runs inside a shard and knows no parallelism.

Which kernels there are is data (rules.yaml, and files of a user: docs/fusion.md); this room reads rules, finds where
they fire and rewrites the blocks.
"""

from __future__ import annotations

from functools import lru_cache

from estimator.graph import Block, OpGraph, Sources
from estimator.passes.fuse.match import Match, can_fire, matches
from estimator.passes.fuse.reading import rule_of_text, shipped_rules
from estimator.passes.fuse.rewrite import applied, changed, refusal
from estimator.passes.fuse.rule import After, Case, Rule
from estimator.strategy import Fusion, OwnFusion

__all__ = ["After", "Rule", "chosen_rules", "fired", "for_chip", "fuse", "rule_of"]

Chosen = frozenset[Fusion | OwnFusion]


def rule_of(fusion: Fusion | OwnFusion) -> Rule:
    """The rule of a name, or of the text that a user's own carries with it."""
    if isinstance(fusion, OwnFusion):
        return rule_of_text(fusion.content)
    return _shipped()[fusion.value]


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Rule]:
    return {rule.name: rule for rule in shipped_rules()}


@lru_cache(maxsize=4096)
def chosen_rules(fusion: Chosen, after: After) -> tuple[Rule, ...]:
    """The rules of a set that work behind a pass, in their order."""
    rules = (rule_of(one) for one in fusion)
    return tuple(sorted((r for r in rules if r.after is after), key=lambda r: (-r.priority, r.name)))


@lru_cache(maxsize=4096)
def for_chip(fusion: Chosen, chip: str) -> Chosen:
    """Those of a set that have a kernel for the chip of that name."""
    kept = frozenset(one for one in fusion if rule_of(one).fits(chip))
    return fusion if len(kept) == len(fusion) else kept


def fuse(graph: OpGraph, fusion: Chosen, after: After = After.COLLECTIVES) -> OpGraph:
    """The graph with the chosen kernels in place, of rules that work behind that pass."""
    rules = [rule for rule in chosen_rules(fusion, after) if graph.phase in rule.phases]

    def change(block: Block) -> Block:
        kinds = frozenset([op.kind for op in block.ops])
        for rule in rules:
            for case in rule.cases:
                if can_fire(case, kinds):
                    block = _fused(case, block, graph.sources)
                    kinds |= {case.result.kind} if case.result and case.result.kind else frozenset()
        return block

    return graph.map(change) if rules else graph


def _fused(case: Case, block: Block, sources: Sources) -> Block:
    found = matches(case, block, sources)
    if case.changes:
        return changed(case, [match for match in found if not refusal(case, match, block)], block) if found else block
    for match in found:
        if not refusal(case, match, block):
            block = applied(case, match, block)
    return block


def fired(rule: Rule, block: Block, sources: Sources) -> list[tuple[Match, Block, str]]:
    """What `fuse` does with a rule, match by match: the block behind each, or why it was left alone."""
    out: list[tuple[Match, Block, str]] = []
    for case in rule.cases:
        for match in matches(case, block, sources):
            why = refusal(case, match, block)
            block = block if why else applied(case, match, block)
            out.append((match, block, why))
    return out
