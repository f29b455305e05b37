"""`search graph export`: a graph as JSON, DOT, ONNX, Excel, HTML, CSV, Parquet or a trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from estimator.graph_file import graph_text
from estimator.ops_file import OpsFile, ops_text
from estimator.part import part_names
from results.files import as_user_error, write_bytes
from results.graph_export import GraphView
from results.report import csv_text
from search.commands.answer import answer, check_writable, write
from search.commands.graph_subject import GraphSubject, read_subject

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Writes the file; text goes to standard output where no file is named."""
    if args.output is None and (args.json or args.to not in TEXTS):
        what = "--json tells what was written" if args.json else f"{args.to} is no text"
        raise ValueError(f"{what}, so a file must be named; give one with -o")
    if args.output is not None:
        check_writable(args, args.output)
    subject = read_subject(args, args.config)
    if args.output is None:
        write(args, TEXTS[args.to](subject))
        return 0
    path = Path(args.output)
    if args.to in TEXTS:
        write(args, TEXTS[args.to](subject))
    else:
        FILES[args.to](path, subject.view)
    told = argparse.Namespace(**{**vars(args), "output": None})
    with as_user_error(path, "read"):
        nbytes = path.stat().st_size
    answer(
        told, text=f"{path}: {len(subject.entries)} operations, {nbytes:,} bytes\n", data=_data(args, subject, nbytes)
    )
    return 0


def _data(args: argparse.Namespace, subject: GraphSubject, nbytes: int) -> dict[str, Any]:
    return {
        "file": args.output, "format": args.to, "name": subject.name, "of": subject.told,
        "ops": len(subject.entries), "file_bytes": nbytes,
    }  # fmt: skip


def _json(subject: GraphSubject) -> str:
    """A captured graph in full, as it was captured; of everything else the ops."""
    if subject.captured is not None and subject.is_logical:
        return graph_text(subject.captured)
    return ops_text(OpsFile(graph=subject.graph, told=subject.told, precision=subject.recipe.name))


def _dot(subject: GraphSubject) -> str:
    from results.graph_export.dot import dot_text

    return dot_text(subject.view)


def _html(subject: GraphSubject) -> str:
    from results.graph_export.page import page

    return page(subject.view)


def _csv(subject: GraphSubject) -> str:
    from results.graph_export.rows import op_table

    return csv_text(op_table(subject.view))


def _parquet(path: Path, view: GraphView) -> None:
    from results.graph_export.rows import write_parquet

    write_parquet(path, view)


def _xlsx(path: Path, view: GraphView) -> None:
    from results.graph_export.workbook import workbook_bytes

    write_bytes(path, workbook_bytes(view))


def _onnx(path: Path, view: GraphView) -> None:
    from results.graph_export.onnx_model import onnx_bytes

    write_bytes(path, onnx_bytes(view))


def _perfetto(path: Path, view: GraphView) -> None:
    from results.chrome_trace import write_trace
    from results.graph_export.trace import laid_out

    timeline = laid_out(view)
    path.unlink(missing_ok=True)  # asked for by --force: a trace replaces none but its own otherwise
    write_trace(path, timeline, subject=f"graph {view.name}: {view.told}", parts=part_names(view.graph))


TEXTS: dict[str, Callable[[GraphSubject], str]] = {"json": _json, "dot": _dot, "html": _html, "csv": _csv}
FILES: dict[str, Callable[[Path, GraphView], None]] = {
    "parquet": _parquet, "xlsx": _xlsx, "onnx": _onnx, "perfetto": _perfetto,
}  # fmt: skip
