"""One row per op: the table of CSV and Parquet, with units and meaning of every column."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from results.graph_export.view import GraphView, kind_of, shape_of
from results.parquet import write_table
from results.schema import Field, Plain
from results.table import Table

__all__ = ["OP_FIELDS", "op_table", "write_parquet"]

INT, REAL, TEXT = Plain.INT64, Plain.FLOAT64, Plain.STRING
COLUMNS = (
    ("scope", TEXT, "1", "path from the model to the op, with slashes"),
    ("block", TEXT, "1", "kind of the block that it stands in"),
    ("times", INT, "1", "how often the model runs the block"),
    ("op", TEXT, "1", "name inside the block"),
    ("kind", TEXT, "1", "what it computes; of traffic, over which group"),
    ("part", TEXT, "1", "part of the model that it is of"),
    ("phase", TEXT, "1", "forward, recompute, backward (gradient of inputs) or weight_grad"),
    ("dims", TEXT, "1", "sizes by logical axis, of kinds whose work follows from them"),
    ("inputs", TEXT, "1", "tensors of the block that it reads, with spaces between them"),
    ("outputs", TEXT, "1", "tensors of the block that it writes; of gradients, named by what they are of"),
    ("flops", REAL, "1", "floating-point operations of one run"),
    ("read_bytes", REAL, "B", "read from HBM by one run"),
    ("written_bytes", REAL, "B", "written to HBM by one run"),
    ("link_bytes", REAL, "B", "whole buffer that one run sends"),
    ("parameters", REAL, "1", "of its weights, each counted once"),
    ("intensity", REAL, "1", "FLOPs per byte of HBM; NaN where no byte moves"),
    ("seconds", REAL, "s", "of one run; NaN where nothing was priced"),
    ("bound", TEXT, "1", "what its seconds are of: compute, memory or link"),
    ("price_source", TEXT, "1", "who said so: measured, tile, roofline or link"),
    ("source", TEXT, "1", "place of the model's code that it was captured from"),
)
OP_FIELDS = tuple(Field(name=name, kind=kind, unit=unit, description=told) for name, kind, unit, told in COLUMNS)


def op_table(view: GraphView) -> Table:
    """The rows, in the order of the model."""
    rows = []
    for entry in view.entries:
        op, moved = entry.op, entry.read_bytes + entry.written_bytes
        rows.append((
            "/".join(entry.scope), entry.block.kind.value, entry.times, op.name, kind_of(op), entry.part.value,
            op.phase.value, shape_of(op), " ".join(op.inputs), " ".join(op.outputs), entry.flops, entry.read_bytes,
            entry.written_bytes, entry.link_bytes, entry.parameters, entry.flops / moved if moved else math.nan,
            entry.seconds, entry.bound, entry.source, view.source_of(entry),
        ))  # fmt: skip
    dtypes = {INT: np.dtype(np.int64), REAL: np.dtype(np.float64), TEXT: np.dtype(object)}
    return Table(columns={f.name: np.array([row[i] for row in rows], dtype=dtypes[f.kind])
                          for i, f in enumerate(OP_FIELDS)})  # fmt: skip


def write_parquet(path: Path, view: GraphView) -> None:
    """The table as Parquet; name and meaning of the amounts go with the file."""
    write_table(path, op_table(view), OP_FIELDS, {"name": view.name, "of": view.told})
