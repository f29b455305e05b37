"""Tables that a user measured, from files to prices: by the command line and in a space; what is none is refused."""

from __future__ import annotations

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from search.op_times import op_times
from search.space import load_space, parse_space

HEADER = ("dtype", "m", "n", "k", "latency_us", "framework")
Q_PROJ = ("bf16", 4096, 4096, 4096)  # of llama3_8b at its default length
ROWS = [(*Q_PROJ, 151.5, "a"), (*Q_PROJ, 160.0, "b"), (*Q_PROJ, 149.0, "c"), ("bf16", 2048, 14336, 4096, 300.0, "a"),
        ("bf16", 8192, 14336, 4096, 1200.0, "a"), ("fp8", 1, 64, 64, 3.0, "a")]  # fmt: skip
SHOW = ("graph", "show", "llama3_8b", "--ops", "--json", "--chip", "h100")
SPACE = """\
name: mine
model: llama3_8b
system: {cluster: dgx_h100, num_chips: 8, tables: measured}
workload: {seq: 4096, global_batch: 8}
strategy: {precision: bf16}
"""


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "measured"
    found.mkdir()
    with (found / "gemm_mine.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *ROWS])
    (found / "streams_mine.csv").write_text("op,bytes,latency_us\ncopy,1024,3.0\n")
    return found


def forms(folder):
    """The table of products in every form."""
    plain = folder / "gemm_mine.csv"
    packed = folder.parent / "gemm_mine.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    parquet = folder.parent / "gemm_mine.parquet"
    columns = dict(zip(HEADER, zip(*ROWS, strict=True), strict=True))
    pq.write_table(pa.table({name: list(cells) for name, cells in columns.items()}), parquet)
    return plain, packed, parquet, folder


def test_csv_gzip_parquet_and_a_folder_are_one_table(folder):
    first, *others = [op_times([form]) for form in forms(folder)]
    assert all(other.digest == first.digest for other in others)
    (m, n, k, seconds) = next(row for row in first.tables()["gemm"]["bf16"] if row[0] == 4096)
    assert (m, n, k) == (4096, 4096, 4096)
    assert seconds == pytest.approx(151.5e-6, rel=1e-9)  # the median of three frameworks


def test_the_command_line_prices_with_a_table_and_says_so(search, folder):
    told = json.loads(search(*SHOW, "--table", folder).out)
    ops = {op["name"]: op for op in told["ops"]}
    assert "operators of measured looked up" in told["of"]
    assert ops["attention.q_proj"]["seconds"] == pytest.approx(151.5e-6, rel=1e-9)
    assert ops["attention.q_proj"]["source"] == ops["attention.o_proj"]["source"] == "table"
    assert ops["mlp.up_proj"]["source"] == "interpolated"
    assert ops["mlp.up_proj"]["seconds"] == pytest.approx(600e-6, rel=1e-9)
    assert ops["mlp.up_proj"]["confidence"] == "high"
    plain = {op["name"]: op for op in json.loads(search(*SHOW).out)["ops"]}
    assert ops["mlp.down_proj"] == plain["mlp.down_proj"]


def test_a_space_brings_tables_that_its_resolved_form_holds_itself(search, folder, tmp_path):
    (tmp_path / "space.yaml").write_text(SPACE)
    space = load_space(str(tmp_path / "space.yaml"))
    times = space.systems[0].chip.times
    assert times == op_times([folder])
    stored = space.resolved_yaml()
    assert str(tmp_path) not in stored
    assert parse_space(stored).systems == space.systems
    told = json.loads(search("graph", "show", tmp_path / "space.yaml", "--ops", "--json").out)
    assert {op["name"]: op["source"] for op in told["ops"]}["attention.q_proj"] == "table"


BAD = {
    "missing": ("nothing.csv", "cannot read"),
    "no folder of tables": (".", "has files .csv, .csv.gz, .parquet, but this has none"),
    "streams": ("measured/streams_mine.csv", "give it to search calibrate"),
    "no table": ("text.csv", "line 1: a table of operators has all columns of its kind"),
    "no parquet": ("text.parquet", "not a whole Parquet file"),
    "only streams": ("only", "has products or attention, but this has none"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_table_is_one_line_and_2(search, folder, tmp_path, name):
    path, law = BAD[name]
    for file in ("text.csv", "text.parquet"):
        (tmp_path / file).write_text("hello\nworld\n")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "streams.csv").write_bytes((folder / "streams_mine.csv").read_bytes())
    (tmp_path / "empty").mkdir()
    target = tmp_path / "empty" if path == "." else tmp_path / path
    said = search(*SHOW, "--table", target)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert str(target) in said.err
    assert law in said.err


def test_a_table_needs_a_chip_and_a_space_says_where_a_table_is_wrong(search, folder, tmp_path):
    said = search("graph", "show", "llama3_8b", "--table", folder)
    assert (said.code, said.err) == (2, "search: --table has operators of a chip, but none is named; give --chip\n")
    (tmp_path / "space.yaml").write_text(SPACE.replace("tables: measured", "tables: nothing"))
    said = search("estimate", tmp_path / "space.yaml")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "space.yaml:3" in said.err
    assert "nothing: cannot read" in said.err
