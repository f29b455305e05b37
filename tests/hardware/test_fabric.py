"""Names of links and systems of measured rows: the whole grammar, its defaults listed, its errors."""

import csv
import itertools

import pytest

from hardware import catalog
from hardware._build import packed_span
from hardware.fabric import FabricKind, parse
from hardware.system import UNBOUNDED
from hardware.units import GB, GBIT

NETWORKS = ("ib", "roce", "rdma", "omnipath", "eth")
GENERATIONS = ("", "edr", "hdr", "ndr", "xdr")
RATES = ("", "4x100g", "8x200g", "1x400g", "8x800g", "1600g")
NICS = ("", "cx6", "connectx-7", "bf3")


def names(*parts):
    return ["-".join(filter(None, combination)) for combination in itertools.product(*parts)]


@pytest.mark.parametrize("gpu", ["a100-80g-sxm", "gb200", "ascend-910b"])
def test_every_network_the_grammar_allows_resolves(gpu):
    for name in names(NETWORKS, GENERATIONS, RATES, NICS):
        system, _ = catalog.system_of(gpu=gpu, gpus_per_node=8, n_gpus=512, inter_node=name)
        assert system.tiers[-1].span == UNBOUNDED
        assert system.tiers[-1].link.bytes_per_s > 0


@pytest.mark.parametrize("rate", ["4x100g", "8x200g", "8x400g", "2x25g"])
@pytest.mark.parametrize("per_node", [1, 4, 8])
def test_a_chip_gets_its_share_of_the_nodes_ports(rate, per_node):
    count, gbit = (int(x) for x in rate[:-1].split("x"))
    system, _ = catalog.system_of(gpu="h100-80g-sxm", gpus_per_node=per_node, n_gpus=64, inter_node=f"ib-ndr-{rate}")
    assert system.tiers[-1].link.bytes_per_s == count * gbit * GBIT / per_node


def test_a_rate_without_a_count_is_the_nodes_total():
    system, assumed = catalog.system_of(
        gpu="a100-40g-sxm", gpus_per_node=8, n_gpus=64, intra_node="nvlink3-600", inter_node="roce-1600g"
    )
    assert system.tiers[-1].link.bytes_per_s == 25 * GB
    assert assumed == ()


@pytest.mark.parametrize(
    ("gpu", "name", "gb_per_s"),
    [
        ("v100-32g", "nvlink2-300", 150), ("a100-80g-sxm", "nvlink3-600", 300), ("h100-80g-sxm", "nvlink4-900", 450),
        ("h800-80g-sxm", "nvlink-400", 200), ("b200-180g-sxm", "nvlink5-1800", 900), 
        ("gb200", "nvlink5-1800-nvl72", 900),
        ("h100-80g-sxm", "nvlink", 450), ("h800-80g-sxm", "nvlink", 200), ("h100-80g-sxm", "nvlink-4", 450),
        ("h100-80g-sxm", "pcie", 63), ("a100-80g-pcie", "pcie", 31.5), ("a100-80g-pcie", "pcie4", 31.5),
        ("a100-80g-pcie", "pcie-gen5", 63), ("ascend-910b", "hccs", 196), ("ascend-910c", "ub", 392),
        ("a100-80g-sxm", "nvlink4", 450), ("h100-80g-sxm", "nvlink-600", 300),
    ],
)  # fmt: skip
def test_scale_up_names_give_one_way_rates(gpu, name, gb_per_s):
    system, _ = catalog.system_of(gpu=gpu, gpus_per_node=8, n_gpus=8, intra_node=name)
    assert system.tiers[0].link.bytes_per_s == gb_per_s * GB


def test_every_listed_scale_up_link_resolves_under_its_own_name():
    for name in catalog.link_names():
        system, _ = catalog.system_of(gpu="h100-80g-sxm", gpus_per_node=8, n_gpus=8, intra_node=name)
        assert system.tiers[0].link.bytes_per_s == catalog.link(name).bytes_per_s
        assert system.tiers[0].link.efficiency == catalog.link(name).efficiency


def test_empty_cells_take_the_usual_node_and_are_listed():
    system, assumed = catalog.system_of(gpu="h100-80g-sxm", gpus_per_node="", n_gpus="", intra_node=None, inter_node="")
    assert system == catalog.system_of(gpu="h100-80g-sxm", gpus_per_node=8.0, n_gpus="8")[0]
    for column in ("gpus_per_node: 8", "n_gpus: 8", "intra_node: nvlink4-900", "inter_node: empty"):
        assert any(text.startswith(column) for text in assumed), column
    assert any("8 x 400 Gb/s a node" in text for text in assumed)


def test_a_complete_row_assumes_nothing():
    _, assumed = catalog.system_of(
        gpu="h100-80g-sxm", gpus_per_node="8", n_gpus="1024", intra_node="nvlink4-900", inter_node="ib-ndr-8x400g"
    )
    assert assumed == ()


def test_nan_cells_are_empty_cells():
    nan = float("nan")
    rows = [catalog.system_of(gpu="gb200", n_gpus=72, intra_node=x, inter_node=x) for x in (nan, "", None)]
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.parametrize(
    ("name", "part"),
    [("roce", "8 x 200 Gb/s"), ("ib-hdr", "8 x 200 Gb/s"), ("ib-edr", "8 x 100 Gb/s"), ("eth", "1 x 100 Gb/s"),
     ("omnipath", "8 x 100 Gb/s"), ("ib-cx7", "8 x 400 Gb/s"), ("ib-8x200g", "generation open")],
)  # fmt: skip
def test_a_missing_part_takes_a_default_that_is_listed(name, part):
    _, assumed = catalog.system_of(
        gpu="a100-80g-sxm", gpus_per_node=8, n_gpus=64, intra_node="nvlink3-600", inter_node=name
    )
    assert len(assumed) == 1
    assert assumed[0].startswith(f"{name}: ")
    assert part in assumed[0]


def test_an_unknown_nic_beside_a_written_rate_is_noted():
    _, assumed = catalog.system_of(
        gpu="a100-80g-sxm", gpus_per_node=8, n_gpus=64, intra_node="nvlink3-600", inter_node="eth-4x100g-efa"
    )
    assert assumed == ("eth-4x100g-efa: NIC 'efa' is not in the catalogue; the fabric's efficiency is taken",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ib-ndx-", "unknown part of link"),
        ("ib-ndx", "unknown part of link 'ib-ndx': 'ndx'; did you mean"),
        ("nvlnk4-900", "unknown fabric of link 'nvlnk4-900': 'nvlnk4'; did you mean 'nvlink'"),
        ("ib-hdr-ndr-8x400g", r"states each part once \(generation\)"),
        ("ib-8x400g-1600g", r"states each part once \(node_gbit\)"),
        ("ib-0x400g", "rates and counts are above 0"),
        ("", "unknown fabric"),
        ("ib-ndr-8x400", "unknown part of link"),
        ("ib4-8x400g", "unknown fabric"),
    ],
)
def test_a_name_outside_the_grammar_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"gpu": "h101"}, "unknown chip 'h101'"),
        ({"gpus_per_node": "0"}, "gpus_per_node must be a whole number of at least 1, but got '0'"),
        ({"n_gpus": "7.5"}, "n_gpus must be a whole number"),
        ({"n_gpus": "many"}, "n_gpus must be a whole number"),
        ({"intra_node": "nvlink9-900"}, "unknown generation of link 'nvlink9-900': 'nvlink9'"),
        ({"gpu": "ascend-910b", "intra_node": "nvlink"}, "ascend-910b has no nvlink, but got 'nvlink'"),
    ],
)
def test_a_row_that_states_the_impossible_is_refused(cells, message):
    with pytest.raises(ValueError, match=message):
        catalog.system_of(**{"gpu": "h100-80g-sxm", "n_gpus": 8, **cells})


def test_an_nvlink_domain_spans_nodes_and_jobs_fill_racks_alike():
    whole, _ = catalog.system_of(gpu="gb200", n_gpus=144, gpus_per_node=4, intra_node="nvlink5-1800-nvl72")
    part, assumed = catalog.system_of(gpu="gb200", n_gpus=256, gpus_per_node=4, intra_node="nvlink5-1800-nvl72")
    assert (whole.tiers[0].span, whole.num_nodes) == (72, 36)
    assert part.tiers[0].span == 64
    assert any("64 of the 72 chips" in text for text in assumed)


@pytest.mark.parametrize(
    ("num_chips", "span"),
    [(4, 72), (72, 72), (96, 48), (128, 64), (144, 72), (512, 64), (576, 72), (2048, 64), (76, 72)],
)
def test_a_domain_is_used_in_whole_nodes_that_fill_every_domain_alike(num_chips, span):
    assert packed_span(72, 4, num_chips) == span


def test_a_domain_that_the_name_leaves_open_is_the_chips_own():
    system, assumed = catalog.system_of(gpu="gb300", gpus_per_node=4, n_gpus=72, intra_node="nvlink5-1800")
    assert system.tiers[0].span == 72
    assert any("a domain of 72 chips" in text for text in assumed)


def test_bridges_on_pcie_cards_join_pairs():
    system, assumed = catalog.system_of(gpu="a100-80g-pcie", gpus_per_node=8, n_gpus=16, intra_node="nvlink3-600")
    assert [tier.span for tier in system.tiers] == [2, 8, UNBOUNDED]
    assert [tier.link.bytes_per_s / GB for tier in system.tiers[:2]] == [300, 31.5]
    assert any("bridges join 2" in text for text in assumed)


def test_a_scale_up_fabric_between_nodes_joins_them():
    system, _ = catalog.system_of(
        gpu="gb200", gpus_per_node=4, n_gpus=144, intra_node="nvlink5-1800-nvl4", inter_node="nvlink5-1800-nvl72"
    )
    assert [tier.span for tier in system.tiers] == [4, 72, UNBOUNDED]
    assert system.tiers[2].link.bytes_per_s == 50 * GB


def test_kinds_know_whether_they_need_a_nic():
    assert {kind.value for kind in FabricKind if kind.is_network} == set(NETWORKS)


def test_every_measured_row_resolves(shared):
    with (shared / "measured" / "train_steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = ("gpu", "gpus_per_node", "n_gpus", "intra_node", "inter_node")
    distinct = {tuple(row[c] for c in columns) for row in rows}
    assert len(distinct) > 20
    for cells in distinct:
        given = dict(zip(columns, cells, strict=True))
        system, assumed = catalog.system_of(**given)
        assert system.num_chips == int(given["n_gpus"] or system.num_chips)
        for column in ("gpus_per_node", "n_gpus", "intra_node", "inter_node"):
            listed = any(text.startswith(f"{column}: ") for text in assumed)
            assert listed == (not given[column]), (given, column)
