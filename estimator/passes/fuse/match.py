"""Finds where a case of a fusion rule fires in a block, and says why it does not. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from fnmatch import fnmatchcase

from estimator.graph import Block, Origin, Sources
from estimator.op import Op, OpKind
from estimator.passes.fuse.rule import Case, Pattern, Share

__all__ = ["Match", "can_fire", "fits", "matches", "why_not"]

Match = dict[str, Op]
"""Ops by label; of siblings and modules by number, in the order of the block."""


def can_fire(case: Case, kinds: frozenset[OpKind]) -> bool:
    """Whether a block with ops of these kinds, or what rules make of them, could have a match: told at once."""
    for needed in case.needs:
        if kinds.isdisjoint(needed):
            return False
    return True


def matches(case: Case, block: Block, sources: Sources, refused: list[str] | None = None) -> list[Match]:
    """Where the case fires, in the order of the block. `refused` collects what guards said."""
    search = _Search(case, block, sources)
    if case.share:
        found = search.siblings()
    elif case.modules:
        found = search.modules()
    else:
        found = search.graphs()
    if case.when is None:
        return found
    kept = []
    for match in found:
        if case.when.holds(named(case, match), block):
            kept.append(match)
        elif refused is not None:
            refused.append(case.when.told(named(case, match), block))
    return kept


def named(case: Case, match: Match) -> Mapping[str, Op]:
    """Ops as guards call them: those of a module as its first and its last."""
    if not case.modules:
        return match
    ops = list(match.values())
    return {"first": ops[0], "last": ops[-1]}


def fits(pattern: Pattern, op: Op, block: Block, sources: Sources) -> bool:
    """Whether an op is what a pattern says, its edges aside."""
    if pattern.kinds and op.kind not in pattern.kinds or op.kind is OpKind.COLLECTIVE:
        return False
    if pattern.components and op.component not in pattern.components:
        return False
    if pattern.widths and not (op.dims and op.dims[-1].axis in pattern.widths):
        return False
    if pattern.roles and not (op.inputs and block.tensors[op.inputs[0]].role in pattern.roles):
        return False
    if pattern.names and not any(fnmatchcase(op.name, name) for name in pattern.names):
        return False
    if not pattern.scopes and not pattern.classes:
        return True
    places = sources.origins.get(block.kind, {}).get(op.name, ())
    if pattern.classes and not any(sources.is_a(place.module, pattern.classes) for place in places):
        return False
    scopes = (op.name.rpartition(".")[0], *(place.scope for place in places))
    return not pattern.scopes or any(fnmatchcase(scope, want) for scope in scopes for want in pattern.scopes)


class _Search:
    """One case in one block."""

    def __init__(self, case: Case, block: Block, sources: Sources) -> None:
        self.case, self.block, self.sources = case, block, sources

    def fitting(self, label: str) -> list[Op]:
        pattern, block, sources = self.case.patterns[label], self.block, self.sources
        kinds = pattern.kinds
        if kinds and pattern.is_plain:
            return [op for op in block.ops if op.kind in kinds]
        return [op for op in block.ops if (not kinds or op.kind in kinds) and fits(pattern, op, block, sources)]

    # ---------------------------------------------------------------------------------------------- graphs of patterns

    def graphs(self) -> list[Match]:
        """Matches of labelled patterns; an op of `once` is in one of them."""
        labels = list(self.case.patterns)
        if len(labels) == 1:
            return [{labels[0]: op} for op in self.fitting(labels[0])]
        taken: set[str] = set()
        found: list[Match] = []
        for op in self.fitting(labels[0]):
            if labels[0] in self.case.once and op.name in taken:
                continue
            for match in self.grown({labels[0]: op}, labels[1:]):
                mine = {o.name for label, o in match.items() if label in self.case.once}
                if taken.isdisjoint(mine):
                    taken |= mine
                    found.append(match)
                    if labels[0] in self.case.once:
                        break
        return found

    def grown(self, match: Match, labels: list[str]) -> Iterator[Match]:
        """Matches with the other labels, each tied to one that is there."""
        if not labels:
            yield match
            return
        label, pattern = labels[0], self.case.patterns[labels[0]]
        any_of_them = False
        for op in self.tied(pattern, match):
            if all(op is not other for other in match.values()) and fits(pattern, op, self.block, self.sources):
                any_of_them = True
                yield from self.grown({**match, label: op}, labels[1:])
        if pattern.optional and not any_of_them:
            yield from self.grown(match, labels[1:])

    def tied(self, pattern: Pattern, match: Match) -> Iterator[Op]:
        """Ops that read, or feed, the one that the pattern names."""
        if pattern.feeds:
            target = match.get(pattern.feeds)
            if target is not None:
                yield from [op for op in self.block.ops if _share(op.outputs, target.inputs)]
            return
        source = next((match[label] for label in pattern.reads if label in match), None)
        if source is None:
            return
        readers = [op for op in self.block.ops if _share(op.inputs, source.outputs)]
        if pattern.alone and len(readers) > 1:
            return
        for op in readers:
            if pattern.slot is not None and not (
                pattern.slot < len(op.inputs) and op.inputs[pattern.slot] in source.outputs
            ):
                continue
            if not pattern.next or self.block.ops.index(op) == self.block.ops.index(source) + 1:
                yield op

    # -------------------------------------------------------------------------------------------- siblings and modules

    def siblings(self) -> list[Match]:
        """Ops that share what siblings share, two and more."""
        groups: dict[Hashable, list[Op]] = {}
        for op in self.fitting(""):
            key = tuple(self.shared(share, op) for share in self.case.share)
            if None not in key:
                groups.setdefault(key, []).append(op)
        return [{str(i): op for i, op in enumerate(group)} for group in groups.values() if len(group) > 1]

    def shared(self, share: Share, op: Op) -> Hashable:
        return SHARED[share](op, self.block)

    def modules(self) -> list[Match]:
        """The ops of each module of these classes, those of modules inside it as well; two and more."""
        origins = self.sources.origins.get(self.block.kind, {})
        classes = {place.scope: place.module for places in origins.values() for place in places}
        classes |= self.sources.modules
        paths = sorted((path for path, name in classes.items() if path and self.sources.is_a(name, self.case.modules)),
                       key=lambda path: path.count("."))  # fmt: skip
        taken: set[str] = set()
        found = []
        for path in paths:
            mine = [op for op in self.block.ops if op.name in origins and op.name not in taken
                    and _inside(origins[op.name], path)]  # fmt: skip
            if len(mine) > 1:
                taken |= {op.name for op in mine}
                found.append({str(i): op for i, op in enumerate(mine)})
        return found


def _inside(places: tuple[Origin, ...], path: str) -> bool:
    """Whether all of an op is done by a module, or by one inside it."""
    return bool(places) and all(place.scope == path or place.scope.startswith(f"{path}.") for place in places)


def _share(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    for name in a:  # a plain loop: asked for every op of a block
        if name in b:
            return True
    return False


def _reader(op: Op, block: Block) -> Hashable:
    return next((o.name for o in block.ops if op.outputs and op.outputs[0] in o.inputs), None)


SHARED: Mapping[Share, Callable[[Op, Block], Hashable]] = {
    Share.KIND: lambda op, block: op.kind,
    Share.COMPONENT: lambda op, block: op.component,
    Share.ROLE: lambda op, block: op.role,
    Share.MODULES: lambda op, block: op.modules,
    Share.INPUTS: lambda op, block: op.inputs,
    Share.INPUT: lambda op, block: op.inputs[0] if op.inputs else None,
    Share.READER: _reader,
}


def why_not(case: Case, block: Block, sources: Sources) -> str:
    """Why a case does not fire in a block."""
    refused: list[str] = []
    if case.modules:
        if not sources.origins:
            return "the graph was built from a model file: nothing is known of modules"
        matches(case, block, sources, refused)
        if refused:
            return refused[0]
        return f"no module is a {' or a '.join(sorted(case.modules))} with two ops and more"
    search = _Search(case, block, sources)
    for label, pattern in case.patterns.items():
        if not pattern.optional and not search.fitting(label):
            if pattern.classes and not sources.origins:
                return "the graph was built from a model file: nothing is known of classes"
            return f"no op is {told(pattern)}"
    matches(case, block, sources, refused)
    if refused:
        return refused[0]
    if case.share:
        what = ", ".join(share.value for share in case.share)
        return f"no two ops that are {told(case.patterns[''])} share {what}"
    ties = [f"{label} reads {' or '.join(p.reads)}" if p.reads else f"{label} feeds {p.feeds}"
            for label, p in case.patterns.items() if p.reads or p.feeds]  # fmt: skip
    return f"no {'; '.join(ties)}, with ops of their own" if ties else "its ops are in no place of their own"


def told(p: Pattern) -> str:
    """A pattern in words."""
    words = [
        " or ".join(sorted(k.value for k in p.kinds)),
        *([f"of {' or '.join(sorted(c.value for c in p.components))}"] if p.components else []),
        *([f"{' or '.join(sorted(w.value for w in p.widths))} wide"] if p.widths else []),
        *([f"named {' or '.join(p.names)}"] if p.names else []),
        *([f"in {' or '.join(p.scopes)}"] if p.scopes else []),
        *([f"of class {' or '.join(sorted(p.classes))}"] if p.classes else []),
        *([f"reading {' or '.join(sorted(r.value for r in p.roles))}"] if p.roles else []),
    ]
    return ", ".join(word for word in words if word) or "anything"
