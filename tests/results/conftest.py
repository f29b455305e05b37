"""Fronts to store and to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from estimator.result import COLUMNS
from estimator.strategy import Recompute, Schedule, Strategy
from results.schema import FRONT_FIELDS, conform, strategy_columns
from results.table import Table

Front = Callable[..., Table]


@pytest.fixture
def make_front() -> Front:
    """Makes `num_rows` points on a curve of step time against memory; keywords replace whole columns."""

    def make(num_rows: int = 4, **replaced: Sequence[Any] | NDArray[Any]) -> Table:
        strategy = Strategy(
            tp=1.0,
            pp=np.full(num_rows, 16.0),
            ep=64.0,
            schedule=Schedule.DUALPIPE,
            zero_stage=1,
            recompute=Recompute.parse(["layernorm", "mla_up_proj"]),
            precision="fp8",
        )
        rows = np.arange(num_rows, dtype=np.float64)
        columns = {column.name: np.zeros(num_rows) for column in COLUMNS}
        columns |= {
            "id": 1000 + np.arange(num_rows),
            "system": ["h800"] * num_rows,
            "num_micro_batches": np.full(num_rows, 120.0),
            "step_time_s": 20.0 * 1.01**rows,
            "device_memory_bytes": 70e9 / (1.0 + rows),
            "num_gpus": np.full(num_rows, 2048.0),
            "tokens_per_s": 62914560 / (20.0 * 1.01**rows),
            "cost_usd_per_mtoken": 0.3 * 1.01**rows,
            "energy_j_per_token": np.full(num_rows, 0.5),
            "co2_kg_per_mtoken": np.full(num_rows, 0.2),
            "exposed_comm_ep_s": rows / 7.0,
        }
        return conform(columns | strategy_columns(strategy, dp=128.0) | replaced, FRONT_FIELDS)

    return make
