"""From YAML to fusion rules, every key and word checked: a mistake is told by file, line, key and remedy."""

from __future__ import annotations

import graphlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from estimator.op import Axis, Component, OpKind
from estimator.passes.fuse.guard import Guard, linear, parse_guard
from estimator.passes.fuse.places import Node, parse
from estimator.passes.fuse.rule import (
    PHASES,
    After,
    Case,
    Change,
    DimRef,
    Formula,
    Join,
    Keep,
    NewTensor,
    Pattern,
    Ref,
    Result,
    Rule,
    Share,
)
from estimator.precision import Role

__all__ = ["read_rules", "rule_of_text", "rules_of", "shipped_rules"]

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SHIPPED = Path(__file__).with_name("rules.yaml")
MATCHES = ("op", "siblings", "dag", "chain", "module")
EFFECTS = ("change", "join", "result")
CASE = (*MATCHES, "share", "when", "once", "tensors", *EFFECTS)
RULE = ("name", "about", "priority", "phases", "chips", "after", "cases", *CASE)
PATTERN = ("kind", "component", "name", "scope", "class", "width", "role", "reads", "feeds", "next", "optional")
EDGES = ("reads", "feeds", "next", "optional")
CHANGE = ("passes", "forgets", "rides", "holds", "inputs", "outputs", "saves", "traffic", "backward")
RESULT = ("like", "at", "kind", "component", "name", "dims", "inputs", "outputs", "saves", "passes", "traffic",
          "backward")  # fmt: skip
JOIN = ("at", "adds_widths", "keeps_views")
SIDES = {"in": "inputs", "out": "outputs", "saves": "saves", "inputs": "inputs", "outputs": "outputs"}
PRODUCTS = frozenset({OpKind.MATMUL, OpKind.GROUPED_MATMUL, OpKind.BLOCK_MATMUL, OpKind.COLLECTIVE})


@lru_cache(maxsize=1)
def shipped_rules() -> tuple[Rule, ...]:
    """The rules of this package, in the order of their file."""
    return rules_of(parse(SHIPPED.read_text(encoding="utf-8"), SHIPPED.name))


def read_rules(path: str | Path) -> tuple[tuple[Rule, str], ...]:
    """The rules of a file, each with the text by which it is known again (`rule_of_text`)."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{path}: a rule file must be readable UTF-8 text, but got {reason}") from None
    root = parse(text, str(path))
    rules = rules_of(root)
    nodes = list(root.mapping(("rules",), "a rule file")["rules"].items())
    return tuple((rule, json.dumps(node.bare(), sort_keys=True)) for rule, node in zip(rules, nodes, strict=True))


@lru_cache(maxsize=1024)
def rule_of_text(text: str) -> Rule:
    """A rule of its JSON text."""
    content = json.loads(text)
    return _rule(Node.plain(content, f"fusion rule {content.get('name') if isinstance(content, dict) else ''}"))


def rules_of(root: Node) -> tuple[Rule, ...]:
    """The rules of a document; none of them twice."""
    given = root.mapping(("rules",), "a rule file")
    if "rules" not in given:
        root.refuse("rules is required, but is absent; a rule file has a list of them")
    found: dict[str, Rule] = {}
    if not isinstance(given["rules"].value, list):
        given["rules"].refuse("must be a list of rules", given["rules"].bare())
    for node in given["rules"].items():
        rule = _rule(node)
        if rule.name in found:
            node.refuse(f"a rule must have a name of its own, but {rule.name!r} stands at {found[rule.name].place} too")
        found[rule.name] = rule
    return tuple(found.values())


def _rule(node: Node) -> Rule:
    given = node.mapping(RULE, "a rule")
    for key in ("name", "about"):
        if key not in given:
            node.refuse(f"{key} is required, but is absent")
    name = given["name"].text("a name")
    if not NAME.fullmatch(name):
        given["name"].refuse("a name must be small letters, digits and _", name)
    own = [key for key in given if key in CASE]
    if ("cases" in given) == bool(own):
        node.refuse(f"a rule must have either cases or one of {', '.join(MATCHES)}", own or "neither")
    nodes = list(given["cases"].items()) if "cases" in given else [node]
    plain = {key: given[key] for key in ("priority", "phases", "chips", "after") if key in given}
    return Rule(
        name=name, about=" ".join(given["about"].text().split()), cases=tuple(_case(n) for n in nodes),
        priority=plain["priority"].whole() if "priority" in plain else 0,
        phases=_phases(plain["phases"]) if "phases" in plain else frozenset(PHASES),
        chips=plain["chips"].texts("a name of a chip, * for any letters") if "chips" in plain else (),
        after=plain["after"].member(After) if "after" in plain else After.COLLECTIVES,
        place=f"{node.source}:{node.line}" if node.line else node.source,
    )  # fmt: skip


def _phases(node: Node) -> frozenset[str]:
    for one in node.items():
        if one.value not in PHASES:
            one.refuse(f"must be a phase of {', '.join(PHASES)}", one.bare())
    return frozenset(str(one.value) for one in node.items())


def _case(node: Node) -> Case:
    given = {key: value for key, value in node.mapping(RULE if "name" in node.value else CASE, "a case").items()
             if key in CASE}  # fmt: skip
    matches = [key for key in MATCHES if key in given]
    effects = [key for key in EFFECTS if key in given]
    if len(matches) != 1:
        node.refuse(f"a case must have one of {', '.join(MATCHES)}, but has {', '.join(matches) or 'none'}")
    if len(effects) != 1:
        node.refuse(f"a case must have one of {', '.join(EFFECTS)}, but has {', '.join(effects) or 'none'}")
    how = matches[0]
    if (how == "siblings") != ("share" in given) or (how == "siblings") != (effects[0] == "join"):
        node.refuse("siblings go with share and join, and only they do")
    if how == "module" and effects[0] != "result":
        node.refuse("module goes with result: all ops of a module become one")
    patterns = _patterns(given[how], how)
    labels = tuple(patterns) if how != "module" else ("first", "last")
    case = _Effects(labels, given.get("tensors"))
    result = case.result(given["result"]) if "result" in given else None
    changes = case.changes(given["change"]) if "change" in given else ()
    return Case(
        patterns=patterns,
        share=tuple(n.member(Share) for n in given["share"].items()) if "share" in given else (),
        modules=frozenset(given[how].texts("the name of a class")) if how == "module" else frozenset(),
        when=_guard(given["when"], labels) if "when" in given else None,
        once=case.once(given["once"]) if "once" in given else frozenset(patterns),
        changes=changes, result=result, join=_join(given["join"]) if "join" in given else None,
        tensors=case.tensors, line=node.line,
    )  # fmt: skip


def _patterns(node: Node, how: str) -> Mapping[str, Pattern]:
    if how == "op":
        return {"op": _pattern(node, ())}
    if how == "siblings":
        return {"": _pattern(node, ())}
    if how == "chain":
        return _chain(node)
    if how == "module":
        return {}
    given = node.mapping(what="labels with what their op must be")
    for label, one in given.items():
        if not LABEL.fullmatch(label) or label in {"inputs", "outputs", "count"}:
            one.refuse(f"a label must be letters, digits and _, and none of inputs, outputs, count, but got {label!r}")
    patterns = {label: _pattern(one, tuple(given)) for label, one in given.items()}
    return _in_order(node, patterns)


def _in_order(node: Node, patterns: Mapping[str, Pattern]) -> Mapping[str, Pattern]:
    """Patterns such that each is tied to one before it; the first is required."""
    edges = {label: {*p.reads, *({p.feeds} if p.feeds else ())} for label, p in patterns.items()}
    try:
        order = list(graphlib.TopologicalSorter(edges).static_order())
    except graphlib.CycleError as error:
        node.refuse(f"the ops of a rule must form no cycle, but {' <- '.join(error.args[1])} do")
    at, written = {label: i for i, label in enumerate(order)}, list(patterns)
    order.sort(key=lambda label: (max((at[x] for x in edges[label]), default=-1), written.index(label)))
    loose = [label for label in order[1:] if not edges[label]]
    if not order or loose:
        node.refuse(f"every op but one must read or feed another, but got {', '.join(loose) or 'no op'}")
    if patterns[order[0]].optional:
        node.refuse(f"the op that others read or feed must not be optional, but {order[0]} is")
    return {label: patterns[label] for label in order}


def _chain(node: Node) -> Mapping[str, Pattern]:
    """Each reads the one before, and nothing else reads that."""
    found: dict[str, Pattern] = {}
    before = ""
    for one in node.items():
        plain = not isinstance(one.value, dict)
        pattern = Pattern(kinds=one.members(OpKind)) if plain else _pattern(one, ())
        stem = "_or_".join(sorted(kind.value for kind in pattern.kinds)) or "op"
        label = next(x for x in (stem, *(f"{stem}_{n}" for n in range(2, 1000))) if x not in found)
        found[label] = _with_edge(pattern, before) if before else pattern
        before = label
    if len(found) < 2:
        node.refuse("a chain must have two ops and more", node.bare())
    return found


def _with_edge(p: Pattern, before: str) -> Pattern:
    return Pattern(kinds=p.kinds, components=p.components, names=p.names, scopes=p.scopes, classes=p.classes,
                   widths=p.widths, roles=p.roles, reads=(before,), alone=True)  # fmt: skip


def _pattern(node: Node, labels: tuple[str, ...]) -> Pattern:
    given = node.mapping(PATTERN if labels else [key for key in PATTERN if key not in EDGES], "what an op must be")
    reads, slot = _reads(given["reads"], labels) if "reads" in given else ((), None)
    feeds = _label(given["feeds"], labels) if "feeds" in given else ""
    if "next" in given and not reads:
        given["next"].refuse("next goes with reads")
    return Pattern(
        kinds=given["kind"].members(OpKind) if "kind" in given else frozenset(),
        components=given["component"].members(Component) if "component" in given else frozenset(),
        names=given["name"].texts() if "name" in given else (),
        scopes=given["scope"].texts() if "scope" in given else (),
        classes=frozenset(given["class"].texts()) if "class" in given else frozenset(),
        widths=given["width"].members(Axis) if "width" in given else frozenset(),
        roles=given["role"].members(Role) if "role" in given else frozenset(),
        reads=reads, slot=slot, feeds=feeds, next="next" in given and given["next"].flag(),
        optional="optional" in given and given["optional"].flag(),
    )  # fmt: skip


def _reads(node: Node, labels: tuple[str, ...]) -> tuple[tuple[str, ...], int | None]:
    """A label, the first of several that is there, or {number of the input: label}."""
    if not isinstance(node.value, dict):
        return tuple(_label(one, labels) for one in node.items()), None
    if len(node.value) != 1 or not next(iter(node.value)).isdecimal():
        node.refuse("must be labels, or {number of the input: label}", node.bare())
    ((number, one),) = node.value.items()
    return (_label(one, labels),), int(number)


def _label(node: Node, labels: Sequence[str]) -> str:
    if node.value not in labels:
        node.refuse(f"must be a label of {', '.join(label for label in labels if label) or 'the rule'}", node.bare())
    return str(node.value)


def _guard(node: Node, labels: tuple[str, ...]) -> Guard:
    try:
        return parse_guard(node.text("a condition"), labels)
    except ValueError as error:
        node.refuse(f"a guard must be a condition: {error}")


def _join(node: Node) -> Join:
    given = node.mapping(JOIN, "join")
    at = given["at"].text() if "at" in given else "first"
    if at not in {"first", "last"}:
        given["at"].refuse("must be first or last", at)
    flags = {key: key in given and given[key].flag() for key in JOIN[1:]}
    return Join(last=at == "last", adds_widths=flags["adds_widths"], keeps_views=flags["keeps_views"])


class _Effects:
    """Reads what follows from a match; references are to its labels and new tensors."""

    def __init__(self, labels: tuple[str, ...], tensors: Node | None) -> None:
        self.labels = labels
        made = tensors.mapping(what="new tensors by name") if tensors is not None else {}
        self.names = tuple(made)
        self.tensors = tuple(self._tensor(name, node) for name, node in made.items())

    def once(self, node: Node) -> frozenset[str]:
        return frozenset(_label(one, self.labels) for one in node.items())

    def changes(self, node: Node) -> tuple[tuple[str, Change], ...]:
        given = node.mapping(what="labels with what becomes of their op")
        for label, one in given.items():
            if label not in self.labels:
                one.refuse(f"{label} is no op of the rule; have {', '.join(self.labels)}")
        return tuple((label, self._change(one)) for label, one in given.items())

    def _change(self, node: Node) -> Change:
        given = node.mapping(CHANGE, "a change")
        if not given:
            node.refuse("a change must have at least one key", node.bare())
        return Change(
            passes=given["passes"].number() if "passes" in given else None,
            forgets=given["forgets"].member(Role) if "forgets" in given else None,
            rides=given["rides"].flag() if "rides" in given else None,
            holds=self.refs(given.get("holds")), inputs=self.refs(given.get("inputs")),
            outputs=self.refs(given.get("outputs")), saves=self.keeps(given.get("saves")),
            traffic=self.formula(given.get("traffic")), backward=self.formula(given.get("backward")),
        )  # fmt: skip

    def result(self, node: Node) -> Result:
        given = node.mapping(RESULT, "a result")
        last = "last" if self.labels == ("first", "last") else self.labels[-1]
        at = _label(given["at"], self.labels) if "at" in given else last
        kind = given["kind"].member(OpKind) if "kind" in given else None
        if kind in PRODUCTS:
            assert kind is not None
            law = f"a fused kernel must be no {kind.value}: its gradients are those of the product alone"
            given["kind"].refuse(f"{law}; let what it swallows ride (change: {{LABEL: {{rides: true, holds: [...]}}}})")
        dims = given.get("dims")
        return Result(
            like=_label(given["like"], self.labels) if "like" in given else at, at=at, kind=kind,
            component=given["component"].member(Component) if "component" in given else None,
            name=given["name"].text("a name") if "name" in given else "",
            dims=None if dims is None else tuple(self.dim(one) for one in dims.items()),
            inputs=self.refs(given.get("inputs")), outputs=self.refs(given.get("outputs")),
            saves=self.keeps(given.get("saves")), passes=given["passes"].number() if "passes" in given else None,
            traffic=self.formula(given.get("traffic")), backward=self.formula(given.get("backward")),
        )  # fmt: skip

    def _tensor(self, name: str, node: Node) -> NewTensor:
        given = node.mapping(("dims", "role"), "a new tensor")
        for key in ("dims", "role"):
            if key not in given:
                node.refuse(f"{key} is required, but is absent")
        return NewTensor(name, tuple(self.dim(one) for one in given["dims"].items()), given["role"].member(Role))

    def dim(self, node: Node) -> DimRef:
        """`LABEL.N` of the op, `LABEL.in0.N` or `LABEL.out0.N` of a tensor; `/ X` and `* X` behind it."""
        text = node.text("a dim")
        found = re.fullmatch(r"(\w+)\.(?:(in|out)(\d+)\.)?(\d+)(?:\s*([*/])\s*([0-9.]+))?", text)
        if not found or found[1] not in self.labels or (found[6] and not _positive(found[6])):
            node.refuse(f"must be LABEL.N, LABEL.in0.N or LABEL.out0.N, with a label of {', '.join(self.labels)}", text)
        factor = 1.0 if not found[6] else float(found[6]) if found[5] == "*" else 1.0 / float(found[6])
        return DimRef(found[1], SIDES.get(found[2] or "", "dims"), int(found[3] or 0), int(found[4]), factor)

    def refs(self, node: Node | None) -> tuple[Ref, ...] | None:
        return None if node is None else tuple(self.ref(one) for one in node.items())

    def ref(self, node: Node) -> Ref:
        found = self.named(node.text("tensors"))
        if found is None:
            parts = "inputs, outputs, LABEL.inputs, LABEL.in0, LABEL.outputs, LABEL.out0"
            node.refuse(f"must be tensors of the match ({parts}), with a label of {', '.join(self.labels)}, or one of "
                        "`tensors`", node.value)  # fmt: skip
        return found

    def named(self, text: str) -> Ref | None:
        """The tensors that a text means."""
        if text in self.names:
            return Ref(tensor=text)
        if text in {"inputs", "outputs"}:
            return Ref(side=text)
        found = re.fullmatch(r"(\w+)\.(inputs|outputs|saves|in|out|saves)(\d*)", text)
        if not found or found[1] not in self.labels or (found[2] in {"in", "out"} and not found[3]):
            return None
        return Ref(found[1], SIDES[found[2]], int(found[3]) if found[3] else None)

    def keeps(self, node: Node | None) -> tuple[Keep, ...] | None:
        return None if node is None else tuple(self._keep(one) for one in node.items())

    def _keep(self, node: Node) -> Keep:
        if isinstance(node.value, str):
            return Keep(self.ref(node))
        given = node.mapping(("of", "as", "only"), "what is kept")
        if "of" not in given:
            node.refuse("of is required, but is absent")
        return Keep(self.ref(given["of"]), given["as"].member(Role) if "as" in given else None,
                    given["only"].member(Role) if "only" in given else None)  # fmt: skip

    def formula(self, node: Node | None) -> Formula:
        if node is None:
            return ()
        try:
            terms = linear(node.text("a sum of tensors times numbers"))
        except ValueError as error:
            node.refuse(str(error))
        refs = [(self.named(name), times) for name, times in terms]
        for (ref, _), (name, _) in zip(refs, terms, strict=True):
            if ref is None:
                node.refuse(f"{name} names no tensors of the match; have inputs, outputs, LABEL.in0 and so on, with a "
                            f"label of {', '.join(self.labels)}")  # fmt: skip
        return tuple((ref, times) for ref, times in refs if ref is not None)


def _positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
