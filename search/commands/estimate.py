"""`search estimate`: one configuration in full, where its time and its memory go."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from estimator.band import HIGH, LOW, Band
from estimator.cost.price import Confidence
from estimator.cost.table import COLUMN_OF
from estimator.imbalance import MEDIAN, Routing
from estimator.memory import RESERVED_FACTOR
from estimator.precision import recipe
from estimator.result import StageResult, StepResult
from hardware.system import SystemSpec
from hardware.units import format_bytes, format_seconds
from results.report import arithmetic, memory_table, settings, waterfall
from results.report.text import format_cell, hanging
from results.schema import strategy_json
from search.backends import load_backends
from search.bands import cell_of, model_error
from search.commands.answer import NOTHING_FEASIBLE, answer, tell
from search.commands.graph_subject import priced_graph
from search.commands.ops import PricedOp, ops_table, price_ops
from search.commands.point import Point, model_line, read_point, work_line
from search.commands.remedies import Remedy, remedies
from search.commands.rows import megatron_layout

__all__ = ["headline", "layout_phrase", "remedy_lines", "run"]

NOT_COUNTED = "data loading and logging buffers, checkpoint staging, fragmentation beyond the reserve"
BAND_LACKS = "failures, nor other jobs"
SHARES = ("measured", "tile", "roofline")
UNEVEN = 1.15  # times the middle stage: from here on a layout is worth a thought


def run(args: argparse.Namespace) -> int:
    """Prices one configuration; exit 3 where it does not fit in memory."""
    point = read_point(args.config, args.reference, args.overrides)
    try:
        point = point.settled()
        result = point.evaluate()
    except ValueError as error:
        raise ValueError(f"{args.config}: {error}") from error
    found = [] if result.feasible else remedies(point)
    ops = price_ops(point) if args.ops else []
    band = point.band(result)
    text = _text(point, result, band, found, ops)
    tell(*point.notices)
    answer(args, text=text, data=_data(point, result, band, found, ops, with_ops=args.ops))
    return 0 if result.feasible else NOTHING_FEASIBLE


def headline(point: Point) -> list[str]:
    """What is estimated: model, system, workload."""
    system, work = point.system, point.workload
    lines = [f"{system.name}: {system.told_chips}, {_room(system)}"]
    if system.segments:
        lines = [f"{system.name}, stages in this order:", *(f"{p.told_chips}, {_room(p)}" for p in system.segments)]
    return [
        f"model     {model_line(point.model)}",
        *(f"{'' if i else 'system':<10}{line}" for i, line in enumerate(lines)),
        f"workload  {work_line(work)}",
    ]


def _room(system: SystemSpec) -> str:
    return f"{format_bytes(system.chip.hbm_bytes)} each, {format_bytes(system.usable_hbm_bytes)} usable"


def layout_phrase(point: Point, row: Mapping[str, Any]) -> str:
    """Where a pipeline's layers sit, as Megatron takes it; nothing where there is no pipeline."""
    layout = megatron_layout(row, point.model)
    return "" if layout is None else f"pipeline layout of Megatron {layout}"


def remedy_lines(found: Sequence[Remedy], capacity_bytes: float) -> list[str]:
    """What would make it fit, fastest first; or how close it can be brought."""
    if not found:
        return ["no single change of this configuration is legal and smaller; try more chips or another system"]
    lines = ["what would make it fit, fastest first:"] if found[0].fits else ["the closest that changes bring it:"]
    for remedy in found:
        over = remedy.device_memory_bytes - capacity_bytes
        short = "" if remedy.fits else f", still {format_bytes(over)} too much"
        takes = f"{format_seconds(remedy.step_time_s)} a step, {format_bytes(remedy.device_memory_bytes)}{short}"
        lines += hanging("  ", f"{remedy.change}: {takes}")
    return lines


def _text(point: Point, result: StepResult, band: Band, found: Sequence[Remedy], ops: list[PricedOp]) -> str:
    row = point.row(result)
    lines = [
        *headline(point),
        *hanging("layout    ", arithmetic(row)),
        *hanging("          ", "; ".join(settings(row))),
        *(hanging("          ", phrase) if (phrase := layout_phrase(point, row)) else ()),
    ]
    lines += ["", *_verdict(point, result, band, found)]
    peak = recipe(point.strategy.precision).gemm.value
    rate = f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s per chip, {row['model_tflops_per_gpu']:.0f} TFLOP/s"
    lines += [
        "",
        f"{seconds_and_band(row['step_time_s'], band)} a step, {rate}",
        f"MFU {row['mfu']:.1%} of the {peak} peak ({row['mfu_bf16']:.1%} of bf16)",
    ]
    lines += [
        *_cost(point, row),
        "",
        f"time of rank {result.finishing_rank}, which works most",
        waterfall(row).rstrip(),
        *_uneven(result),
        "",
        *_memory(point, result, row),
    ]
    lines += ["", *_band_lines(point, band)]
    shares = ", ".join(f"{share:.0%} {name}" for name, share in sources_by_name(point, row).items())
    lines += ["", f"price sources: {shares}"]
    chips = [part.chip for part in point.system.parts]
    for text in result.assumptions:
        if not any(text in chip.assumptions for chip in chips):
            lines += hanging("assumed: ", text)
    for chip in chips:
        fields = [text.partition(":")[0].split()[-1] for text in chip.assumptions]
        whose = "the chip" if len(chips) == 1 else chip.name
        if fields:
            lines += hanging(f"assumed of {whose}: ", f"{', '.join(fields)}; why: search catalog chips {chip.name}")
    return "\n".join(lines) + "\n" + ("\n" + ops_table(ops) if ops else "")


def sources_by_name(point: Point, row: Mapping[str, Any]) -> dict[str, float]:
    """Shares of priced seconds by who said so; backends of installed packages by their own names."""
    shares = {name: float(row[f"price_share_{name}"]) for name in SHARES}
    own = load_backends()
    if not own or point.system.segments:
        return shares
    seconds: dict[str, dict[str, float]] = {name: {} for name in SHARES}
    for entry in priced_graph(point)[1]:
        if entry.confidence:
            column = seconds[COLUMN_OF[Confidence(entry.confidence)]]
            column[entry.source] = column.get(entry.source, 0.0) + entry.amount("seconds")
    named = {
        source: shares[name] * part / sum(parts.values())
        for name, parts in seconds.items() for source, part in parts.items() if source in own and part
    }  # fmt: skip
    for name, parts in seconds.items():
        shares[name] -= sum((named[source] for source in parts if source in named), 0.0)
    return shares | named


def _cost(point: Point, row: Mapping[str, Any]) -> list[str]:
    """Money, energy and CO2, and what the energy counts."""
    system = point.system
    money = f"{row['cost_usd_per_mtoken']:.3g} USD and {row['co2_kg_per_mtoken']:.3g} kg of CO2 per million tokens"
    energy = f"{row['energy_j_per_token']:.3g} J per token: {'; '.join(_watts(part) for part in system.parts)}"
    return [*hanging("", money), *hanging("", energy)]


def _watts(system: SystemSpec) -> str:
    site = system.site
    beside = f"{site.host_w_per_chip:,.0f} W of its host and {site.network_w_per_chip:,.0f} W of network"
    grid = f"{site.grid_kg_co2_per_kwh:g} kg of CO2 per kWh"
    return f"{system.chip.tdp_w:,.0f} W of the {system.chip.name}, {beside}, times a PUE of {site.pue:g}, {grid}"


def seconds_and_band(step_time_s: float, band: Band) -> str:
    """A step time with P10 and P90 behind it."""
    low, high = float(band.step_time_p10_s), float(band.step_time_p90_s)
    step, least, most = (format_cell("step_time_s", x) for x in (step_time_s, low, high))
    return f"{step} ({least} to {most})"


def _band_lines(point: Point, band: Band) -> list[str]:
    """What P10 and P90 are of, and the memory where it has any."""
    low, high = float(band.peak_memory_p10_bytes), float(band.peak_memory_p90_bytes)
    memory = f"; allocated {format_bytes(low)} to {format_bytes(high)}" if low < high else ""
    slowest = f"the slowest of {point.system.num_chips} chips"
    causes = [_model_error(point), *_skew(point), slowest]
    return hanging("P10 to P90: ", f"{', '.join(causes[:-1])} and {causes[-1]}{memory}; not {BAND_LACKS}")


def _model_error(point: Point) -> str:
    """How far published steps like this one came out."""
    cell = cell_of(point.model, point.strategy, point.system)
    error, _ = model_error(cell)
    low, high = math.expm1(error.low), math.expm1(error.high)
    kind = f"steps like this one ({', '.join(cell)})" if error.rows else "steps"
    return f"how far published {kind} came out from predictions without them ({low:+.0%} to {high:+.0%})"


def _skew(point: Point) -> list[str]:
    """How full the fullest rank of experts is, where routing is skewed."""
    routing, ep, copies = Routing.of(point.model, point.workload), point.strategy.ep, point.strategy.redundant_experts
    if not routing.skew or ep == 1:
        return []
    quantiles = (MEDIAN, LOW, HIGH)
    middle, low, high = (f"{float(replace(routing, quantile=q).load_factor(ep, copies)):.2f}" for q in quantiles)
    fullest = f"the fullest of {ep} ranks of experts has {middle} times the mean load, {low} to {high}"
    return [f"routing skew {routing.skew:g} ({fullest})"]


def _verdict(point: Point, result: StepResult, band: Band, found: Sequence[Remedy]) -> list[str]:
    capacity, device = point.system.usable_hbm_bytes, float(result.device_memory_bytes)
    if result.feasible:
        fits, high = (
            f"fits: {format_bytes(device)} of {format_bytes(capacity)} usable",
            float(band.device_memory_p90_bytes),
        )
        if high <= capacity:
            return [fits]
        beyond = f"{format_bytes(high)}, {format_bytes(high - capacity)} too much"
        return [fits, *hanging("warning: ", f"fits at the median, not at P90 of routing skew: {beyond}")]
    if result.reason == "host_memory":
        held, room = float(result.host_memory_bytes), point.system.chip.host_memory_bytes
        return [f"does not fit: {format_bytes(held)} on the host, which has {format_bytes(room)} for each chip"]
    needs, over = f"{format_bytes(device)} of {format_bytes(capacity)}", format_bytes(device - capacity)
    return [f"does not fit: {needs} usable, {over} too much", *remedy_lines(found, capacity)]


def _uneven(result: StepResult) -> list[str]:
    """The stage that the others wait for, where one takes much longer than most."""
    seconds = [stage.forward_s + stage.backward_s for stage in result.stages]
    middle = sorted(seconds)[len(seconds) // 2]
    worst = max(range(len(seconds)), key=lambda rank: seconds[rank])
    if len(seconds) < 2 or seconds[worst] < UNEVEN * middle:
        return []
    layers = "+".join(str(n) for n in result.stages[worst].layers)
    text = (
        f"stage {worst} ({layers} layers beside embedding, head or MTP) takes {format_seconds(seconds[worst])} a "
        f"micro-batch, {seconds[worst] / middle:.1f} times the middle one: the others wait for it; layout: auto "
        "gives it fewer layers where that evens it out"
    )
    return ["", *hanging("uneven: ", text)]


def _memory(point: Point, result: StepResult, row: dict[str, Any]) -> list[str]:
    worst = max(result.stages, key=_total)
    items = sorted(worst.memory.items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in items[:3])
    kinds = (("allocated", "peak"), ("reserved", "reserved"), ("device", "device"))
    counters = ", ".join(f"{name} {format_bytes(row[f'{key}_memory_bytes'])}" for name, key in kinds)
    hosted = float(result.host_memory_bytes)
    room = f"{format_bytes(hosted)} of {format_bytes(point.system.chip.host_memory_bytes)} for each chip"
    return [
        *hanging("memory; not counted: ", NOT_COUNTED),
        f"worst stage {worst.rank}: {counters}",
        *([f"on the host: {room}"] if hosted else []),
        f"its largest items: {largest}",
        memory_table(
            [stage.memory for stage in result.stages],
            capacity_bytes=point.system.usable_hbm_bytes,
            outside=(RESERVED_FACTOR, point.system.chip.context_bytes),
        ).rstrip(),  # fmt: skip
    ]


def _total(stage: StageResult) -> float:
    return sum(stage.memory.values())


def _data(
    point: Point, result: StepResult, band: Band, found: Sequence[Remedy], ops: list[PricedOp], *, with_ops: bool
) -> dict[str, Any]:
    row = point.row(result)
    told = result.as_dict()
    told["price_sources"] = sources_by_name(point, row)
    data: dict[str, Any] = {
        "name": point.name,
        "model": point.model.name,
        "system": point.system.name,
        "workload": {"seq": point.workload.seq, "global_batch": point.workload.global_batch},
        "strategy": strategy_json(row),
        "megatron_layout": megatron_layout(row, point.model),
        "num_micro_batches": row["num_micro_batches"],
        **told,
        **band.columns(),
        "device_memory_p90_bytes": band.device_memory_p90_bytes,
        "usable_memory_bytes": point.system.usable_hbm_bytes,
        "not_counted": NOT_COUNTED,
        "remedies": [remedy.as_dict() for remedy in found],
    }
    return data | ({"ops": [asdict(op) for op in ops]} if with_ops else {})
