"""`search graph discover`: drafts of fusion rules for a model, tried and ranked by what they would save, as YAML."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from estimator.discover import Draft, drafts_of_graph, tried
from estimator.fusion_gain import explain
from estimator.graph_file import is_graph_text
from estimator.strategy import Fusion
from hardware.units import format_bytes, format_seconds
from results.report.text import wrap
from search.commands.answer import answer
from search.commands.graph_fuse import Subject, passes_of, read_lowering

__all__ = ["run"]

WIDTH = 110
WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # where words of a class's name meet
HEAD = (
    "Drafts, not kernels: each was tried on the graph, behind the rules that are chosen, and saves what is told if "
    "such a kernel exists and moves its inputs and outputs once. Keep those that you have, name your chips, and hold "
    "them against measured times; docs/fusion.md explains every key."
)


def run(args: argparse.Namespace) -> int:
    """Finds drafts in the graph, and in the source of a config.json's model; tries and prints them, most gain first."""
    is_config = _is_config(args.config)
    subject = _captured(args) if is_config else read_lowering(args, args.config)
    if args.chosen is not None:
        subject = _with_rules(subject, args.chosen)
    found = list(drafts_of_graph(subject.graph, subject.by))
    if is_config:
        found += _of_source(args, found)
    now = explain(subject.graph, subject.by, subject.chip, known=()).after
    drafts = [tried(draft, subject.graph, subject.by, subject.chip, now) for draft in found]
    good = _once(sorted((d for d in drafts if d.saved.seconds > 0), key=lambda d: (-d.saved.seconds, d.rule["name"])))
    bad = sorted((d for d in drafts if d.saved.seconds <= 0), key=lambda d: str(d.rule["name"]))
    data = {"name": subject.name, "of": subject.told, "seconds": now.seconds, "drafts": [_plain(d) for d in good],
            "without_gain": [_plain(d) for d in bad]}  # fmt: skip
    answer(args, text=_yaml(subject, now.seconds, good, bad), data=data)
    return 0


def _once(drafts: Sequence[Draft]) -> list[Draft]:
    """Of drafts that fire on the same ops and save the same, the first, which tells where the others were found."""
    found: dict[tuple[object, float], Draft] = {}
    for draft in drafts:
        first = found.setdefault((draft.ops, draft.saved.seconds), draft)
        if first is not draft:
            notes = tuple(dict.fromkeys((*first.notes, *draft.notes)))
            found[draft.ops, draft.saved.seconds] = replace(first, found=f"{first.found}; {draft.found}", notes=notes)
    return list(found.values())


def _is_config(target: str) -> bool:
    """Whether a target is the config.json of a model, or its folder, rather than a graph."""
    path = Path(target)
    if path.is_dir():
        return (path / "config.json").is_file()
    return path.suffix == ".json" and path.is_file() and not is_graph_text(path.read_text(encoding="utf-8")[:300])


def _captured(args: argparse.Namespace) -> Subject:
    """The model of a config.json from its own code, so that drafts can name classes and scopes."""
    from capture.model import capture_model

    model = capture_model(args.config, trust_remote_code=args.trust_remote_code)
    like = read_lowering(argparse.Namespace(**{**vars(args), "overrides": [], "reference": None}), "llama3_8b")
    seq = args.seq or 4096
    told = f"captured, {like.told}"
    return replace(like, name=model.name, told=told, graph=model.captured.at(seq))


def _with_rules(subject: Subject, names: str) -> Subject:
    known = {f.value: f for f in Fusion}
    chosen = [] if names == "none" else names.split(",")
    strange = [name for name in chosen if name not in known]
    if strange:
        raise ValueError(f"--with must name rules of {', '.join(known)}, or none, but got {strange[0]!r}")
    strategy = replace(subject.by.strategy, fusion=frozenset(known[name] for name in chosen))
    return replace(subject, by=replace(subject.by, strategy=strategy))


# --------------------------------------------------------------------------------------------------------------- source


def _of_source(args: argparse.Namespace, known: Sequence[Draft]) -> Iterator[Draft]:
    """Drafts by class: what the text of a module's forward shows."""
    from capture.source import module_sources, scan

    taken = {str(draft.rule["name"]) for draft in known}
    for found in scan(module_sources(args.config, trust_remote_code=args.trust_remote_code)):
        source = found.source
        where = f"{source.name} ({source.place})" + (f", {', '.join(source.bases)}" if source.bases else "")
        word = WORDS.sub("_", source.name).lower()
        if found.streamed and f"one_pass_{word}" not in taken:
            steps = ", ".join(dict.fromkeys(found.streamed))
            note = f"its forward has no product: {len(found.streamed)} steps over memory ({steps})"
            yield Draft(
                rule={"name": f"one_pass_{word}"[:64], "about": f"{source.name} in one pass over its input",
                      "op": {"class": source.name}, "change": {"op": {"passes": 1, "forgets": "full"}}},
                found=where, notes=(note, "what it kept in fp32 is formed again in backward"),
            )  # fmt: skip
            yield Draft(
                rule={"name": f"whole_{word}"[:64], "about": f"all of {source.name} as one kernel",
                      "module": source.name, "result": {"passes": 1}},
                found=where, notes=(note,),
            )  # fmt: skip
        for names in found.products:
            parents = sorted({path.rpartition(".")[2] for path in source.paths if path})
            yield Draft(
                rule={"name": f"joined_{word}_{len(names)}"[:64],
                      "about": f"{', '.join(names)} of {source.name} as one product",
                      "siblings": {"kind": "matmul", "scope": [f"*.{p}.*" for p in parents]},
                      "share": ["kind", "inputs", "component", "role", "modules"], "join": {"adds_widths": True}},
                found=where, notes=("the weights are stored as one matrix, in checkpoints as well",),
            )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- text


class _Dumper(yaml.SafeDumper):
    """Lists of a rule under their key, indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _yaml(subject: Subject, seconds: float, good: Sequence[Draft], bad: Sequence[Draft]) -> str:
    """A rule file: drafts that save something, each under what to review; below, as comments, those that do not."""
    head = f"{subject.name}: {subject.told}; {format_seconds(seconds)} {passes_of(subject.graph)}"
    lines = [*_comment(head), "#", *_comment(HEAD), "rules:" if good else "rules: []"]
    for i, draft in enumerate(good, start=1):
        told = (
            f"{i}. saves {format_seconds(draft.saved.seconds)} ({draft.share:.1%}), "
            f"{_bytes(draft.saved.moved_bytes)} through HBM, {_bytes(draft.saved.kept_bytes)} kept; "
            f"fires {draft.fires} times in the model"
        )
        lines += ["", *_comment(told, "  "), *_comment(f"found in {draft.found}", "  ")]
        lines += [line for note in draft.notes for line in _comment(f"review: {note}", "  ")]
        text = yaml.dump([dict(draft.rule)], Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=WIDTH)
        lines += [f"  {line}" for line in text.splitlines()]
    if bad:
        lines += ["", *_comment("No gain behind the chosen rules:")]
    for draft in bad:
        lines += _comment(f"{draft.rule['name']} ({draft.found}): {draft.why_not or 'saves nothing'}", "", "  ")
    return "\n".join(lines) + "\n"


def _bytes(value: float) -> str:
    return f"-{format_bytes(-value)}" if value < 0 else format_bytes(value)


def _comment(text: str, indent: str = "", hang: str = "") -> list[str]:
    first, *more = wrap(text, WIDTH - 4)
    return [f"{indent}# {first}", *(f"{indent}# {hang}{line}" for line in more)]


def _plain(draft: Draft) -> dict[str, Any]:
    return {
        "rule": dict(draft.rule), "found": draft.found, "review": list(draft.notes), "saved": asdict(draft.saved),
        "share": draft.share, "fires": draft.fires, "why_not": draft.why_not,
    }  # fmt: skip
