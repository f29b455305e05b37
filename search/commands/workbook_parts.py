"""What a workbook of a run takes beside its rows: the operations of one point and the chip that they run on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from estimator.cost.price import kernel_seconds, price
from estimator.inventory import Entry
from estimator.op import Array
from estimator.precision import PrecisionRecipe, recipe
from hardware.chip import ChipSpec
from results.schema import strategy_at
from results.store import RunFolder
from search.commands.graph_subject import priced_graph
from search.commands.point import Point, model_line, work_line
from search.finalists import name_of, system_of_row
from search.space import Space

__all__ = ["about_of", "chip_of", "op_rows"]

_AMOUNTS = ("flops", "moved_bytes", "behind_bytes", "kernel_s", "else_s")


def op_rows(space: Space, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every operation of a row's point; none on chips of several kinds, which `search estimate --ops` refuses."""
    system = system_of_row(space, row)
    if system.segments:
        return []
    point = Point(
        name=name_of(row), model=space.model, system=system, workload=space.workload, strategy=strategy_at(row)
    )
    numbers = recipe(point.strategy.precision)
    return [_op_row(entry, system.chip, numbers) for entry in priced_graph(point)[1]]


def _op_row(entry: Entry, chip: ChipSpec, numbers: PrecisionRecipe) -> dict[str, Any]:
    """What an op's seconds follow from, in rates and amounts. Traffic has seconds alone."""
    op = entry.op
    told = {
        "block": entry.block.kind.value, "times": entry.times, "name": op.name, "phase": op.phase.value,
        "source": entry.source, "seconds": entry.seconds,
    }  # fmt: skip
    if op.collective is not None and op.group is not None:
        kind, nothing = f"{op.collective.value} {op.group.value}", dict.fromkeys(_AMOUNTS, 0.0)
        return told | nothing | {"kind": kind, "reached_flops_per_s": 1.0, "link_s": entry.seconds}
    p = price(op, entry.block, chip, numbers)
    compute, memory, behind = (_number(x) for x in (p.compute_s, p.memory_s, p.work.behind))
    stream = chip.hbm_bytes_per_s * chip.hbm_efficiency
    kernel = 0.0 if op.rides else kernel_seconds(op, chip)
    formed = max(compute, memory - behind / stream) + behind / stream + kernel
    return told | {
        "kind": op.kind.value, "flops": entry.flops if compute else 0.0,
        "reached_flops_per_s": entry.flops / compute if compute else 1.0, "moved_bytes": memory * stream,
        "behind_bytes": behind, "link_s": 0.0, "kernel_s": kernel, "else_s": entry.seconds - formed,
    }  # fmt: skip


def _number(value: Array) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def chip_of(space: Space, row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row's chip that a workbook lets change."""
    chip = system_of_row(space, row).chip
    return {"hbm_bytes_per_s": chip.hbm_bytes_per_s, "hbm_efficiency": chip.hbm_efficiency}


def about_of(folder: RunFolder, space: Space) -> list[tuple[str, str]]:
    """What the workbook is of."""
    manifest = folder.manifest
    return [
        ("run", str(folder.path)), ("created", manifest["created"]), ("model", model_line(space.model)),
        ("workload", work_line(space.workload)),
        ("objectives", ", ".join(o.column for o in space.objectives)),
        ("search", str(manifest.get("sampler_reason", ""))),
        ("ops", "of the first row; one micro-batch on one rank, as search estimate --ops; what overlap hides in full"),
        ("units", "SI: seconds, bytes, FLOP/s; second line of the front"),
    ]  # fmt: skip
