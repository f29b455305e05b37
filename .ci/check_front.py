"""Fails when a run folder has no Pareto front, or an empty one. Uses no module of this project."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet


def main(run: str) -> int:
    """Prints the number of front points; 0 when there is one or more."""
    num_rows = pyarrow.parquet.read_table(Path(run) / "front.parquet").num_rows
    print(f"front.parquet: {num_rows} rows")
    return 0 if num_rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
