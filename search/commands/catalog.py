"""`search catalog`: chips, clusters, software, models and spaces that are known by name, with their sources."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import spaces
from estimator.model import ModelSpec
from estimator.model_io import load_model, model_names
from hardware.catalog import (
    Row,
    chip,
    chip_names,
    cluster,
    cluster_names,
    describe_chip,
    describe_cluster,
)
from hardware.software import software, software_names
from hardware.units import GB, GIB, TFLOPS, format_count
from results.report.text import WIDTH, clip, columns, counted, hanging
from search.commands.answer import answer
from search.served import load_served
from search.space import load_space, shipped_spaces
from search.yaml_lines import read_document

__all__ = ["run"]

Cells = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Lists one kind, or describes one of its members."""
    if args.name is not None:
        rows = _DESCRIBE[args.kind](args.name)
        data = {"name": args.name, "fields": [row._asdict() for row in rows]}
        answer(args, text=_described(rows), data=data)
        return 0
    entries = _LIST[args.kind]()
    answer(args, text=_listed(entries), data={args.kind: entries})
    return 0


def _described(rows: tuple[Row, ...]) -> str:
    width = max(len(row.field) for row in rows)
    lines: list[str] = []
    for row in rows:
        lines += hanging(f"{row.field:<{width}}  ", row.value)
        lines += hanging(" " * (width + 4) + "source: ", row.source) if row.source else []
    return "\n".join(lines) + "\n"


WORDS = {"layers", "references", "tiers"}  # last columns, of as many lines as they need
OWN_PAGE = {"vendor", "num_layers", "num_heads", "vocab"}  # told by --json and by a chip's or a model's own page


def _listed(entries: list[Cells]) -> str:
    names = [name for name in entries[0] if name not in OWN_PAGE]
    titles = [" ".join(filter(None, (_stem(name).replace("_", " "), _unit(name)[0]))) for name in names]
    words = names.pop() if names[-1] in WORDS else None
    header, rule, *lines = columns(titles[: len(names)], [[_cell(n, entry[n]) for n in names] for entry in entries])
    if words is None:
        return "\n".join([header, rule, *lines]) + "\n"
    start = len(rule) + 2
    told = [hanging(f"{line:<{start}}", str(entry[words])) for line, entry in zip(lines, entries, strict=True)]
    table = [f"{header:<{start}}{titles[-1]}", "-" * WIDTH, *(line.rstrip() for part in told for line in part)]
    return "\n".join(table) + "\n"


_UNITS = {
    "_bytes_per_s": ("GB/s", GB),
    "_flops_per_s": ("TFLOPS", TFLOPS),
    "_bytes": ("GiB", GIB),
    "_w": ("W", 1.0),
    "_usd_per_hour": ("USD/h", 1.0),
}
"""Unit of a column by the ending of its name, which stands in the title, and its size."""


def _unit(name: str) -> tuple[str, float]:
    return next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), ("", 0.0))


def _stem(name: str) -> str:
    return next((name.removesuffix(ending) for ending in _UNITS if name.endswith(ending)), name.removeprefix("num_"))


def _cell(name: str, value: Any) -> str:  # noqa: ANN401 - cells are of any plain type
    _, size = _unit(name)
    if value is None or (size and not value):
        return "-"
    if size:
        return f"{value / size:,.0f}" if value >= 10 * size else f"{value / size:.3g}"
    if isinstance(value, list):
        return value[0] if len(value) == 1 else f"{value[0]} and {len(value) - 1} more"
    return format_count(value) if isinstance(value, int) and value >= 10**6 else clip(str(value), 30)


def _chips() -> list[Cells]:
    from hardware.dtype import DType

    found = []
    for name in chip_names():
        spec = chip(name)
        half = spec.matrix_flops_per_s.get(DType.BF16, spec.matrix_flops_per_s.get(DType.FP16))
        found.append(
            {
                "name": name,
                "vendor": spec.vendor,
                "hbm_bytes": spec.hbm_bytes,
                "hbm_bytes_per_s": spec.hbm_bytes_per_s,
                "half_flops_per_s": half,
                "fp8_flops_per_s": spec.matrix_flops_per_s.get(DType.FP8),
                "host_bytes_per_s": spec.host_bytes_per_s,
                "tdp_w": spec.tdp_w,
                "price_usd_per_hour": spec.price_usd_per_hour,
            }
        )
    return found


def _clusters() -> list[Cells]:
    systems = [(name, cluster(name)) for name in cluster_names()]
    return [
        {
            "name": name,
            "chip": system.chip.name,
            "num_chips": system.num_chips,
            "chips_per_node": system.chips_per_node,
            "tiers": ", ".join(f"{t.name} {t.link.bytes_per_s / GB:.0f}" for t in system.tiers) + " GB/s",
        }
        for name, system in systems
    ]


def _models() -> list[Cells]:
    found = []
    for name in model_names([spaces.MODELS]):
        model = load_model(name, [spaces.MODELS])
        found.append(
            {
                "name": name,
                "parameters": model.num_parameters(),
                "active_parameters": model.num_active_parameters(),
                "num_layers": model.num_layers,
                "hidden": model.hidden,
                "num_heads": model.num_heads,
                "num_experts": model.moe.num_experts if model.moe else None,
                "vocab": model.vocab,
                "layers": _layers(model),
            }
        )
    return found


def _layers(model: ModelSpec) -> str:
    """How many of each kind, the most frequent first."""
    kinds = Counter(layer.name for layer in model.layer_specs)
    return ", ".join(f"{number} {name}" for name, number in kinds.most_common())


def _spaces() -> list[Cells]:
    found = []
    for name in shipped_spaces(answers=True):
        served = load_served(name)
        found.append(
            {
                "name": name,
                "model": served.model.name,
                "num_chips": max(system.num_chips for system in served.systems),
                "systems": [*dict.fromkeys(system.name for system in served.systems)],
                "raw_size": served.raw_size,
                "references": ", ".join(served.references),
            }
        )
    for name in shipped_spaces():
        space = load_space(name)
        found.append(
            {
                "name": name,
                "model": space.model.name,
                "num_chips": max(system.num_chips for system in space.systems),
                "systems": [*dict.fromkeys(system.name for system in space.systems)],
                "raw_size": space.raw_size,
                "references": ", ".join(space.references),
            }
        )
    return sorted(found, key=lambda entry: str(entry["name"]))


def _describe_model(name: str) -> tuple[Row, ...]:
    model = load_model(name, [spaces.MODELS])
    file = spaces.MODELS / f"{name}.yaml"
    source = str(read_document(file).mapping(()).get("source", "")) if file.is_file() else str(name)
    rows = [Row("parameters", f"{model.num_parameters():,}", "counted from the fields below")]
    rows.append(Row("active parameters", f"{model.num_active_parameters():,}", "what one token meets, without MTP"))
    flat = [Row(key, value, "") for key, value in _flat(model, "")]
    return (Row("name", model.name, source), *rows, *(row for row in flat if row.field != "name"))


def _flat(spec: Any, prefix: str) -> list[tuple[str, str]]:  # noqa: ANN401 - a dataclass
    lines: list[tuple[str, str]] = []
    for item in fields(spec):
        value = getattr(spec, item.name)
        if is_dataclass(value):
            lines += _flat(value, f"{prefix}{item.name}.")
        else:
            lines.append((prefix + item.name, str(value.value if isinstance(value, Enum) else value)))
    return lines


def _software() -> list[Cells]:
    return [
        {"name": known.name, "dense ms": known.dense_layer_s * 1e3, "routed ms": known.routed_layer_s * 1e3,
         "attention": ", ".join(f"{chip} {share:.0%}" for chip, share in known.attention_share.items()) or "the chip's"}
        for known in map(software, software_names())
    ]  # fmt: skip


def _describe_software(name: str) -> tuple[Row, ...]:
    known = software(name)
    told = {
        "dense_layer_s": f"{known.dense_layer_s * 1e3:g} ms", "routed_layer_s": f"{known.routed_layer_s * 1e3:g} ms",
        "attention_share": ", ".join(f"{chip} {share:.1%}" for chip, share in known.attention_share.items()),
    }  # fmt: skip
    rows = (Row(field, told[field], source) for field, source in known.sources.items())
    return (Row("name", known.name, ""), *rows)


def _describe_served(name: str) -> tuple[Row, ...]:
    space = load_served(name)
    wide = [(axis, values) for axis, values in space.axes.items() if len(values) > 1]
    return (
        Row("name", space.name, ""),
        Row("model", space.model.name, ""),
        Row("system", ", ".join(f"{s.num_chips} x {s.chip.name} ({s.name})" for s in space.systems), ""),
        Row("requests", f"{space.phase.value}, {space.context} tokens, output {space.output}", ""),
        Row("objectives", ", ".join(o.column for o in space.objectives), ""),
        Row("constraints", "; ".join(c.text for c in space.constraints) or "none", ""),
        Row("raw size", f"{space.raw_size:,}", "product of the axes"),
        Row("batch", f"{len(space.batches)} values", ""),
        *(Row(axis, f"{len(values)} values", "") for axis, values in wide),
    )


def _describe_space(name: str) -> tuple[Row, ...]:
    if name in shipped_spaces(answers=True):
        return _describe_served(name)
    space = load_space(name)
    rows = [
        Row("name", space.name, ""),
        Row("model", space.model.name, ""),
        Row("system", ", ".join(f"{s.num_chips} x {s.chip.name} ({s.name})" for s in space.systems), ""),
        Row(
            "workload",
            f"{counted(space.workload.global_batch, 'sequence')} of {counted(space.workload.seq, 'token')}",
            "",
        ),
        Row("objectives", ", ".join(o.column for o in space.objectives), ""),
        Row("constraints", "; ".join(c.expression.text for c in space.constraints) or "none", ""),
        Row("raw size", f"{space.raw_size:,}", "product of the axes"),
    ]
    wide = [(axis, values) for axis, values in space.axes.items() if len(values) > 1]
    free = (Row(axis, "search", "left to a sampler") for axis in space.open_axes)
    return (*rows, *(Row(axis, f"{len(values)} values", "") for axis, values in wide), *free)


_LIST: Mapping[str, Any] = {
    "chips": _chips, "clusters": _clusters, "software": _software, "models": _models, "spaces": _spaces,
}  # fmt: skip
_DESCRIBE: Mapping[str, Any] = {
    "chips": describe_chip,
    "clusters": describe_cluster,
    "software": _describe_software,
    "models": _describe_model,
    "spaces": _describe_space,
}
