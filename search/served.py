"""Spaces of models that answer: which deployments, batches and formats may be chosen, for which requests.

The file format of search/space.py with requests as its workload and the keys of a deployment as its strategy. Knows
nothing of which points are legal or what they cost.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from estimator.captured import CapturedModel
from estimator.inference.deployment import SERVED_FUSION, Deployment
from estimator.inference.formats import ACTIVATIONS, CACHES, WEIGHTS, Formats
from estimator.inference.result import OF_DECODE, OF_PROMPTS, SERVED_COLUMNS, served_column
from estimator.inference.workload import MOST_TOKENS, Requests, ServingPhase
from estimator.model import ModelSpec
from estimator.strategy import CudaGraph, OwnFusion
from hardware.system import SystemSpec
from search.axes import AXES, Axis, member, read_axis, whole
from search.expression import SERVED_TEXTS, Expression
from search.fusion_rules import read_fusion_rules, write_fusion_rules
from search.objective import MAX_OBJECTIVES, Objective
from search.plain import plain
from search.space import DIRECTIONS, NAME, overridden, read_model, read_name, read_space
from search.systems import read_systems
from search.yaml_lines import Document, Key, Plain, SpaceError, parse_document
from search.yaml_text import yaml_text

__all__ = ["POINT_NUMBERS", "SERVED_AXES", "SERVED_NAMES", "ServedPoint", "ServedSpace", "answers", "load_served",
           "parse_served", "read_served"]  # fmt: skip

KEYS = (
    "name", "model", "capture", "system", "workload", "strategy", "fusion_rules", "objectives", "constraints",
    "reference",
)  # fmt: skip
REQUESTS = ("phase", "batch", "context", "output", "max_context", "routing_skew", "acceptance")
OBJECTIVES = {
    ServingPhase.PREFILL: ("time_to_first_token_s", "tokens_per_s_per_gpu"),
    ServingPhase.DECODE: ("time_per_output_token_s", "tokens_per_s_per_gpu"),
}
MOST_DRAFTS = 64
_OF_TRAINING = {axis.name: axis for axis in AXES}


def _read_graph(document: Document, key: Key, value: Plain) -> object:
    if value is None:
        return None
    return CudaGraph(member(document, key, value, [scope.value for scope in CudaGraph]))


def _write_graph(value: object) -> Plain:
    return value.value if isinstance(value, CudaGraph) else None


def _words(name: str, known: Sequence[str]) -> Axis:
    return Axis(name=name, read=lambda d, k, v: member(d, k, v, list(known)), write=str)


SERVED_AXES: tuple[Axis, ...] = (
    *(_OF_TRAINING[name] for name in ("tp", "pp", "ep", "etp")),
    _words("weights", WEIGHTS),
    _words("activations", ACTIVATIONS),
    _words("kv_cache", CACHES),
    Axis(name="cuda_graph", read=_read_graph, write=_write_graph),
    Axis(name="fusion", read=_OF_TRAINING["fusion"].read, write=_OF_TRAINING["fusion"].write, is_list=True),
    Axis(name="overlap_ep", read=_OF_TRAINING["sequence_parallel"].read, write=bool),
    Axis(name="absorb", read=_OF_TRAINING["sequence_parallel"].read, write=bool),
    _OF_TRAINING["redundant_experts"],
    Axis(name="drafts", read=lambda d, k, v: whole(d, k, v, 0, MOST_DRAFTS), write=_OF_TRAINING["tp"].write),
    Axis(name="chunk", read=lambda d, k, v: whole(d, k, v, 0, MOST_TOKENS), write=_OF_TRAINING["tp"].write),
)
"""Every choice of a deployment, in the canonical order; the batch stands before them all."""
BATCH = Axis(name="batch", read=lambda d, k, v: whole(d, k, v, 1, MOST_TOKENS), write=_OF_TRAINING["tp"].write)
DEFAULTS: dict[str, object] = {
    "tp": 1, "pp": 1, "ep": 1, "etp": 1, "weights": "bf16", "activations": "bf16", "kv_cache": "bf16",
    "cuda_graph": None, "fusion": SERVED_FUSION, "overlap_ep": False, "absorb": True, "redundant_experts": 0,
    "drafts": 0, "chunk": 0,
}  # fmt: skip
POINT_NUMBERS = ("tp", "pp", "ep", "etp", "dp", "batch", "context", "output", "overlap_ep", "absorb",
                 "redundant_experts", "drafts", "chunk", "routing_skew", "acceptance")  # fmt: skip
SERVED_NAMES = (*(c.name for c in SERVED_COLUMNS), *POINT_NUMBERS, *SERVED_TEXTS)
"""What expressions may look at."""


class ServedPoint(NamedTuple):
    """One candidate. ValueError of `deployment` where its formats do not go together."""

    system: SystemSpec
    batch: int
    values: Mapping[str, Any]

    @property
    def deployment(self) -> Deployment:
        """What the estimator takes."""
        v = dict(self.values)
        formats = Formats(**{name: v.pop(name) for name in ("weights", "activations", "kv_cache")})
        return Deployment(formats=formats, **v)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSpace:
    """Everything a search needs to know. Equal spaces give equal fronts."""

    name: str
    model: ModelSpec
    systems: tuple[SystemSpec, ...]
    phase: ServingPhase
    batches: tuple[int, ...]
    context: int
    output: int
    routing_skew: float
    acceptance: float
    max_context: int  # tokens of a sequence that the model was made for; 0: not known
    axes: Mapping[str, tuple[object, ...]]
    objectives: tuple[Objective, ...]
    constraints: tuple[Expression, ...] = ()
    references: Mapping[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    fusion_rules: tuple[OwnFusion, ...] = ()  # kernels beside the shipped ones

    @property
    def raw_size(self) -> int:
        """Points before any rule."""
        return len(self.systems) * len(self.batches) * math.prod(len(values) for values in self.axes.values())

    @property
    def notices(self) -> tuple[str, ...]:
        """What is priced as asked, though the model was not made for it."""
        longest = self.requests(1).longest
        if not self.max_context or longest <= self.max_context:
            return ()
        return (f"context and output ({longest} tokens) are beyond the {self.max_context} that the model was made for",)

    def requests(self, batch: int) -> Requests:
        """What is asked of a candidate."""
        return Requests(phase=self.phase, batch=batch, context=self.context, output=self.output,
                        routing_skew=self.routing_skew, acceptance=self.acceptance)  # fmt: skip

    def point(self, number: int) -> ServedPoint:
        """The candidate of a canonical index: systems, batches, axes, of which the last varies fastest."""
        values: dict[str, Any] = {}
        for name in reversed(tuple(self.axes)):
            number, place = divmod(number, len(self.axes[name]))
            values[name] = self.axes[name][place]
        number, batch = divmod(number, len(self.batches))
        return ServedPoint(self.systems[number], self.batches[batch], values)

    def deployments(self) -> Iterator[list[int]]:
        """Every deployment on every system: its candidates, smallest batch first."""
        num = math.prod(len(values) for values in self.axes.values())
        order = sorted(range(len(self.batches)), key=lambda i: self.batches[i])
        for system, deployment in itertools.product(range(len(self.systems)), range(num)):
            yield [(system * len(self.batches) + batch) * num + deployment for batch in order]

    def named(self, name: str) -> ServedPoint:
        """A point of interest, on the one system."""
        if name not in self.references:
            raise SpaceError(f"{self.name}: reference: no point is called {name!r}; have {', '.join(self.references)}")
        batch, values = self.references[name]
        return ServedPoint(self._one_system(), batch, values)

    def one(self) -> ServedPoint:
        """The one candidate of a configuration; SpaceError names the keys that have more."""
        wide = [f"strategy.{name}" for name, values in self.axes.items() if len(values) > 1]
        wide += ["workload.batch"] if len(self.batches) > 1 else []
        if wide:
            hint = f"; name a point with --reference ({', '.join(self.references)})" if self.references else ""
            raise SpaceError(f"{self.name}: {', '.join(wide)}: a configuration has one value per key{hint}")
        self._one_system()
        return self.point(0)

    def _one_system(self) -> SystemSpec:
        if len(self.systems) > 1:
            rule = f"a configuration has one; got {len(self.systems)}"
            raise SpaceError(f"{self.name}: system: {rule}; accepted --set 'system={{cluster: NAME, num_chips: N}}'")
        return self.systems[0]

    def resolved_yaml(self) -> str:
        """The space with nothing left to look up or to default; loads back to an equal one."""
        systems: list[Plain] = [{"spec": plain(system)} for system in self.systems]
        batches: list[Plain] = [*self.batches]
        own = {"fusion_rules": write_fusion_rules(self.fusion_rules)} if self.fusion_rules else {}
        return yaml_text(own | {
            "name": self.name, "model": plain(self.model), "system": systems[0] if len(systems) == 1 else systems,
            "workload": {"phase": self.phase.value, "batch": batches[0] if len(batches) == 1 else batches,
                         "context": self.context, "output": self.output, "max_context": self.max_context or None,
                         "routing_skew": self.routing_skew, "acceptance": self.acceptance},
            "strategy": {axis.name: _written(axis, self.axes[axis.name]) for axis in SERVED_AXES},
            "objectives": {o.column: "minimise" if o.minimise else "maximise" for o in self.objectives},
            "constraints": [constraint.text for constraint in self.constraints],
            "reference": {
                name: {"batch": batch, **{axis.name: axis.write(values[axis.name]) for axis in SERVED_AXES}}
                for name, (batch, values) in self.references.items()
            },
        })  # fmt: skip


def _written(axis: Axis, values: tuple[object, ...]) -> Plain:
    plain_values = [axis.write(value) for value in values]
    return plain_values[0] if len(values) == 1 else plain_values


def answers(path: str | Path, overrides: Sequence[str] = ()) -> bool:
    """Whether a space asks how a model answers: its workload has a phase."""
    return _answers(read_space(path, overrides)[0])


def _answers(document: Document) -> bool:
    workload = document.get(("workload",))
    return isinstance(workload, dict) and "phase" in workload


def _refuse_training(document: Document) -> None:
    """SpaceError where a space asks how a model trains; where it has a phase as well, the key is simply unknown."""
    workload = document.get(("workload",))
    if isinstance(workload, dict) and "phase" not in workload:
        for key in ("seq", "global_batch"):
            if key in workload:
                rule = "a model that trains is priced by search estimate, and searched by search launch"
                raise document.error(("workload", key), rule, workload[key], "phase, batch and context, which answer")


def load_served(path: str | Path, overrides: Sequence[str] = (), *, judged: bool = True) -> ServedSpace:
    """The space in a file, or the shipped one of that name, with `KEY=VALUE` overrides."""
    return read_served(*read_space(path, overrides), judged=judged)


def parse_served(
    text: str, source: str = "space", folder: Path = Path(), overrides: Sequence[str] = ()
) -> ServedSpace:  # fmt: skip
    """The space in a text; `folder` is where its relative paths start."""
    return read_served(overridden(parse_document(text, source), overrides), folder, Path(source).stem)


def read_served(document: Document, folder: Path, stem: str, *, judged: bool = True) -> ServedSpace:
    """The space in a document. `judged`: by objectives, which must have values then; one deployment is only told."""
    given = document.mapping((), KEYS)
    for key in ("model", "system", "workload"):
        if given.get(key) is None:
            raise document.error((key,), "is required, but absent", accepted=f"a line '{key}: ...'")
    _refuse_training(document)
    document = replace(document, fusion_rules=read_fusion_rules(document, folder))
    asked, batches, max_context = _requests(document)
    phase = asked.phase
    axes = _axes(document, ("strategy",), DEFAULTS)
    phases = ("prefill", "train", *(("decode",) if phase is ServingPhase.DECODE else ()))
    model = read_model(document, folder, phases)
    return ServedSpace(
        name=read_name(document, stem), model=model, systems=read_systems(document, folder), phase=phase,
        batches=batches, context=asked.context, output=asked.output, axes=axes, routing_skew=asked.routing_skew,
        acceptance=asked.acceptance,
        max_context=_told_longest(document, folder) if max_context is None else max_context,
        objectives=_objectives(document, phase, model, judged=judged),
        constraints=_constraints(document), references=_references(document, axes, batches),
        fusion_rules=document.fusion_rules,
    )  # fmt: skip


def _told_longest(document: Document, folder: Path) -> int:
    """Most tokens of a sequence by the config.json that the model is read from; 0 where nothing tells."""
    value = document.get(("model",))
    if not isinstance(value, str):
        return 0
    beside = folder / value
    path = beside if os.path.exists(beside) else Path(value)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        return 0
    content = json.loads(path.read_text(encoding="utf-8"))  # which read_model has read before
    for part in (content, content.get("text_config")):
        told = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(told, int) and not isinstance(told, bool) and told > 0:
            return told
    return 0


def _requests(document: Document) -> tuple[Requests, tuple[int, ...], int | None]:
    """What is asked, of the first batch; all batches; how long a sequence the model was made for, where it is told."""
    given = document.mapping(("workload",), REQUESTS)
    phases = [phase.value for phase in ServingPhase]
    phase = ServingPhase(member(document, ("workload", "phase"), given.get("phase"), phases))
    for name in ("batch", "context"):
        if given.get(name) is None:
            raise document.error(("workload", name), "is required, but absent", accepted=f"a line '{name}: ...'")
    batches = read_axis(document, BATCH, ("workload", "batch"), given["batch"])
    context = whole(document, ("workload", "context"), given["context"], 1, MOST_TOKENS)
    output = whole(document, ("workload", "output"), given.get("output", 1), 1, MOST_TOKENS)
    told = given.get("max_context")
    max_context = None if told is None else whole(document, ("workload", "max_context"), told, 1, MOST_TOKENS)
    numbers = tuple(int(b) for b in batches if isinstance(b, int))
    asked = Requests(phase=phase, batch=numbers[0], context=context, output=output)
    for name in ("routing_skew", "acceptance"):
        usual = getattr(asked, name)
        value = given.get(name, usual)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise document.error(("workload", name), "must be a number", value, f"{usual}")
        try:
            asked = asked.but(name, float(value))
        except ValueError as error:
            raise document.error(("workload", name), str(error), value, f"{usual}") from None
    return asked, numbers, max_context


def _axes(document: Document, key: Key, defaults: Mapping[str, object]) -> dict[str, tuple[object, ...]]:
    known = [axis.name for axis in SERVED_AXES]
    given = document.mapping(key)
    for name, value in given.items():
        if name == "dp":
            rule = "dp is what remains, num_chips / (tp * pp)"
            raise document.error((*key, name), rule, value, "a constraint such as 'dp == 8'")
        if name in known:
            continue
        if name in {str(axis.key[0]) for axis in AXES}:
            rule = f"{name} is of training; a model that answers has no such choice"
            raise document.error((*key, name), rule, value, ", ".join(known))
        raise document.unknown((*key, name), known)
    return {
        axis.name: read_axis(document, axis, (*key, axis.name), given[axis.name])
        if axis.name in given
        else (defaults[axis.name],)
        for axis in SERVED_AXES
    }


def _objectives(
    document: Document, phase: ServingPhase, model: ModelSpec, *, judged: bool
) -> tuple[Objective, ...]:  # fmt: skip
    value = document.mapping(()).get("objectives", list(OBJECTIVES[phase]))
    if not isinstance(value, list | dict) or not 1 <= len(value) <= MAX_OBJECTIVES:
        rule = f"must name 1 to {MAX_OBJECTIVES} columns"
        raise document.error(("objectives",), rule, value, f"{list(OBJECTIVES[phase])}")
    absent = OF_DECODE if phase is ServingPhase.PREFILL else frozenset[str]()
    if isinstance(model, CapturedModel) and model.captured.phase == "decode":
        absent = OF_PROMPTS
    columns = [c.name for c in SERVED_COLUMNS if not judged or c.name not in absent]
    found = []
    for i, name in enumerate(value):
        at: Key = ("objectives", str(name) if isinstance(value, dict) else i)
        known = served_column(member(document, at, name, columns))
        direction = value[known.name] if isinstance(value, dict) else known.better
        minimise = DIRECTIONS[member(document, at, direction, list(DIRECTIONS))]
        found.append(Objective(column=known.name, minimise=minimise))
    if len({o.column for o in found}) != len(found):
        raise document.error(("objectives",), "a column must appear once", value)
    return tuple(found)


def _constraints(document: Document) -> tuple[Expression, ...]:
    value = document.mapping(()).get("constraints", [])
    if not isinstance(value, list):
        raise document.error(("constraints",), "must be a list", value, "['time_per_output_token_s <= 0.05']")
    found = []
    for i, text in enumerate(value):
        key: Key = ("constraints", i)
        try:
            expression = Expression.parse(text, SERVED_NAMES)  # type: ignore[arg-type]  # refuses what is no text
        except SpaceError as error:
            raise document.error(key, str(error)) from None
        if not expression.is_logical:
            raise document.error(key, "must compare", text, "'time_per_output_token_s <= 0.05'")
        found.append(expression)
    return tuple(found)


def _references(
    document: Document, axes: Mapping[str, tuple[object, ...]], batches: tuple[int, ...]
) -> dict[str, tuple[int, Mapping[str, Any]]]:  # fmt: skip
    """Named points. They take the space's fixed values, and defaults where the space is open."""
    base = DEFAULTS | {name: values[0] for name, values in axes.items() if len(values) == 1}
    found: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for name in document.mapping(("reference",)):
        key: Key = ("reference", name)
        if not NAME.fullmatch(name) or name.isdecimal():
            raise document.error(key, "a name must be letters, digits, '.', '_' and '-', and no number", name)
        given = document.mapping(key)
        number = whole(document, (*key, "batch"), given.get("batch", batches[0]), 1, MOST_TOKENS)
        rest = {k: v for k, v in given.items() if k != "batch"}
        alone = replace(document.with_value(key, rest, document.place(key)), fusion_rules=document.fusion_rules)
        read = _axes(alone, key, base)
        if wide := [n for n, v in read.items() if len(v) > 1]:
            raise document.error((*key, wide[0]), "a named point has one value per key", given[wide[0]])
        found[name] = number, {n: v[0] for n, v in read.items()}
    return found
