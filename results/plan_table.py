"""A plan as a table: columns, units, CSV and Parquet. Works nothing out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from results.goodput import Goodput
from results.plan import Plan
from results.schema import STRATEGY_NAMES, Field, Plain, conform, fields_named
from results.table import Table

__all__ = ["PLAN_FIELDS", "plan_rows", "write_parquet"]

OWN = ("id", "name", "system", "num_gpus", "step_time_s", "peak_memory_bytes", "mfu", *STRATEGY_NAMES)


def _number(name: str, unit: str, description: str) -> Field:
    return Field(name=name, kind=Plain.FLOAT64, unit=unit, description=description)


PLAN_FIELDS: tuple[Field, ...] = (
    *fields_named(OWN),
    _number("num_steps", "1", "optimizer steps"),
    _number("goodput", "1", "share of wall time on steps that count"),
    _number("mtbf_s", "s", "mean time between failures of the job"),
    _number("checkpoint_s", "s", "what a checkpoint stops training for"),
    _number("interval_s", "s", "training between two checkpoints"),
    _number("spare_gpus", "1", "chips that wait for a node to break"),
    _number("days", "d", "wall time"),
    _number("gpu_hours", "h", "chips, spare ones too, times wall time"),
    _number("cost_usd", "USD", "rental price of the GPU-hours"),
    _number("energy_kwh", "kWh", "chips, hosts and network at rated power, times PUE"),
    _number("co2_kg", "kg", "CO2 equivalent of that energy"),
)


def plan_rows(front: Table, points: Plan, good: Goodput | None, order: NDArray[np.intp]) -> Table:
    """The rows at these places, in this order; without goodput its columns are not numbers."""
    columns = {name: front[name] for name in OWN}
    columns |= {name: values for name, values in asdict(points).items()}
    unknown = np.full(len(front), np.nan)
    for name in ("mtbf_s", "checkpoint_s", "interval_s"):
        columns[name] = unknown if good is None else getattr(good, name)
    return conform(columns, PLAN_FIELDS).take(order)


def write_parquet(path: Path, table: Table, about: dict[str, str]) -> None:
    """Writes rows of a plan; `about` goes with the file."""
    from results.parquet import write_table  # pyarrow loads slowly

    write_table(path, table, PLAN_FIELDS, about)
