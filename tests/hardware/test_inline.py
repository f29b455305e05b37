"""Systems described in a space file: by name, by name with changes, in full; what is refused and how."""

import pytest
import yaml

from hardware import catalog
from hardware.catalog import system_from_mapping
from hardware.dtype import DType
from hardware.link import Collective
from hardware.system import UNBOUNDED
from hardware.units import US

FULL = """
name: lab
chip: h100-80g-sxm
num_chips: 32
chips_per_node: 4
tiers:
  - {name: nvlink, span: 4, bytes_per_s: 450 GB/s, latency_s: 1e-6, efficiency: 0.8, by_collective: {all_reduce: 0.9}}
  - {name: ib, bytes_per_s: 25.0e+9, latency_s: 5 us, efficiency: 0.9, source: our own test}
"""


def full(**changes):
    return {**yaml.safe_load(FULL), **changes}


def test_a_name_is_a_cluster():
    assert system_from_mapping("dgx_h100") == catalog.cluster("dgx_h100")
    assert system_from_mapping({"cluster": "dgx_h100"}) == system_from_mapping({"name": "dgx_h100"})


def test_changes_are_laid_over_the_cluster():
    system = system_from_mapping(
        {
            "cluster": "dgx_h800",
            "num_chips": 64,
            "headroom": 0.1,
            "price_usd_per_hour": 3,
            "failures_per_hour": "2e-5 1/h",
            "chip": {"hbm_bytes": "96 GB", "gemm_efficiency": {"bf16": 0.5}},
        }
    )
    usual = catalog.cluster("dgx_h800")
    assert (system.num_chips, system.headroom, system.price_usd_per_hour, system.failures_per_hour) == (
        64,
        0.1,
        3,
        2e-5,
    )
    assert system.chip.hbm_bytes == 96e9
    assert system.chip.gemm_efficiency == {**usual.chip.gemm_efficiency, DType.BF16: 0.5}
    assert system.chip.sources["hbm_bytes"] == "given in the system's description"
    assert system.chip.sources["tdp_w"] == usual.chip.sources["tdp_w"]
    assert system.tiers == usual.tiers


def test_a_site_is_laid_over_the_clusters_own():
    system = system_from_mapping(
        {
            "cluster": "dgx_h100",
            "pue": 1.1,
            "grid": "France",
            "host_w_per_chip": "0.5 kW",
            "electricity_usd_per_kwh": 0.1,
        }
    )
    usual = catalog.cluster("dgx_h100").site
    assert (system.site.pue, system.site.host_w_per_chip, system.site.electricity_usd_per_kwh) == (1.1, 500, 0.1)
    assert system.site.grid_kg_co2_per_kwh == 0.056
    assert system.site.network_w_per_chip == usual.network_w_per_chip == pytest.approx(108, rel=1e-15)
    assert system.site.sources["grid_kg_co2_per_kwh"].startswith("france: Ember")
    assert system.site.sources["pue"] == "given in the system's description"
    own = system_from_mapping({"cluster": "dgx_h100", "grid_kg_co2_per_kwh": "20 g/kWh"})
    assert own.site.grid_kg_co2_per_kwh == 0.02


def test_a_described_system_takes_the_site_of_its_chip_or_a_share_of_its_power():
    known, mine = system_from_mapping(full()), system_from_mapping(full(chip={"like": "h100-80g-sxm", "name": "mine"}))
    assert known.site.host_w_per_chip == 575
    assert mine.site.host_w_per_chip == 0.8 * 700
    assert known.site.network_w_per_chip == pytest.approx(0.27 * 200, rel=1e-14)  # 25 GB/s are 200 Gb/s
    assert system_from_mapping(full(host_w_per_chip=100)).site.host_w_per_chip == 100


def test_a_given_field_is_no_longer_an_assumption():
    system = system_from_mapping({"cluster": "dgx_h100", "chip": {"price_usd_per_hour": 3.0}})
    assert not any(" price_usd_per_hour:" in text for text in system.chip.assumptions)
    assert any(" failures_per_hour:" in text for text in system.chip.assumptions)


def test_another_chip_can_sit_in_a_known_cluster():
    assert system_from_mapping({"cluster": "dgx_h100", "chip": "h200-141g-sxm"}).chip is catalog.chip("h200-141g-sxm")


def test_a_full_description_has_every_part():
    system = system_from_mapping(yaml.safe_load(FULL))
    assert (system.name, system.num_chips, system.num_nodes) == ("lab", 32, 8)
    assert [tier.span for tier in system.tiers] == [4, UNBOUNDED]
    assert system.tiers[0].link.achieved_bytes_per_s(Collective.ALL_REDUCE) == 0.9 * 450e9
    assert system.tiers[0].link.latency_s == 1e-6  # YAML 1.1 reads 1e-6 as a string
    assert system.tiers[1].link.latency_s == 5 * US
    assert system.tiers[1].link.source == "our own test"


def test_a_chip_can_be_described_in_full():
    fields = {
        "name": "mine", "matrix_flops_per_s": {"bf16": "100 TFLOPS"}, "vector_flops_per_s": {"fp32": 10e12},
        "num_sms": 64, "hbm_bytes": "32 GB", "hbm_bytes_per_s": "1 TB/s", "tdp_w": 300, "price_usd_per_hour": 1,
        "failures_per_hour": 0, "launch_s": "5 us", "context_bytes": "1 GB", "gemm_efficiency": {"bf16": 0.8},
        "attention_efficiency": 0.5, "hbm_efficiency": 0.9, "gemm_slowdown": 1.1,
    }  # fmt: skip
    chip = system_from_mapping(full(chip=fields)).chip
    assert (chip.name, chip.vendor, chip.peak(DType.BF16), chip.assumptions) == ("mine", "unstated", 100e12, ())
    assert chip.host_bytes_per_s == chip.host_memory_bytes == 0  # unknown
    hosted = full(chip={**fields, "host_bytes_per_s": "25 GB/s", "host_memory_bytes": "100 GB"})
    assert system_from_mapping(hosted).chip.host_bytes_per_s == 25e9
    del fields["tdp_w"]
    with pytest.raises(ValueError, match="every field, but got none of tdp_w; .* `like: NAME`"):
        system_from_mapping(full(chip=fields))


def test_a_described_chip_can_start_from_a_known_one():
    chip = system_from_mapping(full(chip={"like": "b200-180g-sxm", "name": "mine", "tdp_w": 900})).chip
    assert (chip.name, chip.tdp_w, chip.num_sms) == ("mine", 900, 148)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"cluster": "dgx_h100", "num_chip": 8}, "unknown key of system: 'num_chip'; did you mean 'num_chips'"),
        ({"cluster": "dgx_h1000"}, "unknown cluster 'dgx_h1000'; did you mean 'dgx_h100'"),
        ({"num_chips": 8}, "names one cluster .* but got the keys num_chips"),
        ({"cluster": "dgx_h100", "name": "x"}, "names one cluster"),
        ({"cluster": 5}, "system.cluster must be a name, but got 5"),
        ({"cluster": "dgx_h100", "num_chips": 0}, "system.num_chips must be a whole number of at least 1, but got 0"),
        ({"cluster": "dgx_h100", "num_chips": 1.5}, "system.num_chips must be a whole number"),
        ({"cluster": "dgx_h100", "num_chips": True}, "system.num_chips must be a number, but got True"),
        ({"name": 5, "segments": ["dgx_h100", "dgx_a100"]}, "system.name must be a line of 1 to 100 char.*, but got 5"),
        ({"name": "a\nb", "segments": ["dgx_h100", "dgx_a100"]}, "system.name must be a line"),
        (full(name="x" * 101), "system.name must be a line"),
        (full(name=""), "system.name must be a line"),
        ({"cluster": "dgx_h100", "chip": {"like": "gb200", "name": []}}, r"system.chip.name .*, but got \[\]"),
        ({"cluster": "dgx_h100", "chip": {"hbm": 1}}, "unknown key of system.chip: 'hbm'; did you mean 'hbm_bytes'"),
        ({"cluster": "dgx_h100", "chip": {"hbm_bytes": "80 GX"}}, "system.chip.hbm_bytes: a quantity is"),
        ({"cluster": "dgx_h100", "chip": {"hbm_bytes": "5 us"}}, "got '5 us'; units here are B, KB, MB"),
        ({"cluster": "dgx_h100", "chip": {"hbm_bytes_per_s": "5 GB"}}, "got '5 GB'; units here are B/s, MB/s"),
        ({"cluster": "dgx_h100", "chip": {"matrix_flops_per_s": {"bf16": "5 W"}}}, "units here are FLOPS"),
        ({"cluster": "dgx_h100", "chip": {"hbm_efficiency": "0.8 s"}}, "here it has no unit"),
        ({"cluster": "dgx_h100", "chip": {"gemm_efficiency": {"bf61": 1}}}, "'bf61'; did you mean 'bf16'"),
        ({"cluster": "dgx_h100", "chip": {"gemm_efficiency": 0.8}}, "gemm_efficiency must be a mapping"),
        ({"cluster": "dgx_h100", "chip": 7}, "system.chip must be a mapping"),
        ({"cluster": "dgx_h100", "grid": "frence"}, "unknown grid 'frence'; did you mean 'france'"),
        ({"cluster": "dgx_h100", "grid": "france", "grid_kg_co2_per_kwh": 0.1}, "by its CO2 .* but got both; drop one"),
        ({"cluster": "dgx_h100", "pue": "1.2 W"}, "here it has no unit"),
        ({"cluster": "dgx_h100", "headroom": 2}, r"headroom must be in \[0, 1\)"),
        (["dgx_h100"], "system must be a mapping"),
        (full(tiers=[]), "system.tiers must be a list of tiers"),
        (full(cluster="dgx_h100"), "unknown key of system: 'cluster'"),
        (full(tiers=[{"name": "x", "span": 8, "bandwidth": 1}]), r"unknown key of system.tiers\[0\]: 'bandwidth'"),
        (full(tiers=[{"name": "x"}]), r"system.tiers\[0\] needs bytes_per_s"),
        ({"chip": "h100-80g-sxm", "tiers": [{}]}, "needs chips_per_node, but got none; add system.chips_per_node"),
    ],
)
def test_it_refuses_what_it_does_not_know_naming_the_key(mapping, message):
    with pytest.raises(ValueError, match=message):
        system_from_mapping(mapping)


def test_the_catalogue_is_not_changed_by_descriptions():
    before = dict(catalog.chip("h100-80g-sxm").gemm_efficiency)
    system_from_mapping({"cluster": "dgx_h100", "chip": {"gemm_efficiency": {"bf16": 0.1}}})
    assert dict(catalog.chip("h100-80g-sxm").gemm_efficiency) == before
