"""What is measured fits its budget, is trusted when the machine is quiet, and becomes a system that a space takes."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest
import yaml

from capture.bench import HEADERS, Measured, _in_turns
from capture.calibrate import calibrate, chip_fields
from capture.device import Device, catalog_name
from capture.fit_attention import BACKWARD_FLOPS, attention_seconds
from capture.fits import Chip
from capture.measure_plan import Pilot, make_plan
from capture.measured_folder import read_folder, write_folder
from capture.op_tables import read_table
from capture.samples import MOST_OTHERS, Load, Patience, others_share, sampled
from capture.step import num_parameters
from hardware.catalog import chip, system_from_mapping
from hardware.dtype import DType
from hardware.units import US
from search.cli import main
from search.commands.measure_check import tasks
from tests.capture.tables import products

PILOT = Pilot(flops_per_s={"fp32": 2e11, "bf16": 1e12}, attention_flops_per_s=1e11, bytes_per_s=3e10)
BOX = Device(kind="cpu", name="cpu", hardware="Some Processor", in_catalog=False, ranks=1, threads=2, num_sms=1,
             memory_bytes=24e9, framework="torch", version="2.13")  # fmt: skip
PEAK, SHARE, BACK, RATE = 3e11, 0.4, 1.3, 2e10


def quiet_load():
    return None


def busy_machine():
    """One other process that always uses one of two cores."""
    now = {"s": 0.0}

    def load():
        now["s"] += 1.0
        return Load(busy_s=2.0 * now["s"], own_s=1.0 * now["s"], total_s=2.0 * now["s"])

    return load


def steady(run, calls):
    return 0.01 * calls


@pytest.mark.parametrize("seconds", [60.0, 120.0, 600.0])
def test_a_plan_is_expected_to_end_within_its_budget(seconds):
    plan = make_plan("cpu", seconds, ["fp32"], PILOT, ranks=2)
    assert plan.expected_s <= seconds
    assert f"{seconds:.0f} s at most" in plan.told()


def test_a_longer_budget_measures_more_and_thins_no_size_out():
    short, long = (make_plan("cpu", s, ["fp32"], PILOT, ranks=1) for s in (60.0, 300.0))
    assert len(long.products) > len(short.products)
    for size in ("m", "n", "k"):
        assert len({getattr(p, size) for p in short.products}) >= 4
    assert short.traffic == ()
    assert "no collectives: there is one rank" in short.told()


def test_every_format_has_the_products_that_its_fit_needs():
    plan = make_plan("cpu", 120.0, ["fp32", "bf16"], PILOT, ranks=1)
    counts = [sum(p.dtype == d for p in plan.products) for d in ("fp32", "bf16")]
    assert min(counts) >= 8
    assert {a.dtype for a in plan.attentions} == {s.dtype for s in plan.streams} == {"fp32"}


def test_a_budget_that_is_too_short_says_how_long_it_must_be():
    with pytest.raises(ValueError, match=r"--seconds must be enough for \d+ \w+ shapes, but 5 s are for .*; give"):
        make_plan("cpu", 5.0, ["fp32"], PILOT, ranks=1)


def test_kinds_take_turns_so_that_an_early_end_leaves_some_of_each():
    first = list(_in_turns("aaaa", "bb", "cccc"))[:5]
    assert set(first) == {"a", "b", "c"}


def test_a_sample_is_the_median_of_repeats_that_agree():
    times = iter([0.01, 0.01, 0.010, 0.011, 0.010, 0.012, 0.010])

    def clock(run, calls):
        assert calls >= 1
        return next(times) * calls

    found = sampled(lambda: None, clock, Patience(left_s=9.0, load=quiet_load))
    assert found.seconds == pytest.approx(0.010)
    assert found.trusted


def test_repeats_that_differ_are_not_trusted():
    times = iter([0.01] * 2 + [0.01, 0.02, 0.03, 0.04, 0.05] * 2)
    found = sampled(lambda: None, lambda run, calls: next(times) * calls, Patience(left_s=9.0, load=quiet_load))
    assert not found.trusted


def test_a_sample_beside_other_processes_is_taken_again_once_they_are_quiet_and_not_trusted_if_they_never_are():
    waits = []
    patience = Patience(left_s=3.0, load=busy_machine(), sleep=waits.append)
    found = sampled(lambda: None, steady, patience)
    assert found.others == pytest.approx(0.5)
    assert not found.trusted
    assert sum(waits) == pytest.approx(3.0)  # it waited before it took the sample again, and has no patience left
    assert patience.left_s == pytest.approx(0.0, abs=1e-9)


def test_seconds_of_others_are_what_the_machine_was_busy_with_besides_ourselves():
    none = Load(busy_s=0.0, own_s=0.0, total_s=0.0)
    assert others_share(none, Load(busy_s=4.0, own_s=3.9, total_s=4.0)) < MOST_OTHERS
    assert others_share(none, Load(busy_s=2.0, own_s=2.2, total_s=4.0)) == 0.0  # jiffies are rounded
    assert others_share(None, none) == 0.0


def test_what_the_kernel_tells_grows_and_holds_our_own_seconds():
    before = Load.now()
    sum(i * i for i in range(2_000_000))
    after = Load.now()
    if before is None or after is None:  # no /proc: nobody tells
        return
    assert after.total_s > before.total_s
    assert 0.0 < after.own_s - before.own_s
    assert 0.0 <= others_share(before, after) <= 1.0


@pytest.mark.parametrize(
    ("hardware", "memory", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0e9, "h100-80g-sxm"),
        ("NVIDIA A100-SXM4-80GB", 85.1e9, "a100-80g-sxm"),
        ("NVIDIA A100 80GB PCIe", 85.1e9, "a100-80g-pcie"),
        ("NVIDIA H200", 150.1e9, "h200-141g-sxm"),
        ("NVIDIA GeForce RTX 4090", 25.3e9, None),
    ],
)
def test_a_gpu_is_known_by_its_makers_name_and_its_memory(hardware, memory, name):
    assert catalog_name(hardware, memory) == name


def gemm_rows():
    grid = [(m, n, k) for m in (256, 512, 1024, 2048) for n in (512, 1024, 2048) for k in (512, 1024, 2048)]
    return [("fp32", m, n, k, 2.0 * m * n * k / PEAK / US, "torch", "2.13", "nt", 0.01) for m, n, k in grid]


def attention_rows():
    box = Chip(name="cpu", num_sms=1, flops_per_s={"fp32": PEAK}, hbm_bytes_per_s=RATE)
    sizes = [(b, s, h, h, d) for b in (1, 2) for s in (256, 512, 1024, 2048) for h in (4, 8) for d in (64, 128)]
    once = attention_seconds(
        *np.array(sizes, dtype=np.float64).T, chip=box, flops_per_s=PEAK * SHARE, ramp_keys=100.0, tail=0.0,
        kernel_s=0.0, bytes_per_s=1e15,
    )  # fmt: skip
    ways = {"forward": 1.0, "backward": BACKWARD_FLOPS * BACK}
    return [(*size, float(t * factor / US), "torch", "2.13", "sdpa_cpu", "fp32", way, 0.01)
            for way, factor in ways.items() for size, t in zip(sizes, once, strict=True)]  # fmt: skip


def stream_rows():
    return [(op, "fp32", 2**e, (5e-6 + 2**e / RATE) / US, "torch", "2.13", 0.01)
            for op in ("copy", "add") for e in range(18, 26)]  # fmt: skip


def traffic_rows():
    kinds = {"all_reduce": 1.0, "all_gather": 0.5, "p2p": 1.0}  # of the buffer that a pair's members send
    starts = {"all_reduce": 2.0}  # it scatters and gathers
    return [("cpu", kind, 2, 1, 2**e, (2e-4 * starts.get(kind, 1.0) + sent * 2**e / 2e9) / US, "gloo", "2.13", 0.01)
            for kind, sent in kinds.items() for e in range(14, 27)]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    rows = {"gemm": gemm_rows(), "attention": attention_rows(), "streams": stream_rows(), "collectives": traffic_rows()}
    write_folder(tmp_path / "measured", BOX, Measured(rows=rows, took_s=12.0), "2026-12-01")
    return tmp_path / "measured"


def test_a_folder_tells_what_it_is_of_and_calibration_reads_its_tables(folder):
    about, paths = read_folder(folder)
    assert about.device == BOX
    assert [path.name for path in paths] == [
        "attention_cpu.csv", "collectives_cpu.csv", "gemm_cpu.csv", "streams_cpu.csv",
    ]  # fmt: skip
    assert all(len(HEADERS[path.name.partition("_")[0]]) for path in paths)
    (found,) = calibrate([read_table(path) for path in paths], device="cpu", unknown=True, about=about.device)
    fields = {key: value for key, (value, _) in chip_fields(found).items()}
    assert fields["gemm_efficiency.fp32"] == pytest.approx(1.0, rel=0.02)
    assert fields["attention_backward"] == pytest.approx(BACK, rel=0.03)
    # 128 wide heads reach what 64 wide ones do here: one share of the products' peak
    assert fields["attention_efficiency"] == pytest.approx(SHARE, rel=0.05)
    assert fields["kernel_s"] == pytest.approx(5.0, rel=0.1)


def test_links_of_an_unknown_device_are_as_fast_as_the_fastest_rank_sent(folder):
    about, paths = read_folder(folder)
    (found,) = calibrate([read_table(path) for path in paths], device="cpu", unknown=True, about=about.device)
    values = found.of("collectives").values
    rate = values["wire_bytes_per_s"] * (1.0 - values["pair_loss"] / 4.0)
    for kind in ("all_reduce", "all_gather", "p2p"):
        assert rate * values[f"share.{kind}"] == pytest.approx(2e9, rel=0.05), kind
    assert values["setup_s"] == pytest.approx(2e-4, rel=0.1)


def test_the_three_commands_end_in_a_system_that_a_space_takes(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "--name", "my-cluster", "-o", "my-cluster.yaml"]) == 0  # the folder is the default one
    raw = yaml.safe_load((tmp_path / "my-cluster.yaml").read_text())
    system = system_from_mapping(raw)
    assert system.chip.hbm_bytes == BOX.memory_bytes
    assert system.chip.vendor == "Some Processor"
    assert system.chip.matrix_flops_per_s[DType.FP32] == pytest.approx(PEAK, rel=0.01)
    assert set(raw["chip"]["sources"]) >= {"hbm_bytes", "matrix_flops_per_s", "attention_backward", "tdp_w"}
    assert "assumption" in raw["chip"]["sources"]["tdp_w"]
    assert "assumption" not in raw["chip"]["sources"]["hbm_bytes"]
    space = "model: mine.yaml\nsystem: my-cluster.yaml\nworkload: {seq: 512, global_batch: 2}\n"
    model = (
        "name: tiny\nnum_layers: 2\nhidden: 256\nffn: 512\nnum_heads: 4\nnum_kv_heads: 4\nhead_dim: 64\nvocab: 512\n"
    )
    (tmp_path / "mine.yaml").write_text(model)
    (tmp_path / "space.yaml").write_text(space + "strategy: {precision: fp32}\n")
    capsys.readouterr()
    assert main(["estimate", "space.yaml", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["price_sources"]["measured"] > 0.5
    assert [task.dtype for task in tasks(system)] == ["fp32"] * 3


def test_a_gpu_that_the_catalogue_knows_keeps_its_peaks_and_has_as_many_chips_as_were_measured(tmp_path):
    gpu = replace(BOX, kind="cuda", name="h100-80g-sxm", in_catalog=True, ranks=2, num_sms=132, memory_bytes=85e9)
    products(tmp_path / "gemm_h100-80g-sxm.csv")
    (tmp_path / "device.json").write_text(json.dumps({
        "device": gpu.plain(), "date": "2026-12-01", "seconds": 9.0, "distrusted": {}, "unsupported": [],
        "not_reached": 0,
    }))  # fmt: skip
    assert main(["calibrate", str(tmp_path), "-o", str(tmp_path / "mine.yaml")]) == 0
    system = system_from_mapping(yaml.safe_load((tmp_path / "mine.yaml").read_text()))
    known = chip("h100-80g-sxm")
    assert system.num_chips == 2
    assert system.chip.matrix_flops_per_s == known.matrix_flops_per_s
    assert system.chip.hbm_bytes == known.hbm_bytes
    assert "gemm_efficiency.bf16" in system.chip.measured
    assert [task.dtype for task in tasks(system)] == ["bf16"] * 3


def test_ranks_that_train_together_need_a_link(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    about = json.loads((folder / "device.json").read_text())
    about["device"]["ranks"] = 2
    (folder / "device.json").write_text(json.dumps(about))
    assert main(["calibrate", "--name", "two", "-o", "two.yaml"]) == 0
    assert system_from_mapping(yaml.safe_load((tmp_path / "two.yaml").read_text())).num_chips == 2
    (folder / "collectives_cpu.csv").unlink()
    capsys.readouterr()
    told = refused(capsys, ["calibrate", "--name", "two", "-o", "none.yaml"])
    assert "a system of 2 ranks needs collectives" in told
    assert not (tmp_path / "none.yaml").exists()


def refused(capsys, words):
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


def test_bad_input_takes_one_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seconds in ("0", "-5", "nan", "soon"):
        assert "--seconds" in refused(capsys, ["measure", f"--seconds={seconds}"])
    assert "measured: --out must be a new or empty folder" in refused(capsys, ["measure"])
    assert "--device" in refused(capsys, ["measure", "--device", "tpu"])
    assert "--ranks must be at most" in refused(
        capsys, ["measure", "--out", "new", "--device", "cpu", "--ranks", "999"]
    )
    assert "--check needs a system file" in refused(capsys, ["measure", "--check", "none.yaml"])
    assert "leave --out and --dtype away" in refused(capsys, ["measure", "--check", "x.yaml", "--out", "new"])
    assert "--name for one of your own" in refused(capsys, ["calibrate"])
    (folder / "device.json").write_text("{}")
    assert "device.json: not as search measure writes it" in refused(capsys, ["calibrate", "--name", "x"])
    (folder / "device.json").unlink()
    assert "name some, or run search measure" in refused(capsys, ["calibrate", "--name", "x"])
    assert "has device.json, but this has none" in refused(capsys, ["calibrate", "measured", "--name", "x"])
    assert not (tmp_path / "new").exists()


def test_without_torch_one_line_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else find(name, *a))
    assert "pip install 'trainspace[capture]'" in refused(capsys, ["measure"])


def test_the_model_that_is_run_has_the_parameters_of_the_one_that_is_predicted(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "--name", "x", "-o", "x.yaml", "--json"]) == 0
    system = system_from_mapping(yaml.safe_load((tmp_path / "x.yaml").read_text()))
    for task in tasks(system):
        assert num_parameters(task.model, task.seq) == task.model.num_parameters()
