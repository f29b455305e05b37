"""`search infer`: one deployment in full: when the first token comes, how long the others take, what fits."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estimator.inference import InferenceResult
from estimator.inference.step import NEGLECTED, infer
from hardware.units import format_bytes, format_count, format_seconds
from results.report.served import choices, degrees
from results.report.text import columns, counted, format_cell, hanging
from results.store import RunFolder
from search.commands.answer import NOTHING_FEASIBLE, answer
from search.commands.point import model_line, split_named, split_run
from search.served import ServedPoint, ServedSpace, load_served, parse_served
from search.served_remedies import ServedRemedy, served_remedies
from search.served_sweep import described

__all__ = ["remedy_lines", "run"]

OF_WORKLOAD = ("phase", "batch", "context", "output", "routing_skew", "acceptance")


def run(args: argparse.Namespace) -> int:
    """Prices one deployment; exit 3 where it does not fit in memory."""
    space, point = _read(args)
    try:
        result = infer(space.model, point.deployment, point.system, space.requests(point.batch))
    except ValueError as error:
        raise ValueError(f"{args.config}: {error}") from error
    found = [] if result.feasible else served_remedies(space, point)
    answer(args, text=_text(space, point, result, found), data=_data(space, point, result, found))
    return 0 if result.feasible else NOTHING_FEASIBLE


def _read(args: argparse.Namespace) -> tuple[ServedSpace, ServedPoint]:
    """What `CONFIG`, `CONFIG:NAME` or `RUN:ID` means."""
    target, reference = args.config, args.reference
    if reference is None and (named := split_named(target)) is not None:
        target, reference = named
    elif reference is None and (parts := split_run(target)) is not None:
        return _of_run(*parts, target, args.overrides)
    if reference is not None and args.overrides:  # which would make a point of that name
        others = [text for text in args.overrides if not text.startswith(("strategy.", "workload.batch="))]
        load_served(target, others, judged=False).named(reference)
    space = load_served(target, [*args.overrides, *_of_named(args.overrides, reference)], judged=False)
    return space, space.named(reference) if reference is not None else space.one()


def _of_named(overrides: Sequence[str], reference: str | None) -> list[str]:
    """Overrides of a strategy or of the batch are those of the named point as well."""
    if reference is None:
        return []
    mine = [text for text in overrides if text.startswith("strategy.")]
    batches = [text for text in overrides if text.startswith("workload.batch=")]
    return [text.replace("strategy.", f"reference.{reference}.", 1) for text in mine] + [
        text.replace("workload.batch", f"reference.{reference}.batch", 1) for text in batches
    ]


def _of_run(
    folder: RunFolder, row: str, target: str, overrides: Sequence[str]
) -> tuple[ServedSpace, ServedPoint]:  # fmt: skip
    if not folder.answers:
        raise ValueError(f"{target}: a run of training has no deployments; use search estimate {target}")
    space = parse_served(folder.space_yaml, str(Path(folder.path) / "space.yaml"), folder.path, overrides)
    if not row.isdecimal():
        return space, space.named(row)
    if int(row) >= space.raw_size:
        raise ValueError(f"{target}: an id must be below {space.raw_size}; search show {folder.path} lists some")
    return space, space.point(int(row))


def remedy_lines(found: Sequence[ServedRemedy]) -> list[str]:
    """What would make it fit."""
    if not found:
        return ["nothing near it fits; try another system"]
    lines = ["what would make it fit, most tokens a second first:"]
    for remedy in found:
        told = f"{format_count(remedy.tokens_per_s)} tokens/s, {format_seconds(remedy.seconds)} a token"
        lines += hanging("  ", f"{remedy.change}: {told}, {format_bytes(remedy.device_memory_bytes)}")
    return lines


def _text(
    space: ServedSpace, point: ServedPoint, result: InferenceResult, found: Sequence[ServedRemedy]
) -> str:  # fmt: skip
    system, row = point.system, described(space, point)
    usable = system.usable_hbm_bytes
    device = format_bytes(result.device_memory_bytes)
    lines = [
        f"model     {model_line(space.model)}",
        f"system    {system.name}: {system.told_chips}, {format_bytes(usable)} usable each",
        *hanging("requests  ", _requests(space, point)),
        *hanging("layout    ", "; ".join([degrees(row), *choices(row)[1:-1]])),
        "",
    ]
    if result.feasible:
        lines.append(f"fits: {device} of {format_bytes(usable)} usable")
    else:
        over = format_bytes(result.device_memory_bytes - usable)
        lines += [f"does not fit: {device} of {format_bytes(usable)} usable, {over} too much", *remedy_lines(found)]
    lines += ["", *_seconds(space, result), "", *_parts(result), "", *_memory(result)]
    lines += hanging("not modelled: ", NEGLECTED)
    for text in space.notices:
        lines += hanging("notice: ", text)
    for text in result.assumptions:
        if text not in system.chip.assumptions:
            lines += hanging("assumed: ", text)
    return "\n".join(lines) + "\n"


def _requests(space: ServedSpace, point: ServedPoint) -> str:
    if space.phase.value == "prefill":
        return f"prefill of {counted(point.batch, 'prompt')} of {counted(space.context, 'token')} at once"
    growing = f"from {space.context} to {space.context + space.output - 1}" if space.output > 1 else str(space.context)
    return f"decode of {counted(point.batch, 'sequence')} at once behind {growing} tokens each"


def _seconds(space: ServedSpace, result: InferenceResult) -> list[str]:
    c = result.columns
    rate = (
        f"{format_count(c['tokens_per_s'])} tokens/s, {format_cell('tokens_per_s_per_gpu', c['tokens_per_s_per_gpu'])}"
    )
    money = f"{c['cost_usd_per_mtoken']:.3g} USD per million tokens, {c['energy_j_per_token']:.3g} J per token"
    told = [f"{rate} per chip; {money}"]
    shares = f"{c['mbu']:.1%} of memory bandwidth, {c['mfu']:.1%} of the products' peak"
    first = c["time_to_first_token_s"]
    if space.phase.value == "prefill":
        return [f"{format_seconds(first)} to the first token", *told, shares]
    ends = ", ".join(format_seconds(c[f"{end}_output_token_s"]) for end in ("first", "last"))
    prompt = "" if math.isnan(first) else f"; a prompt on each replica takes {format_seconds(first)} before"
    if not math.isnan(c["longest_pass_s"]):
        prompt = (f"; a pass with a chunk takes {format_seconds(c['longest_pass_s'])}, a prompt in such passes "
                  f"{format_seconds(first)}")  # fmt: skip
    alone = f"{c['tokens_per_s_per_sequence']:.3g} tokens/s a sequence"
    mean = f"{format_seconds(c['time_per_output_token_s'])} a token ({ends} where the output begins and ends)"
    return [*hanging("", f"{mean}, {alone}{prompt}"), *told, shares]


def _parts(result: InferenceResult) -> list[str]:
    """Where a pass spends its seconds: parts of the model, traffic, the host."""
    parts = sorted(result.parts, key=lambda part: -part.seconds)
    total = sum(part.seconds for part in parts)
    cells = [
        [p.part, format_seconds(p.seconds), f"{p.seconds / total:.1%}",
         f"{p.memory_bound_s / p.seconds:.0%}" if p.hbm_bytes else "-",
         format_bytes(p.hbm_bytes) if p.hbm_bytes else "-"]
        for p in parts
    ]  # fmt: skip
    head = ["part of a pass", "seconds", "share", "waits for memory", "bytes read and written"]
    c = result.columns
    more = [("host", c["host_s"]), ("pipeline", c["pipeline_s"])]
    beside = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in more if seconds > 1e-9)
    return [*columns(head, cells), f"beside these: {beside}; traffic in full, whatever hides"]


def _memory(result: InferenceResult) -> list[str]:
    items = sorted(((name, n) for name, n in result.memory.items() if n), key=lambda item: -item[1])
    cells = [[name, format_bytes(n), f"{n / result.peak_memory_bytes:.1%}"] for name, n in items]
    token = f"{result.kv_cache_bytes_per_token:,.0f} bytes of cache for each token of a sequence"
    return [*columns(["memory of the fullest rank", "bytes", "share"], cells), token]


def _data(
    space: ServedSpace, point: ServedPoint, result: InferenceResult, found: Sequence[ServedRemedy]
) -> dict[str, Any]:  # fmt: skip
    row = described(space, point)
    return {
        "name": space.name, "model": space.model.name, "system": point.system.name,
        "workload": {name: row[name] for name in OF_WORKLOAD},
        "strategy": {name: value for name, value in row.items()
                     if name not in {"id", "name", "system", *OF_WORKLOAD}},
        **result.columns, "memory": dict(result.memory),
        "parts": [{"part": p.part, "seconds": p.seconds, "memory_bound_s": p.memory_bound_s, "hbm_bytes": p.hbm_bytes,
                   "flops": p.flops} for p in result.parts],
        "usable_memory_bytes": point.system.usable_hbm_bytes, "feasible": result.feasible, "reason": result.reason,
        "notices": list(space.notices), "remedies": [remedy.as_dict() for remedy in found], "not_modelled": NEGLECTED,
        "assumptions": list(result.assumptions),
    }  # fmt: skip
