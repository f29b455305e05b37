"""Fusion rules that a space brings: files by path, or rules written in place. What a rule says: docs/fusion.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from estimator.passes.fuse.reading import read_rules, rule_of_text
from estimator.strategy import Fusion, OwnFusion
from search.yaml_lines import Document, Key, Plain, SpaceError

__all__ = ["own_rules", "read_fusion_rules", "write_fusion_rules"]


def own_rules(path: str | Path) -> tuple[OwnFusion, ...]:
    """The rules of a file; ValueError where one has a name of ours."""
    found = tuple(OwnFusion(rule.name, text) for rule, text in read_rules(path))
    for rule, _ in read_rules(path):
        _check_free(rule.name, rule.place)
    return found


def read_fusion_rules(document: Document, folder: Path) -> tuple[OwnFusion, ...]:
    """Those under `fusion_rules`, each once; `folder` is where relative paths start."""
    found: dict[str, OwnFusion] = {}
    for key, rule in _rules(document, folder):
        if rule.value in found:
            raise document.error(key, f"a rule must have a name of its own, but {rule.value!r} stands twice")
        found[rule.value] = rule
    return tuple(found.values())


def write_fusion_rules(rules: tuple[OwnFusion, ...]) -> Plain:
    """What `read_fusion_rules` reads, with nothing left in other files."""
    return [json.loads(rule.content) for rule in rules]


def _rules(document: Document, folder: Path) -> Iterator[tuple[Key, OwnFusion]]:
    top: Key = ("fusion_rules",)
    value = document.get(top)
    keys = [(*top, i) for i in range(len(value))] if isinstance(value, list) else [top] if value is not None else []
    for key in keys:
        item = document.get(key)
        if isinstance(item, dict):
            yield key, _in_place(document, key, item)
            continue
        if not isinstance(item, str):
            raise document.error(key, "must be the path of a rule file or a rule", item, "my_kernels.yaml")
        beside = folder / item
        try:
            yield from ((key, rule) for rule in own_rules(beside if os.path.exists(beside) else Path(item)))
        except ValueError as error:
            raise SpaceError(str(error)) from None


def _in_place(document: Document, key: Key, item: dict[str, Plain]) -> OwnFusion:
    text = json.dumps(item, sort_keys=True)
    try:
        rule = rule_of_text(text)
        _check_free(rule.name, document.place(key))
    except ValueError as error:
        raise document.error(key, str(error)) from None
    return OwnFusion(rule.name, text)


def _check_free(name: str, place: str) -> None:
    if name in {f.value for f in Fusion}:
        raise ValueError(f"{place}: name: {name!r} is the name of a shipped rule; give yours another")
