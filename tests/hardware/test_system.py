"""Systems: which tiers a rank group spans, against counting the ranks; totals; what is refused."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware import catalog
from hardware.dtype import DType
from hardware.link import Collective, LinkSpec
from hardware.site import Site
from hardware.system import UNBOUNDED, SystemSpec, Tier


def wire(name="wire", rate=100e9):
    return LinkSpec(name=name, bytes_per_s=rate, latency_s=1e-6, efficiency=0.8, source="test")


def system(spans=(8, UNBOUNDED), num_chips=512, **changes):
    tiers = tuple(Tier(name=f"t{i}", span=span, link=wire()) for i, span in enumerate(spans))
    chip = catalog.chip("h100-80g-sxm")
    return SystemSpec(name="test", chip=chip, num_chips=num_chips, tiers=tiers, chips_per_node=8, **changes)


def fullest_domains(size, stride, span, num_chips):
    """By enumeration: for every group of the whole system, the most members that share one domain."""
    block = size * stride
    groups = [base + i + stride * np.arange(size) for base in range(0, num_chips, block) for i in range(stride)]
    return {int(np.bincount(ranks // span).max()) for ranks in groups}


@pytest.mark.parametrize("spans", [(8, UNBOUNDED), (8, 64, UNBOUNDED), (2, 8, 512), (512,), (1, 512)])
def test_members_equal_a_count_of_the_ranks_for_every_power_of_two(spans):
    s = system(spans)
    powers = [2**k for k in range(10)]
    for size in powers:
        for stride in (x for x in powers if size * x <= 512):
            counted = [fullest_domains(size, stride, min(span, 512), 512) for span in spans]
            assert [{int(m)} for m in s.members(size, stride)] == counted, (size, stride)


@pytest.mark.parametrize(
    ("size", "stride"), [(3, 24), (9, 8), (6, 12), (72, 1), (24, 3), (2, 72), (4, 144), (144, 1), (8, 72)]
)
def test_members_equal_a_count_of_the_ranks_in_a_domain_of_72(size, stride):
    s = system((72, UNBOUNDED), 1152)
    assert {int(s.members(size, stride)[0])} == fullest_domains(size, stride, 72, 1152)


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([4, 8, 72]))
def test_members_never_exceed_what_some_domain_really_holds(size, stride, span):
    s = system((span, UNBOUNDED), size * stride)
    assert s.members(size, stride)[0] <= max(fullest_domains(size, stride, span, size * stride))


def test_members_of_arrays_are_those_of_their_elements():
    s = system((8, 64, UNBOUNDED))
    sizes, strides = np.array([[1, 8, 64], [2, 16, 3]]), np.array([1, 4, 8])
    held = s.members(sizes, strides)
    assert held.shape == (2, 3, 3)
    assert held.dtype == np.float64
    for i, j in np.ndindex(2, 3):
        assert held[i, j].tolist() == s.members(sizes[i, j], strides[j]).tolist()


def test_the_last_tier_holds_all_and_counts_never_fall_outwards():
    held = system((8, 64, UNBOUNDED)).members(np.arange(1, 65)[:, None], np.arange(1, 9))
    assert (held[..., -1] == np.arange(1, 65)[:, None]).all()
    assert (np.diff(held, axis=-1) >= 0).all()


@pytest.mark.parametrize(
    ("size", "stride", "tier"),
    [(1, 1, 0), (1, 512, 0), (8, 1, 0), (2, 4, 0), (2, 8, 1), (16, 1, 1), (8, 8, 1), (9, 8, 2)],
)
def test_the_tier_of_a_group_is_the_innermost_that_holds_it(size, stride, tier):
    assert system((8, 64, UNBOUNDED)).tier_of(size, stride) == tier


def test_a_group_larger_than_the_system_still_ends_in_the_last_tier():
    # Batches hold rows that rules reject later; their arithmetic must stay finite and consistent.
    assert system((8, 512)).members(1024, 8).tolist() == [1, 1024]


def test_tier_of_is_vectorised():
    assert system().tier_of(np.array([8, 16]), 1).tolist() == [0, 1]


def test_a_group_without_members_is_refused():
    with pytest.raises(ValueError, match="size and stride of at least 1"):
        system().members(0, 1)


def test_totals_count_every_chip():
    s = system(num_chips=20, price_usd_per_hour=3.6, failures_per_hour=3.6e-5)
    assert s.num_nodes == 3
    assert s.price_usd_per_s == pytest.approx(20 * 1e-3, rel=1e-12)
    assert s.failures_per_s == pytest.approx(20 * 1e-8, rel=1e-12)
    assert s.power_w == 20 * 700
    assert s.usable_hbm_bytes == s.chip.hbm_bytes * 0.96


def test_without_an_override_the_chip_sets_price_and_failures():
    s = system(num_chips=10)
    assert s.price_usd_per_s == 10 * s.chip.price_usd_per_hour / 3600
    assert s.failures_per_s == 10 * s.chip.failures_per_hour / 3600


def test_power_counts_hosts_network_and_building_and_co2_follows_the_grid():
    site = Site(host_w_per_chip=200, network_w_per_chip=100, pue=1.5, grid_kg_co2_per_kwh=0.36)
    s = system(num_chips=20, site=site)
    assert s.power_w == 20 * (700 + 200 + 100) * 1.5 == 30e3
    assert s.co2_kg_per_s * 3600 == pytest.approx(30 * 0.36, rel=1e-15)  # 30 kWh an hour


def test_electricity_is_paid_beside_the_price_where_it_is_given():
    s = system(num_chips=20, price_usd_per_hour=1.0, site=Site(electricity_usd_per_kwh=0.1))
    assert s.price_usd_per_s * 3600 == pytest.approx(20 + 14 * 0.1, rel=1e-15)  # 14 kW of chips


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pue": 0.9}, "pue must be at least 1 .*, but got 0.9; give power of the building"),
        ({"pue": float("inf")}, "pue must be at least 1"),
        ({"host_w_per_chip": -1.0}, "host_w_per_chip must be at least 0"),
        ({"grid_kg_co2_per_kwh": float("nan")}, "grid_kg_co2_per_kwh must be at least 0"),
        ({"electricity_usd_per_kwh": 1e308}, r"electricity_usd_per_kwh must be at least 0 and at most 1e\+09"),
        ({"pue": 1e308}, r"pue must be at least 1 and at most 1e\+09"),
    ],
)
def test_it_refuses_impossible_sites(changes, message):
    with pytest.raises(ValueError, match=message):
        Site(**changes)


def test_another_number_of_chips_changes_nothing_else():
    s = system()
    assert s.with_chips(64) == replace(s, num_chips=64)
    with pytest.raises(ValueError, match="num_chips must be at least 1, but got 0"):
        s.with_chips(0)


def test_a_system_pickles_and_hashes():
    s = catalog.cluster("gb200_nvl72")
    assert pickle.loads(pickle.dumps(s)) == s
    assert hash(s) == hash(pickle.loads(pickle.dumps(s)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spans": (64, 8)}, r"tier spans must increase from the inside out, but got \[64, 8\]; sort the tiers"),
        ({"spans": (8, 8)}, "must increase"),
        ({"spans": (8, 12, UNBOUNDED)}, r"must divide the next \(8 \| 12\)"),
        ({"spans": (8, 64)}, "must reach all 512 chips, but got a span of 64"),
        ({"spans": ()}, "at least one tier"),
        ({"spans": (0,)}, "span must be at least 1, but got 0"),
        ({"num_chips": 0}, "num_chips must be at least 1, but got 0"),
        ({"headroom": 1.0}, r"headroom must be in \[0, 1\), but got 1.0"),
        ({"price_usd_per_hour": -1.0}, "price_usd_per_hour must be at least 0"),
        ({"failures_per_hour": float("nan")}, "failures_per_hour must be at least 0"),
        ({"price_usd_per_hour": 1e308}, r"price_usd_per_hour must be at least 0 and at most 1e\+09, but got 1e\+308"),
    ],
)
def test_it_refuses_impossible_systems_naming_law_offence_and_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        system(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes_per_s": 0.0}, "bytes_per_s must be above 0"),
        ({"latency_s": -1.0}, "latency_s must be at least 0"),
        ({"efficiency": 1.5}, r"efficiency must be in \(0, 1\], but got 1.5"),
        ({"by_collective": {Collective.ALL_REDUCE: 0.0}}, r"all_reduce must be in \(0, 1\]"),
    ],
)
def test_it_refuses_impossible_links(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(wire(), **changes)


def test_a_link_answers_per_collective_and_falls_back_to_its_efficiency():
    nvlink = replace(wire(), by_collective={Collective.ALL_REDUCE: 0.9})
    assert nvlink.achieved_bytes_per_s(Collective.ALL_REDUCE) == 90e9
    assert nvlink.achieved_bytes_per_s(Collective.P2P) == nvlink.achieved_bytes_per_s() == 80e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hbm_bytes": 0.0}, "hbm_bytes must be finite, above 0"),
        ({"tdp_w": float("inf")}, "tdp_w must be finite"),
        ({"price_usd_per_hour": 1e308}, r"price_usd_per_hour must be finite, at least 0 and at most 1e\+09"),
        ({"hbm_bytes_per_s": 1e308}, r"hbm_bytes_per_s must be finite, above 0 and at most 1e\+24"),
        ({"attention_efficiency": 1.2}, "attention_efficiency must be finite, above 0 and at most 1, but got 1.2"),
        ({"context_bytes": 1e12}, "context_bytes must be below hbm_bytes"),
        ({"gemm_efficiency": {DType.BF16: 0.8}}, "must cover every format of matrix_flops_per_s, but got none for"),
        ({"matrix_flops_per_s": {DType.BF16: -1.0}}, r"matrix_flops_per_s\[bf16\] must be finite, above 0"),
    ],
)
def test_it_refuses_impossible_chips(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(catalog.chip("h100-80g-sxm"), **changes)
