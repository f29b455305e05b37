"""Calibration finds the parameters that made a table, says how wrong it is, and refuses what is no table."""

from __future__ import annotations

import gzip
import json

import pytest
import yaml

from capture.calibrate import calibrate, chip_fields, link_fields
from capture.op_tables import Kind, read_table
from hardware.catalog import system_from_mapping
from hardware.dtype import DType
from hardware.link import Collective
from search.cli import main
from tests.capture.tables import ATTENTION, PRODUCTS, attention, collectives, products, shares, streams, write


def calibrated(*paths, **options):
    (found,) = calibrate([read_table(path) for path in paths], **options)
    return found


def test_matrix_products_give_back_the_parameters_that_made_them(tmp_path):
    found = calibrated(products(tmp_path / "gemm_h100.csv.gz", noise=0.05))
    memory, gemm = found.of("memory"), found.of("gemm bf16")
    # Memory is judged by the fastest of three rows and the best tenth of shapes: 5 % of noise make that 1.7 sigma.
    assert memory.values["hbm_efficiency"] == pytest.approx(PRODUCTS["hbm"] * 1.085, rel=0.03)
    assert gemm.values["gemm_efficiency"] == pytest.approx(PRODUCTS["efficiency"], rel=0.03)
    assert gemm.values["gemm_ramp_k"] == pytest.approx(PRODUCTS["ramp_k"], rel=0.25)
    assert gemm.values["slowdown"] == pytest.approx(PRODUCTS["slowdown"], abs=0.04)
    assert gemm.values["gemm_kernel_s"] == pytest.approx(PRODUCTS["kernel_s"], rel=0.25)
    assert gemm.error.mean < 0.05
    assert gemm.error.num_held_out > 20


def test_without_noise_products_are_recovered_to_a_hundredth(tmp_path):
    gemm = calibrated(products(tmp_path / "gemm_h100.csv.gz")).of("gemm bf16")
    assert gemm.values["gemm_efficiency"] == pytest.approx(PRODUCTS["efficiency"], rel=0.01)
    assert gemm.error.p90 < 0.02


def test_quantisation_is_told_from_the_product_behind_it(tmp_path):
    path = products(tmp_path / "gemm_h100.csv", dtype="fp8", cast_bytes=6.0)
    gemm = calibrated(path).of("gemm fp8")
    assert gemm.values["cast_bytes"] == pytest.approx(6.0, rel=0.1)
    assert gemm.values["gemm_efficiency"] == pytest.approx(PRODUCTS["efficiency"], rel=0.03)


def test_attention_gives_back_shares_by_head_dim_ramp_and_tail(tmp_path):
    found = calibrated(attention(tmp_path / "attention_h100.csv.gz"))
    fit = found.of("attention flash3")
    for name, value in ATTENTION.items():
        key = name if isinstance(name, str) else f"share.{name}"
        assert fit.values[key] == pytest.approx(value, rel=0.05), key
    fields = chip_fields(found)
    assert fields["attention_head_dims"][0] == {64: pytest.approx(0.75, rel=0.03)}


def test_collectives_give_back_the_link(tmp_path):
    fields = link_fields(calibrated(collectives(tmp_path / "nccl_h100.csv")))
    assert fields["all_reduce"] == pytest.approx(0.8, rel=0.01)
    assert fields["latency_us"] == pytest.approx(1.0, rel=0.1)
    assert fields["setup_us"] == pytest.approx(10.0, rel=0.05)
    assert fields["pair_loss"] == pytest.approx(1.0, rel=0.05)


def test_grouped_products_tell_what_each_expert_costs_besides_its_tiles(tmp_path):
    found = calibrated(shares(tmp_path / "shares.csv", group_s=5e-6, share=0.6))
    assert found.name == "b200-180g-sxm"
    values = found.of("grouped").values
    assert values["group_s"] == pytest.approx(5e-6, rel=0.02)
    assert values["single_share"] == pytest.approx(0.6, rel=0.01)


def test_an_unknown_device_is_described_by_the_best_that_was_seen_of_it(tmp_path):
    paths = [products(tmp_path / "gemm_box.csv", noise=0.02), streams(tmp_path / "stream_box.csv")]
    found = calibrated(*paths, unknown=True)
    assert found.spec is None
    assert found.of("memory, streams").values["kernel_s"] == pytest.approx(3e-6, rel=0.1)
    # of the fastest stream or thin product that was seen, which is memory's own rate here
    assert found.chip.hbm_bytes_per_s * found.of("memory, streams").values["hbm_efficiency"] == pytest.approx(
        20e9, rel=0.05
    )
    with pytest.raises(ValueError, match="must be known by its gpu column, its name or --chip, but got 'box'"):
        calibrated(*paths)


def test_what_is_written_is_a_system_that_a_space_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for make, name in ((products, "gemm"), (attention, "attention"), (collectives, "nccl")):
        make(tmp_path / f"{name}_h100.csv.gz")
    words = ["calibrate", *(f"{name}_h100.csv.gz" for name in ("gemm", "attention", "nccl")), "--name", "mine"]
    assert main([*words, "-o", "mine.yaml", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["devices"][0]
    system = system_from_mapping(yaml.safe_load((tmp_path / "mine.yaml").read_text()))
    assert system.name == "mine"
    assert system.chip.gemm_efficiency[DType.BF16] == told["chip"]["gemm_efficiency.bf16"]
    assert system.tiers[0].link.by_collective[Collective.ALL_REDUCE] == told["link"]["all_reduce"]
    assert "gemm_efficiency.bf16" in system.chip.measured
    assert "held-out" in system.chip.sources["attention_efficiency"]
    space = "model: llama3_8b\nsystem: {file: mine.yaml, num_chips: 8}\nworkload: {seq: 4096, global_batch: 8}\n"
    (tmp_path / "space.yaml").write_text(space + "strategy: {zero_stage: 3}\n")
    assert main(["estimate", "space.yaml", "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["price_sources"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert main([*words, "-o", "mine.yaml"]) == 2  # never over another file
    assert "mine.yaml: -o writes a new file, but it exists" in capsys.readouterr().err


HEADER = ["dtype", "m", "n", "k", "latency_us", "framework"]
GOOD = [("bf16", 1024, 1024, 1024 * i, 10.0 * i, "one") for i in range(1, 30)]


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        (HEADER[:-2] + ["latency", "framework"], GOOD, "line 1: a table .* but latency_us is missing"),
        (HEADER, [], "has rows, but got none below its header"),
        (HEADER, [(*r[:4], -r[4], r[5]) for r in GOOD], "line 2, column latency_us: must be above 0, but got '-10.0'"),
        (HEADER, [(*r[:4], "fast", r[5]) for r in GOOD], "line 2, column latency_us: must be a number, but got 'fast'"),
        (HEADER, [(r[0], 0.5, *r[2:]) for r in GOOD], "line 2, column m: must be at least 1, but got '0.5'"),
        (HEADER, [(*r[:4], r[4] * 1e9, r[5]) for r in GOOD], "must be below 3600 s, in microseconds"),
        (HEADER, [(*r[:4], r[4] * 1e-6, r[5]) for r in GOOD], "latency_us: bf16 products .* reach at most its peak"),
        (HEADER, [("bf61", *r[1:]) for r in GOOD], "column dtype: a format is one of .* but got 'bf61'"),
        (HEADER, [("nvfp4", *r[1:]) for r in GOOD], "column dtype: h100-80g-sxm multiplies .* but got nvfp4"),
        (HEADER, GOOD[:3], "needs 8 shapes"),
    ],
)  # fmt: skip
def test_what_is_no_table_gets_one_line_that_names_file_row_and_column(tmp_path, capsys, header, rows, message):
    path = write(tmp_path / "gemm_h100.csv", header, rows)
    assert main(["calibrate", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert str(path) in told
    with pytest.raises(ValueError, match=message):
        calibrate([read_table(path)])


def test_a_file_that_only_claims_to_be_gzipped_is_refused(tmp_path):
    path = tmp_path / "gemm_h100.csv.gz"
    path.write_bytes(b"dtype,m,n,k\n")
    with pytest.raises(ValueError, match="gemm_h100.csv.gz: not a whole gzip file"):
        read_table(path)
    path.write_bytes(gzip.compress(b"dtype,m,n,k,latency_us\n" * 1000)[:30])
    with pytest.raises(ValueError, match="not a whole gzip file"):
        read_table(path)


def test_single_bad_rows_are_left_out_and_told(tmp_path):
    path = write(tmp_path / "gemm_h100.csv", HEADER, [*GOOD, ("bf16", 1, 2, 3, "nan", "one"), ("bf16", 1)])
    table = read_table(path)
    assert table.kind is Kind.GEMM
    assert table.num_rows == len(GOOD)
    assert [fault.partition(", ")[2] for fault in table.faults] == [
        "line 32: 2 cells under 6 columns; the row is left out",
        "line 31, column latency_us: must be a number, but got 'nan'; the row is left out",
    ]
