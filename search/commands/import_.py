"""`search import`: a launch file as a configuration, and where the job stands on a front."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from results.launchers import read_launch_file
from results.launchers.reading import model_label
from search.commands.against import against
from search.commands.answer import answer, check_writable, tell, write
from search.commands.point import Point
from search.launch_files import Configured, configured, given_of, refusal
from search.space import parse_space

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Writes the configuration; what is missing is told on standard error. With --against, compares."""
    if args.output is not None:
        check_writable(args, args.output)
    launch, defined = _arguments(args.launch), _defined(args.define)
    imported = read_launch_file(Path(args.file), given_of(args.model, args.gpus, launch, defined))
    _check_used(defined, args.file, launch)
    found = configured(imported, source=args.file, model=args.model, system=args.system, overrides=args.overrides)
    name = model_label(args.file)
    point = _point(found, name, args.file) if found.is_complete else None
    illegal = "" if point is None else refusal(point.model, point.strategy, point.system, point.workload)
    if args.against is not None:
        if point is None:
            raise ValueError(f"{args.file}: cannot be priced yet: {found.missing[0]}")
        if illegal:
            raise ValueError(f"{args.file}: cannot be priced: {illegal}")
        return against(args, point, found)
    tell(*(f"missing: {line}" for line in found.missing), *([f"not legal here: {illegal}"] if illegal else found.idle))
    tell(*_unknown(found))
    if args.json:
        answer(args, text="", data=_data(found, illegal))
    else:
        write(args, found.yaml(name))
    return 0


def _unknown(found: Configured) -> list[str]:
    """One line on names that are on no list of the framework: most are misspelled, or of another version."""
    names = found.imported.unknown
    if not names:
        return []
    return [f"unknown: {', '.join(names)}: not among the names of {found.imported.framework} here; check the spelling, "
            "they are left out"]  # fmt: skip


def _point(found: Configured, name: str, source: str) -> Point:
    space = parse_space(found.yaml(name), f"{source}, imported", Path(source).parent)
    return Point(
        name=name, model=space.model, system=space.system, workload=space.workload, strategy=space.strategy()
    )  # fmt: skip


def _arguments(launch: str | None) -> str | None:
    """The text of --args: a file, or the arguments themselves."""
    if launch is None:
        return None
    path = Path(launch)
    if launch.lstrip().startswith("-") or " " in launch:
        return launch
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--args {launch}: must be a readable script or the arguments themselves ({error})") from None


def _defined(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--define {pair}: must be NAME=VALUE, such as TP=8")
        found[name] = value
    return found


def _check_used(defined: dict[str, str], file: str, launch: str | None) -> None:
    """ValueError for a variable that neither the file nor its launch arguments name."""
    text = Path(file).read_text(encoding="utf-8") + (launch or "")
    for name in defined:
        if not re.search(rf"\b{name}\b", text):
            read = ", ".join(dict.fromkeys(re.findall(r"\$\{?([A-Za-z_]\w*)", text))) or "none"
            raise ValueError(f"--define {name}: {file} must read a variable of that name, but it reads {read}")


def _data(found: Configured, illegal: str) -> dict[str, Any]:
    imported = found.imported
    return {
        "framework": imported.framework,
        "config": found.sections,
        "num_gpus": imported.num_chips,
        "unknown": list(imported.unknown),
        "unmodelled": list(imported.unmodelled),
        "ignored": list(imported.ignored),
        "assumed": list(imported.assumed),
        "missing": list(found.missing),
        "illegal": illegal or None,
    }
