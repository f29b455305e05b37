"""Reads tables of measured training steps: CSV files to rows of checked cells.

Knows which columns describe the configuration, which were measured and which only say where a row comes from. Knows
nothing of models or predictions.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hardware.units import GIB

__all__ = ["GROUP_COLUMNS", "STRATEGY_COLUMNS", "Measured", "Row", "measured_of", "read_rows"]

MODEL_COLUMNS = (
    "arch", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated_mlp", "tied_embeddings",
    "attention", "experts", "top_k", "moe_ffn", "shared_experts", "first_dense_layers", "mtp_layers", "q_lora_rank",
    "kv_lora_rank", "qk_nope_dim", "qk_rope_dim", "v_head_dim", "moe_routing",
)  # fmt: skip
SYSTEM_COLUMNS = ("gpu", "gpus_per_node", "n_gpus", "intra_node", "inter_node")
STRATEGY_COLUMNS = (
    "tp", "sp", "cp", "pp", "vpp", "ep", "etp", "dp", "zero_stage", "schedule", "micro_batch", "recompute",
    "recompute_modules", "recompute_layers", "cuda_graph", "pp_layout", "ep_overlap", "fsdp_mode", "flash_attention",
    "attention_kernel", "compiled", "grad_accum_dtype", "tp_comm_overlap", "dp_overlap",
)  # fmt: skip
"""What a search may choose."""
GROUP_COLUMNS = (*MODEL_COLUMNS, *SYSTEM_COLUMNS, "seq", "global_batch", "precision", "optimizer", "framework")
"""What layouts that compete with each other share: the task, the machine, the numerics and the software."""

_MEASURED_COLUMNS = ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib", "mem_kind")
_KNOWN_COLUMNS = ("case_id", "family", "complete", *GROUP_COLUMNS, *STRATEGY_COLUMNS, *_MEASURED_COLUMNS)
_REQUIRED_COLUMNS = ("case_id", "family", "complete", "arch", "layers", "hidden", "seq", "gpu")
"""For which nothing is ever assumed. Of the other columns, one that is absent counts as empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table. `place` says which, for messages; `cells` are stripped texts by column."""

    place: str
    cells: Mapping[str, str]
    defect: str = ""  # why the line could not be split into cells

    def has(self, column: str) -> bool:
        """Whether the cell is filled."""
        return bool(self.cells[column])

    def bad(self, column: str, rule: str) -> ValueError:
        """The error of an unusable cell, naming row and column."""
        return ValueError(f"{self.place}, column {column}: {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured; None where it was not."""

    step_time_s: float | None
    peak_memory_bytes: float | None


def read_rows(path: Path) -> tuple[Row, ...]:
    """The rows of one CSV file. ValueError where it is not such a table; a broken line becomes a row with a defect."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        _check_header(path, header)
        return tuple(_row(path, reader.line_num, header, line) for line in reader if line)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV ({error})") from error


def measured_of(row: Row, *, tokens: float, num_gpus: float) -> Measured:
    """Measured seconds of a step (else from the tokens per second and GPU) and bytes, in the row's own counter."""
    seconds = _positive(row, "step_time_s")
    rate = _positive(row, "tokens_per_s_per_gpu")
    if seconds is None and rate is not None:
        seconds = tokens / (rate * num_gpus)
    memory_gib = _positive(row, "peak_mem_gib")
    return Measured(step_time_s=seconds, peak_memory_bytes=None if memory_gib is None else memory_gib * GIB)


def _text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a table must be UTF-8, but byte {error.start} is not; save it as UTF-8") from error
    if not text.strip():
        raise ValueError(f"{path}: a table must have a header and rows, but the file is empty")
    return text


def _check_header(path: Path, header: list[str]) -> None:
    missing = [name for name in _REQUIRED_COLUMNS if name not in header]
    if missing:
        raise ValueError(f"{path}: a table of measured steps must have the columns {', '.join(missing)}; add them")
    if not {"step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib"} & set(header):
        law = "a table of measured steps must have a measured column"
        raise ValueError(f"{path}: {law}; add step_time_s, tokens_per_s_per_gpu or peak_mem_gib")
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: every column must be there once, but {', '.join(twice)} come again")


def _row(path: Path, line_number: int, header: list[str], line: list[str]) -> Row:
    place = f"{path.name} line {line_number}"
    padded = [*line, *[""] * (len(header) - len(line))]
    cells = dict.fromkeys(_KNOWN_COLUMNS, "") | {name: cell.strip() for name, cell in zip(header, padded, strict=False)}
    defect = ""
    if len(line) != len(header):
        defect = f"{place}: a row must have {len(header)} cells, but this one has {len(line)}"
    return Row(place=place, cells=cells, defect=defect)


def _positive(row: Row, column: str) -> float | None:
    text = row.cells[column]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise row.bad(column, f"must be a number, but got {text!r}") from None
    if not (math.isfinite(value) and value > 0):
        raise row.bad(column, f"must be above 0, but got {text}")
    return value
