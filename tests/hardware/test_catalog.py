"""The catalogue: every number sourced, figures sane, lookups that fail helpfully."""

import datetime
import re
from pathlib import Path

import pytest
import yaml

from hardware import catalog
from hardware._library import node_defaults
from hardware.dtype import DType
from hardware.link import Collective
from hardware.system import UNBOUNDED
from hardware.units import GB, GIB

FOLDER = Path(catalog.__file__).parent / "catalog"
FILES = sorted(FOLDER.glob("*.yaml"))
H100 = catalog.chip("h100-80g-sxm")


def unsourced(node, sources, where="", covered=False):
    """Paths of numbers that stand in no block with a dated source."""
    if isinstance(node, dict):
        if "source" in node:
            entry = sources.get(node["source"], {})
            covered = bool(entry.get("text")) and re.fullmatch(r"\d{4}-\d{2}", str(entry.get("date"))) is not None
        return [p for key, value in node.items() for p in unsourced(value, sources, f"{where}.{key}", covered)]
    if isinstance(node, list):
        return [p for i, value in enumerate(node) for p in unsourced(value, sources, f"{where}[{i}]", covered)]
    is_number = isinstance(node, int | float) and not isinstance(node, bool)
    return [where] if is_number and not covered else []


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_no_number_lacks_a_dated_source(path):
    data = yaml.safe_load(path.read_text())
    sources = data.pop("sources")
    assert unsourced(data, sources) == []


def test_the_walk_finds_a_number_without_source_and_a_source_without_date():
    sources = {"dated": {"text": "a", "date": "2024-01"}, "undated": {"text": "b"}}
    assert unsourced({"a": {"value": 1}}, sources) == [".a.value"]
    assert unsourced({"a": {"value": 1, "source": "undated"}}, sources) == [".a.value"]
    assert unsourced({"a": {"value": 1, "source": "absent"}}, sources) == [".a.value"]
    assert unsourced({"a": [{"values": {"x": 1}, "source": "dated"}]}, sources) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_source_is_used_and_lies_in_the_past(path):
    data = yaml.safe_load(path.read_text())
    sources = data.pop("sources")
    used = set(re.findall(r"source: (\w+)", path.read_text()))
    assert used == set(sources)
    for entry in sources.values():
        assert str(entry["date"]) <= f"{datetime.date.today():%Y-%m}"


def test_the_chips_that_measured_rows_name_are_there():
    wanted = """v100-32g a100-40g-sxm a100-80g-sxm a100-80g-pcie h100-80g-sxm h100-96g-sxm-hbm2e-500w h100-95g-sxm-hbm2e
    h800-80g-sxm h20-96g h200-141g-sxm b200-180g-sxm b300-288g-sxm gb200 gb300 ascend-910b ascend-910c""".split()
    assert set(wanted) <= set(catalog.chip_names())


@pytest.mark.parametrize("name", catalog.chip_names())
def test_every_field_has_a_source_with_a_date(name):
    spec = catalog.chip(name)
    for key, text in spec.sources.items():
        assert re.search(r"\(\d{4}-\d{2}\)", text), key
    assert {"matrix_flops_per_s", "hbm_bytes", "tdp_w", "gemm_efficiency", "hbm_efficiency"} <= set(spec.sources)


@pytest.mark.parametrize("name", catalog.chip_names())
def test_price_and_failure_rate_are_marked_as_assumptions(name):
    spec = catalog.chip(name)
    for key in ("price_usd_per_hour", "failures_per_hour"):
        assert any(a.startswith(f"{name} {key}:") for a in spec.assumptions)


def test_the_failure_rate_is_that_of_the_llama_3_report():
    # 419 interruptions, 54 days, 16,384 chips; the catalogue keeps four digits.
    assert H100.failures_per_hour == pytest.approx(419 / (54 * 24 * 16384), rel=5e-4)


@pytest.mark.parametrize("name", catalog.chip_names())
def test_peaks_are_ordered_as_silicon_is(name):
    peaks = catalog.chip(name).matrix_flops_per_s
    half = peaks.get(DType.BF16, peaks.get(DType.FP16))
    assert peaks.get(DType.FP16, half) == half
    if DType.TF32 in peaks:
        assert peaks[DType.TF32] == (half if name == "trainium2" else half / 2)
    for twice in (DType.FP8, DType.MXFP8, DType.INT8):
        if twice in peaks:
            # AMD rounds each figure to a tenth; a Trainium 2 does fp8 at 1.95 times bf16.
            assert peaks[twice] == pytest.approx(2 * half, rel=0.03 if name == "trainium2" else 1e-4)
    if DType.NVFP4 in peaks:
        assert peaks[DType.NVFP4] >= 2 * peaks[DType.FP8]
    assert catalog.chip(name).vector_flops_per_s[DType.FP32] < half


def test_peaks_are_dense():
    assert H100.peak(DType.BF16) == 989.4e12
    assert catalog.chip("a100-80g-sxm").peak(DType.BF16) == 312e12
    assert catalog.chip("b200-180g-sxm").peak(DType.FP8) == 4.5e15


def test_a_format_without_matrix_engine_runs_on_the_vector_engine():
    assert H100.peak(DType.FP32) == H100.vector_flops_per_s[DType.FP32]
    assert not H100.offers(DType.FP32)


def test_a_format_the_chip_lacks_is_refused_with_what_it_has():
    with pytest.raises(ValueError, match="a100-80g-sxm has bf16, fp16, fp32, int8, tf32, but got fp8; choose"):
        catalog.chip("a100-80g-sxm").peak(DType.FP8)


@pytest.mark.parametrize("name", catalog.chip_names())
def test_a_chip_reaches_its_host_at_less_than_the_port_carries(name):
    spec = catalog.chip(name)
    wire = {"3": 15.75, "4": 31.5, "5": 63.0}[node_defaults(name).pcie_generation] * GB
    if "NVLink-C2C" in spec.sources["host_bytes_per_s"] or "UB plane" in spec.sources["host_bytes_per_s"]:
        assert wire < spec.host_bytes_per_s < 225 * GB
    else:
        assert 0.75 * wire < spec.host_bytes_per_s < wire
    assert 10 * GB < spec.host_memory_bytes_per_s < spec.hbm_bytes_per_s
    assert spec.hbm_bytes < 1.5 * spec.host_memory_bytes  # 0.71 is the least: 288 GB beside a share of 212


def test_the_share_of_a_pcie_port_is_the_measured_one():
    # nvbandwidth of an A100: 24.8 of 31.5 GB/s, two digits; the other generations take the same share.
    for name, wire in (("v100-32g", 15.75), ("a100-80g-sxm", 31.5), ("h100-80g-sxm", 63.0)):
        assert catalog.chip(name).host_bytes_per_s / (wire * GB) == pytest.approx(24.8 / 31.5, rel=5e-3)


def test_memory_is_what_the_driver_offers():
    assert 79 * GIB < H100.hbm_bytes < 80 * GIB
    assert catalog.chip("h800-80g-sxm").hbm_bytes == H100.hbm_bytes
    assert catalog.chip("a100-40g-sxm").hbm_bytes < 40 * GIB


@pytest.mark.parametrize("name", ["h800-80g-sxm", "h20-96g", "b300-288g-sxm", "a100-80g-pcie"])
def test_an_inherited_efficiency_says_so(name):
    spec = catalog.chip(name)
    for key in ("gemm_efficiency", "attention_efficiency"):
        assert spec.sources[key].startswith("as ")
        assert any(a.startswith(f"{name} {key}: as ") for a in spec.assumptions)


def test_a_variant_differs_where_it_says_and_nowhere_else():
    pcie, sxm = catalog.chip("a100-80g-pcie"), catalog.chip("a100-80g-sxm")
    assert pcie.hbm_bytes_per_s < sxm.hbm_bytes_per_s
    assert pcie.tdp_w == 300
    assert pcie.matrix_flops_per_s == sxm.matrix_flops_per_s


def test_lookups_ignore_case_and_know_aliases():
    assert catalog.chip(" H20 ") is catalog.chip("h20-96g")
    assert catalog.cluster("DGX_H100") == catalog.cluster("dgx_h100")


@pytest.mark.parametrize(
    ("lookup", "name", "near"),
    [
        (catalog.chip, "h100-80g", "h100-80g-sxm"),
        (catalog.cluster, "dgx_h10", "dgx_h100"),
        (catalog.link, "nvlink4-90", "nvlink4-900"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(lookup, name, near):
    with pytest.raises(ValueError, match=f"unknown .*{name!r}; did you mean {near!r}"):
        lookup(name)


@pytest.mark.parametrize(
    ("name", "domain", "chips_per_node", "scale_up", "scale_out"),
    [
        ("v100_dgx2", 16, 16, 150, 6.25),
        ("dgx_a100", 8, 8, 300, 25),
        ("a100_pcie", 8, 8, 31.5, 3.125),
        ("dgx_h100", 8, 8, 450, 50),
        ("grand_teton_h100", 8, 8, 450, 50),
        ("dgx_h800", 8, 8, 200, 50),
        ("h20_8x", 8, 8, 450, 50),
        ("dgx_h200", 8, 8, 450, 50),
        ("dgx_b200", 8, 8, 900, 50),
        ("dgx_b300", 8, 8, 900, 100),
        ("gb200_nvl72", 72, 4, 900, 50),
        ("gb300_nvl72", 72, 4, 900, 100),
        ("ascend_910b_pod", 8, 8, 196, 25),
        ("ascend_910c_superpod", 384, 8, 392, 50),
        ("h100_96g_8x", 8, 8, 450, 50),
        ("mi300x_8x", 8, 8, 448, 50),
        ("mi355x_8x", 8, 8, 537.5, 50),
        ("tpu_v5p_pod", 8960, 4, 600, 6.25),
        ("tpu_v6e_pod", 256, 8, 400, 12.5),
    ],
)
def test_clusters_have_the_domains_and_one_way_rates_of_their_datasheets(
    name, domain, chips_per_node, scale_up, scale_out
):
    s = catalog.cluster(name)
    assert s.tiers[0].span == domain
    assert s.chips_per_node == chips_per_node
    assert [tier.link.bytes_per_s / GB for tier in s.tiers] == pytest.approx([scale_up, scale_out], rel=1e-12)
    assert s.assumptions == ()


def test_an_ultraserver_is_a_torus_in_each_of_four_instances_on_a_ring():
    s = catalog.cluster("trn2_ultraserver")
    assert [tier.span for tier in s.tiers] == [16, 64, UNBOUNDED]
    assert [tier.link.bytes_per_s / GB for tier in s.tiers] == [512, 128, 25]
    assert [str(tier.shape) for tier in s.tiers] == ["torus2", "torus1", "switch"]


def test_pcie_hosts_have_bridges_between_pairs():
    assert [tier.span for tier in catalog.cluster("h100_pcie_8x").tiers] == [2, 8, UNBOUNDED]


def test_a_chip_without_an_engine_for_a_format_is_told_at_once():
    for name, dtype in (("tpu-v5p", DType.FP8), ("mi300x", DType.MXFP8), ("trn2", DType.NVFP4)):
        with pytest.raises(ValueError, match=f"but got {dtype.value}; choose a precision recipe that the chip has"):
            catalog.chip(name).peak(dtype)


def test_a_cluster_takes_another_size_and_caches():
    assert catalog.cluster("dgx_h100", 64).num_chips == 64
    assert catalog.cluster("dgx_h100", 64) is catalog.cluster("dgx_h100", 64)
    assert catalog.cluster("dgx_h100", 64) == catalog.cluster("dgx_h100").with_chips(64)


def test_nvlink_efficiencies_follow_the_measured_bus_bandwidths():
    # Bus bandwidth of one node at 512 MiB, GB/s, median of both placements. Links are fitted from 1 MiB on, linear in
    # bytes, and mid-sized messages are slower than that: at 512 MiB the curve is up to 12 % below.
    for name, n, collective, measured in [
        ("nvlink3-600", 8, Collective.ALL_REDUCE, 218.8), ("nvlink3-600", 8, Collective.ALL_GATHER, 205.2),
        ("nvlink4-900", 8, Collective.ALL_REDUCE, 398.7), ("nvlink4-900", 8, Collective.ALL_GATHER, 335.4),
        ("nvlink5-1800", 8, Collective.ALL_REDUCE, 662.4), ("nvlink5-1800", 8, Collective.ALL_TO_ALL, 561.8),
        ("nvlink5-1800-nvl72", 4, Collective.ALL_GATHER, 570.7),
    ]:  # fmt: skip
        assert catalog.link(name).achieved_bytes_per_s(collective, n) == pytest.approx(measured * GB, rel=0.12)


def test_a_description_gives_field_value_with_unit_and_source():
    rows = {row.field: row for row in catalog.describe_chip("h800-80g-sxm")}
    assert rows["tdp_w"].value == "700 W"
    assert rows["hbm_bytes"].value == "79.6 GiB (85.5 GB)"
    assert "bf16 989.4" in rows["matrix_flops_per_s"].value
    assert rows["price_usd_per_hour"].value == "2 USD/h"
    assert rows["host_bytes_per_s"].value == "49.6 GB/s"
    assert all(row.source for row in rows.values() if row.field not in ("name", "vendor"))


def test_a_cluster_description_shows_its_tiers():
    ring = {row.field: row.value for row in catalog.describe_cluster("mi300x_8x")}
    assert ring["tiers[0]"].startswith("xgmi (mesh), 8 chips: 448 GB/s one way per chip")
    rows = {row.field: row.value for row in catalog.describe_cluster("gb200_nvl72")}
    assert rows["num_nodes"] == "144"
    assert rows["tiers[0]"].startswith("nvlink, 72 chips: 900 GB/s one way per chip")
    assert rows["tiers[1]"].startswith("ib, all chips: 50 GB/s one way per chip (400 Gb/s)")
    assert rows["power"] == "1,226.9 kW"  # (1200 + 467 + 108) * 576 * 1.2
    assert rows["grid"] == "0.473 kg CO2 per kWh"
