"""Between launch files and configurations: an imported job as a space's YAML, and a configuration as a job to export.

Layout strings become chunks here, and a configuration that is complete is parsed as any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import spaces
from estimator.layout import even_layers
from estimator.model import ModelSpec
from estimator.model_io import load_model, model_from_mapping, model_names
from estimator.rules import Case, check, explain
from estimator.strategy import Strategy
from estimator.workload import Workload
from hardware.system import SystemSpec
from results.launchers import Given, Imported, Job
from results.launchers.settings import Value
from search.axes import AXES, NESTED, axis_values
from search.fold import folded_point
from search.idle import launchable
from search.layout import layers_of, layout_string
from search.plain import plain
from search.space import parse_space
from search.yaml_lines import Key, Plain, SpaceError, parse_document
from search.yaml_text import yaml_text

__all__ = ["Configured", "configured", "given_of", "job_of", "refusal"]

_CHUNKS = ("vpp", "schedule", "layout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """An imported job as the sections of a configuration; None where the file and the command line are silent."""

    imported: Imported
    sections: dict[str, Plain]  # model, system, workload, strategy
    missing: tuple[str, ...]
    idle: tuple[str, ...] = ()  # a line for each choice of the file that has no effect, and is written as off

    @property
    def is_complete(self) -> bool:
        """Whether it can be priced."""
        work = self.sections["workload"]
        assert isinstance(work, dict)
        values = [self.sections["model"], self.sections["system"], work["seq"], work["global_batch"]]
        return all(value is not None for value in values)

    def yaml(self, name: str) -> str:
        """The configuration; what is missing is left out, and told in a comment, as is what was not taken over."""
        told = [
            *((f"missing: {line}") for line in self.missing),
            *(f"assumed: {line}" for line in self.imported.assumed),
            *([f"not taken over: {', '.join(self.left)}"] if self.left else []),
        ]
        head = "".join(f"# {line}\n" for line in (f"imported from {self.imported.framework}", *told))
        work = self.sections["workload"]
        assert isinstance(work, dict)
        kept: dict[str, Plain] = {"name": name}
        kept |= {key: value for key, value in self.sections.items() if value is not None and key != "workload"}
        known: dict[str, Plain] = {key: value for key, value in work.items() if value is not None}
        order = ("name", "model", "system", "workload", "strategy")
        kept |= {"workload": known} if known else {}
        return head + yaml_text({key: kept[key] for key in order if key in kept})

    @property
    def left(self) -> list[str]:
        """What the file says and the configuration does not."""
        return [*self.imported.unknown, *self.imported.unmodelled]


def given_of(model: str | None, num_chips: int | None, arguments: str | None, defined: Mapping[str, str]) -> Given:
    """What the command line adds; ValueError for a model that is not known."""
    layers = None if model is None else load_model(model, [spaces.MODELS]).num_layers
    known = {name: _read(name).num_layers for name in model_names([spaces.MODELS])}
    return Given(num_chips=num_chips, launch_arguments=arguments, defined=defined, num_layers=layers, layers_of=known)


def configured(
    imported: Imported, *, source: str, model: str | None, system: str | None, overrides: Sequence[str] = ()
) -> Configured:
    """The sections of an imported job, with what the command line says on top."""
    missing = list(imported.missing)
    if system is None:
        missing.append("system: a launch file does not name one; give --system NAME (search catalog clusters)")
    strategy = _chunked(dict(imported.strategy), imported, source)
    sections: dict[str, Plain] = {
        "model": model if model is not None else _named(plain(imported.model), source),
        "system": _system(system, imported.num_chips),
        "workload": {"seq": imported.seq, "global_batch": imported.global_batch},
        "strategy": _nested(strategy),
    }
    if overrides:
        sections = _overridden(sections, overrides)
    work = sections["workload"]
    assert isinstance(work, dict)
    met = {"sequence length": work["seq"], "global batch": work["global_batch"], "model": sections["model"]}
    met |= {"system": sections["system"]}
    left = [line for line in missing if met.get(line.partition(":")[0]) is None]
    found = Configured(imported=imported, sections=sections, missing=tuple(left))
    return _settled(found, source) if found.is_complete else found


def _settled(found: Configured, source: str) -> Configured:
    """The configuration with what has no effect written as off, as a search would write it."""
    space = parse_space(found.yaml("imported"), f"{source}, imported", Path(source).parent)
    alone, notices = folded_point(space, space.strategy())
    before, after = axis_values(space.strategy()), axis_values(
        launchable(alone.model, alone.strategy(), alone.system)
    )  # fmt: skip
    strategy = deepcopy(found.sections["strategy"])
    for axis in AXES:
        holder: Plain = strategy
        for key in axis.key[:-1]:
            holder = holder.get(str(key)) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and axis.key[-1] in holder and before[axis.name] != after[axis.name]:
            holder[str(axis.key[-1])] = plain(axis.write(after[axis.name]))
    told = tuple(line for line in notices if not line.startswith("fusion:"))  # which no file chooses one by one
    return replace(found, sections=found.sections | {"strategy": strategy}, idle=told)


def _named(model: Plain, source: str) -> Plain:
    """A description with the name of the shipped model that it describes; ValueError where sizes do not fit."""
    if not isinstance(model, dict):
        return model
    try:
        spec = model_from_mapping(model)
    except ValueError as error:
        raise ValueError(f"{source}: model: {error}") from None
    same = (name for name in model_names([spaces.MODELS]) if _read(name) == replace(spec, name=name))
    return model | {"name": next(same, model["name"])}


@lru_cache(maxsize=1024)
def _read(name: str) -> ModelSpec:
    return load_model(name, [spaces.MODELS])


def _system(name: str | None, num_chips: int | None) -> Plain:
    if name is None:
        return None
    if num_chips is None:
        return name
    key = "file" if name.endswith((".yaml", ".yml")) else "cluster"
    return {key: name, "num_chips": num_chips}


def _overridden(sections: dict[str, Plain], overrides: Sequence[str]) -> dict[str, Plain]:
    """`KEY=VALUE` with dotted keys, as --set of any configuration."""
    document = parse_document(yaml_text(sections), "imported")
    for text in overrides:
        key, equals, value = text.partition("=")
        parts: Key = tuple(key.strip().split("."))
        if equals and all(parts) and parts[0] not in sections:
            raise SpaceError(f"--set {text}: unknown key {parts[0]!r}; accepted keys of {', '.join(sections)}")
        if not equals or not all(parts):
            raise SpaceError(f"--set {text}: an override must be KEY=VALUE; accepted one such as workload.seq=4096")
        document = document.with_value(parts, parse_document(value, f"--set {key.strip()}").value, "--set")
    assert isinstance(document.value, dict)
    return document.value


def _chunked(strategy: dict[str, Value], imported: Imported, source: str) -> dict[str, Value]:
    """The strategy with the chunks that a layout string has; ValueError where they do not suit the pipeline."""
    layout, pp = strategy.get("layout"), strategy["pp"]
    assert isinstance(pp, int)
    if not isinstance(layout, str):
        return strategy
    try:
        layers, _ = layers_of(layout)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    model = imported.model
    if len(layers) % pp:
        raise ValueError(f"{source}: a pipeline layout must have a multiple of pp ({pp}) chunks, but has {len(layers)}")
    if isinstance(model, dict) and sum(layers) != model["num_layers"]:
        number = model["num_layers"]
        raise ValueError(f"{source}: a pipeline layout must hold {number} layers, but holds {sum(layers)}")
    vpp = len(layers) // pp
    if strategy["vpp"] not in (1, vpp):
        told = strategy["vpp"]
        raise ValueError(f"{source}: a layout of {len(layers)} chunks gives {vpp} to each of {pp} ranks, not {told}")
    strategy |= {"vpp": vpp, "schedule": "interleaved" if vpp > 1 else "1f1b"}
    strategy |= {} if vpp > 1 else {"overlap_pp": 0, "interleave_group": 0}  # which only chunks to interleave have
    if pp == 1 and vpp == 1:
        del strategy["layout"]
    return strategy


def _nested(strategy: Mapping[str, Value]) -> dict[str, Plain]:
    """Axes in their order, `overlap_dp` under `overlap` and so on."""
    out: dict[str, Plain] = {}
    for axis in AXES:
        if axis.name not in strategy:
            continue
        value = plain(strategy[axis.name])
        if len(axis.key) == 1:
            out[axis.name] = value
            continue
        holder = out.setdefault(str(axis.key[0]), {})
        assert isinstance(holder, dict)
        assert axis.key[0] in NESTED
        holder[str(axis.key[1])] = value
    return out


def refusal(model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload) -> str:
    """Why a configuration is illegal here; nothing where it is legal."""
    case = Case.of(model, strategy, system, workload)
    code = int(check(case)[0])
    return explain(case, code) if code else ""


def job_of(name: str, model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload) -> Job:
    """A configuration as a launch file needs it; the strategy has its layers.

    A host launches its chips, or as many as whole hosts make up the cluster of.
    """
    chips_per_node = math.gcd(system.parts[0].chips_per_node, system.num_chips)
    values = axis_values(strategy)
    written: dict[str, Value] = {axis.name: _value(axis.write(values[axis.name])) for axis in AXES}
    written["tp_chunks"] = str(strategy.tp_chunks)
    chunks = int(strategy.pp) * int(strategy.vpp)
    even = even_layers(model.num_layers, chunks)
    layers = strategy.layout if isinstance(strategy.layout, tuple) else even
    fields = plain(model)
    assert isinstance(fields, dict)
    fields.pop("notes", None)
    return Job(
        name=name,
        model={key: _value(value) for key, value in fields.items()},
        model_name=_shipped(model),
        num_chips=system.num_chips,
        chips_per_node=chips_per_node,
        seq=workload.seq,
        global_batch=workload.global_batch,
        routing_skew=workload.routing_skew,
        strategy=written,
        layers=layers,
        is_even=len(set(layers)) == 1,
        layout=layout_string(layers, model.num_mtp_layers),
    )


def _value(value: Plain) -> Value:
    return value


def _shipped(model: ModelSpec) -> str:
    """The name under which the model ships, if it is one of those."""
    return model.name if model.name in model_names([spaces.MODELS]) and _read(model.name) == model else ""
