"""Space files: a question a user asks, checked and complete. A configuration is a space with one point.

Layers: defaults of the dataclasses < the YAML file < `--set`. Whatever is wrong is a SpaceError of one line,
`FILE:LINE: KEY: rule; got VALUE; accepted ...`. Knows nothing of which points are legal or what they cost.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path

import spaces
from estimator.captured import CapturedModel
from estimator.graph_file import read_graph
from estimator.imbalance import Routing
from estimator.model import ModelSpec
from estimator.model_io import load_model, model_from_mapping
from estimator.result import COLUMNS, column
from estimator.strategy import OwnFusion, Strategy
from estimator.workload import Workload
from hardware.system import SystemSpec
from search.axes import OPEN, axis_values, member, read_axes, read_strategy, strategy_of, whole, write_axes
from search.expression import BAND_IS_TOLD, BAND_NAMES
from search.fusion_rules import read_fusion_rules, write_fusion_rules
from search.layout import layers_of
from search.objective import MAX_OBJECTIVES, Constraint, Objective
from search.plain import plain
from search.systems import beside, read_systems, refused
from search.yaml_lines import Document, Key, Plain, SpaceError, parse_document, read_document
from search.yaml_text import yaml_text

__all__ = ["ANSWERS", "Keep", "Sampler", "SearchOptions", "Space", "SpaceError", "load_space", "overridden",
           "parse_space", "read_model", "read_name", "read_space", "refuse_requests", "shipped_spaces"]  # fmt: skip

KEYS = (
    "name", "model", "capture", "system", "workload", "strategy", "objectives", "constraints", "search", "reference",
    "fusion_rules",
)  # fmt: skip
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # it becomes a folder's
DIRECTIONS = {
    "minimise": True, "minimize": True, "min": True, "lower": True,
    "maximise": False, "maximize": False, "max": False, "higher": False,
}  # fmt: skip
MAX_TOKENS = 10**9  # of a sequence, and sequences of a batch


ANSWERS = re.compile(r"^workload:.*\bphase\b|^workload:\s*(#.*)?\n(\s+.*\n)*?\s+phase\b", re.MULTILINE)
"""What tells a shipped space of a model that answers (search/served.py) from one of training."""


class Sampler(Enum):
    """How points are chosen. AUTO is exhaustive wherever the exact sweep applies."""

    AUTO = "auto"
    EXHAUSTIVE = "exhaustive"
    NSGA2 = "nsga2"
    NSGA3 = "nsga3"
    TPE = "tpe"
    GP = "gp"
    RANDOM = "random"
    QMC = "qmc"


class Keep(Enum):
    """What a run stores: the front, or everything it prices."""

    FRONT = "front"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How to search. None: the search decides."""

    sampler: Sampler = Sampler.AUTO
    keep: Keep = Keep.FRONT
    block_size: int | None = None  # candidates of one unit of work
    max_candidates: int | None = None  # stop after so many priced
    workers: int | None = None
    seed: int = 0
    trials: int | None = None  # configurations that a study prices
    seconds: int | None = None  # of a study


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything a search needs to know. Equal spaces give equal fronts."""

    name: str
    model: ModelSpec
    systems: tuple[SystemSpec, ...]
    workload: Workload
    axes: Mapping[str, tuple[object, ...]]  # every name of axes.AXES, in that order; one value: fixed
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...] = ()
    options: SearchOptions = SearchOptions()
    references: Mapping[str, Strategy] = field(default_factory=dict)
    fusion_rules: tuple[OwnFusion, ...] = ()  # kernels beside the shipped ones

    @property
    def raw_size(self) -> int:
        """Points before any rule: the product of the axes and the systems. An open axis counts once."""
        return math.prod(len(values) for values in self.axes.values()) * len(self.systems)

    @property
    def open_axes(self) -> tuple[str, ...]:
        """Axes that are left to a sampler."""
        return tuple(name for name, values in self.axes.items() if OPEN in values)

    @property
    def higher(self) -> list[bool]:
        """Of each objective, whether more is better."""
        return [not objective.minimise for objective in self.objectives]

    @property
    def is_point(self) -> bool:
        """Whether it is a configuration."""
        return self.raw_size == 1 and not self.open_axes

    def refuse_open(self) -> None:
        """SpaceError where an axis is left to a sampler: such a space has points, but no list of them."""
        if self.open_axes:
            where = ", ".join(f"strategy.{name}" for name in self.open_axes)
            remedy = f"'{OPEN.value}' leaves it to a sampler: use --sampler nsga2, or give values"
            raise SpaceError(f"{self.name}: {where}: {remedy}")

    @property
    def system(self) -> SystemSpec:
        """The system, where there is one."""
        if len(self.systems) != 1:
            remedy = "one, such as --set 'system={cluster: NAME, num_chips: N}'"
            raise SpaceError(
                f"{self.name}: system: a configuration has one; got {len(self.systems)}; accepted {remedy}"
            )
        return self.systems[0]

    def strategy(self) -> Strategy:
        """The one strategy of a configuration; SpaceError names the axes that have more."""
        self.refuse_open()
        wide = [f"{name} ({len(values)} values)" for name, values in self.axes.items() if len(values) != 1]
        if wide:
            raise SpaceError(f"{self.name}: strategy: a configuration has one value per key; got {', '.join(wide)}")
        return strategy_of({name: values[0] for name, values in self.axes.items()})

    def resolved_yaml(self) -> str:
        """The space with nothing left to look up or to default; loads back to an equal one."""
        systems: list[Plain] = [{"spec": plain(system)} for system in self.systems]
        content: dict[str, Plain] = {
            "name": self.name,
            "model": plain(self.model),
            "system": systems[0] if len(systems) == 1 else systems,
            "workload": plain(self.workload),
            "strategy": dict(write_axes(self.axes)),
            "objectives": {o.column: "minimise" if o.minimise else "maximise" for o in self.objectives},
            "constraints": [constraint.expression.text for constraint in self.constraints],
            "search": plain(self.options),
            "reference": {name: dict(_write_point(point)) for name, point in self.references.items()},
        }
        if self.fusion_rules:
            content["fusion_rules"] = write_fusion_rules(self.fusion_rules)
        return yaml_text(content)


def shipped_spaces(*, answers: bool = False) -> list[str]:
    """Names that `load_space` takes without a path; or those of models that answer."""
    files = spaces.SPACES.glob("*.yaml")
    return sorted(p.stem for p in files if bool(ANSWERS.search(p.read_text(encoding="utf-8"))) is answers)


def load_space(path: str | Path, overrides: Sequence[str] = ()) -> Space:
    """The space in a file, or the shipped one of that name, with `KEY=VALUE` overrides (dotted keys, YAML values)."""
    return _space(*read_space(path, overrides))


def read_space(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Document, Path, str]:
    """The document that `path` means, with overrides; where its relative paths start, and its name."""
    file = Path(path)
    if not file.exists() and str(path) == file.name and not file.suffix:
        names = sorted([*shipped_spaces(), *shipped_spaces(answers=True)])
        if str(path) not in names:
            near = get_close_matches(str(path), names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SpaceError(f"{path}: no such file or shipped space{hint}; accepted a path, {', '.join(names)}")
        file = spaces.SPACES / f"{path}.yaml"
    return overridden(read_document(file), overrides), file.parent, file.stem


def parse_space(text: str, source: str = "space", folder: Path = Path(), overrides: Sequence[str] = ()) -> Space:
    """The space in a text; `folder` is where its relative paths start."""
    return _space(overridden(parse_document(text, source), overrides), folder, Path(source).stem)


def overridden(document: Document, overrides: Sequence[str]) -> Document:
    """The document with `KEY=VALUE` texts put in."""
    if not isinstance(document.value, dict):
        accepted = ", ".join(KEYS)
        raise document.error((), "a space must be a mapping", document.value, f"a mapping with the keys {accepted}")
    for text in overrides:
        key, equals, value = text.partition("=")
        parts: Key = tuple(key.strip().split("."))
        if not equals or not all(parts):
            raise SpaceError(f"--set {text}: an override must be KEY=VALUE; accepted one such as strategy.tp=[1,2]")
        parsed = parse_document(value, f"--set {key.strip()}").value
        document = document.with_value(parts, parsed, "--set")
    return document


def refuse_requests(document: Document) -> None:
    """SpaceError where a space asks how a model answers, not how it trains."""
    workload = document.get(("workload",))
    if isinstance(workload, dict) and "phase" in workload:
        rule = "a model that answers is priced by search infer, and searched by search launch"
        raise document.error(("workload", "phase"), rule, workload["phase"], "seq and global_batch, which train")


def _space(document: Document, folder: Path, stem: str) -> Space:
    refuse_requests(document)
    given = document.mapping((), KEYS)
    for key in ("model", "system", "workload"):
        if given.get(key) is None:
            raise document.error((key,), "is required, but absent", accepted=f"a line '{key}: ...'")
    document = replace(document, fusion_rules=read_fusion_rules(document, folder))
    axes, model = read_axes(document, ("strategy",)), read_model(document, folder)
    references = _references(document, axes)
    _check_layouts(document, model)
    return Space(
        name=read_name(document, stem),
        model=model,
        systems=read_systems(document, folder),
        workload=_workload(document, model),
        axes=axes,
        objectives=_objectives(document),
        constraints=_constraints(document),
        options=_options(document),
        references=references,
        fusion_rules=document.fusion_rules,
    )


def read_name(document: Document, stem: str) -> str:
    """Of the run: the file's name where it says none."""
    value = document.mapping(()).get("name", stem)
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise document.error(("name",), "must be letters, digits, '.', '_' and '-'", value, "a name such as llama3_70b")
    return value


def read_model(document: Document, folder: Path, phases: Sequence[str] = ("train",)) -> ModelSpec:
    """Built from a description, or captured (in the first of `phases`); a run's own space holds the text of its graph.

    A graph that was captured before must be of one of `phases`.
    """
    key: Key = ("model",)
    value = document.get(key)
    if _is_captured(document):
        return _captured(document, folder, phases[0])
    try:
        if isinstance(value, dict) and set(value) == {"graph"}:
            return read_graph("model.graph", str(value["graph"]))
        if isinstance(value, dict):
            return model_from_mapping(value)
        if isinstance(value, str):
            known = os.path.exists(spaces.MODELS / f"{value}.yaml")  # Path.exists raises on a name too long
            model = load_model(value if known else str(beside(folder, value) or value), [spaces.MODELS])
            if isinstance(model, CapturedModel) and model.captured.phase not in phases:
                law = f"is a graph of phase {model.captured.phase}"
                raise document.error(key, law, value, f"one that was captured with --phase {phases[0]}")
            return model
    except SpaceError:
        raise
    except ValueError as error:
        raise refused(document, key, error) from None
    raise document.error(key, "must be a name, a path or a mapping", value, "a name of search catalog models")


def _is_captured(document: Document) -> bool:
    value = document.get(("capture",))
    if value is not None and not isinstance(value, bool):
        raise document.error(("capture",), "must be true or false", value, "true beside the path of a config.json")
    return value is True


def _captured(document: Document, folder: Path, phase: str) -> CapturedModel:
    from capture.model import capture_model

    value = document.get(("model",))
    if not isinstance(value, str):
        raise document.error(("model",), "must be the path of a config.json beside capture: true", value)
    try:
        return capture_model(beside(folder, value) or value, phase=phase)
    except ValueError as error:
        raise refused(document, ("model",), error) from None


def _workload(document: Document, model: ModelSpec) -> Workload:
    given = document.mapping(("workload",), [f.name for f in fields(Workload)])
    sizes = ("seq", "global_batch")
    for name in sizes:
        if given.get(name) is None:
            raise document.error(("workload", name), "is required, but absent", accepted=f"a line '{name}: ...'")
    counts = {n: whole(document, ("workload", n), given[n], 1, MAX_TOKENS) for n in sizes}
    key: Key = ("workload", "routing_skew")
    skew = given.get("routing_skew", 0.0)
    if not isinstance(skew, int | float) or isinstance(skew, bool):
        raise document.error(key, "must be a number", skew, "0 (balanced), 0.3")
    try:
        workload = Workload(**counts, routing_skew=float(skew))
        Routing.of(model, workload)
    except ValueError as error:
        raise document.error(key, str(error), skew, "0 (balanced), 0.3") from None
    return workload


def _objectives(document: Document) -> tuple[Objective, ...]:
    key: Key = ("objectives",)
    value = document.mapping(()).get("objectives", ["step_time_s", "peak_memory_bytes"])
    if not isinstance(value, list | dict) or not 1 <= len(value) <= MAX_OBJECTIVES:
        rule = f"must name 1 to {MAX_OBJECTIVES} columns"
        raise document.error(key, rule, value, "[step_time_s, peak_memory_bytes], {mfu: maximise}")
    columns = [c.name for c in COLUMNS if c.better]
    found = []
    for i, name in enumerate(value):
        at: Key = (*key, name if isinstance(value, dict) else i)  # type: ignore[arg-type]  # a mapping's key is text
        if name in BAND_NAMES:
            raise document.error(at, BAND_IS_TOLD, name, BAND_NAMES[str(name)])
        known = column(member(document, at, name, columns))
        direction = value[known.name] if isinstance(value, dict) else known.better
        minimise = DIRECTIONS[member(document, at, direction, list(DIRECTIONS))]
        found.append(Objective(column=known.name, minimise=minimise))
    if len({o.column for o in found}) != len(found):
        raise document.error(key, "a column must appear once", value)
    return tuple(found)


def _constraints(document: Document) -> tuple[Constraint, ...]:
    value = document.mapping(()).get("constraints", [])
    if not isinstance(value, list):
        raise document.error(("constraints",), "must be a list", value, "['step_time_s <= 40']")
    found = []
    for i, text in enumerate(value):
        key: Key = ("constraints", i)
        if not isinstance(text, str):
            raise document.error(key, "must be an expression", text, "'step_time_s <= 40'")
        try:
            found.append(Constraint.parse(text))
        except SpaceError as error:
            raise document.error(key, str(error)) from None
    return tuple(found)


def _options(document: Document) -> SearchOptions:
    key: Key = ("search",)
    given = document.mapping(key, [f.name for f in fields(SearchOptions)])
    highs = {"block_size": 10**7, "max_candidates": 10**18, "workers": 10**5, "seed": 2**32 - 1, "trials": 10**7,
             "seconds": 10**8}  # fmt: skip
    values: dict[str, object] = {}
    for name, value in given.items():
        at: Key = (*key, name)
        if name == "sampler":
            values[name] = Sampler(member(document, at, value, [s.value for s in Sampler]))
        elif name == "keep":
            values[name] = Keep(member(document, at, value, [k.value for k in Keep]))
        elif value is not None or name == "seed":
            values[name] = whole(document, at, value, 0 if name == "seed" else 1, highs[name])
    return SearchOptions(**values)  # type: ignore[arg-type]  # checked above


def _references(document: Document, axes: Mapping[str, tuple[object, ...]]) -> dict[str, Strategy]:
    """Named points. They take the space's fixed values, and Strategy's defaults where the space is open."""
    fixed = {name: values[0] for name, values in axes.items() if len(values) == 1 and OPEN not in values}
    base = axis_values(Strategy()) | fixed
    found = {}
    for name in document.mapping(("reference",)):
        if not NAME.fullmatch(name):
            raise document.error(("reference", name), "a name must be letters, digits, '.', '_' and '-'", name)
        if name.isdecimal():
            raise document.error(("reference", name), "a name must not be a number: RUN:NUMBER is a row", name)
        if not document.mapping(("reference", name)):
            raise document.error(("reference", name), "must hold at least one key of a strategy", accepted="tp: 8")
        found[name] = read_strategy(document, ("reference", name), base)
    return found


def _check_layouts(document: Document, model: ModelSpec) -> None:
    """Holds layout strings against the model's MTP layers, of which layers per chunk say nothing."""
    for place in (("strategy",), *(("reference", name) for name in document.mapping(("reference",)))):
        value = document.get((*place, "layout"))
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and "L" in text and layers_of(text)[1] != model.num_mtp_layers:
                rule = f"a layout string must hold the model's MTP layers (m) {model.num_mtp_layers} times"
                raise document.error((*place, "layout"), rule, text)


def _write_point(point: Strategy) -> dict[str, Plain]:
    return write_axes({name: (value,) for name, value in axis_values(point).items()})
