"""Shows what was found: terminal tables, character plots and pictures. Computes no prediction of its own.

The text functions return strings and write nothing; `results.report.picture` is imported where a PNG is wanted.
"""

from __future__ import annotations

from results.report.breakdown import memory_table, waterfall
from results.report.scatter import scatter
from results.report.terminal import (
    arithmetic,
    csv_text,
    front_table,
    ranked,
    rejection_table,
    runs_table,
    settings,
)

__all__ = [
    "arithmetic",
    "csv_text",
    "front_table",
    "memory_table",
    "ranked",
    "rejection_table",
    "runs_table",
    "scatter",
    "settings",
    "waterfall",
]
