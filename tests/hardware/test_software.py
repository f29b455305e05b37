"""Generations of software: what they change of a system, and what is refused."""

import pytest

from hardware.catalog import cluster, system_from_mapping
from hardware.software import SoftwareSpec, software, software_names

CHANGES = ("dense_layer_s", "routed_layer_s", "attention_share", "async_tensor_parallel")


def test_every_generation_changes_something_and_says_where_it_comes_from():
    for name in software_names():
        known = software(name)
        changed = {key for key in CHANGES if getattr(known, key)}
        assert changed
        assert set(known.sources) == changed


def test_old_kernels_slow_the_chips_that_are_named_and_no_others():
    old = software("fsdp_2023")
    slowed = cluster("dgx_h100").running(old).chip
    assert slowed.attention_efficiency == old.attention_share["h100"]
    assert "fsdp_2023" in slowed.sources["attention_efficiency"]
    assert cluster("dgx_b200").running(old).chip == cluster("dgx_b200").chip


def test_a_system_names_its_software():
    named = system_from_mapping({"cluster": "dgx_h100", "software": "megatron_moe"})
    assert named == cluster("dgx_h100").running(software("megatron_moe"))
    assert named != cluster("dgx_h100")


def test_each_segment_runs_it():
    both = {"segments": [{"cluster": "dgx_h100", "num_chips": 8}, {"cluster": "dgx_a100", "num_chips": 8}]}
    old = software("fsdp_2023")
    chips = [segment.chip for segment in system_from_mapping(both).running(old).segments]
    assert [chip.attention_efficiency for chip in chips] == [old.attention_share[n] for n in ("h100", "a100")]


@pytest.mark.parametrize(
    ("given", "law"),
    [
        ("megatron_mo", "megatron_moe"),
        (3, r"system\.software must be a name, but got 3"),
    ],
)
def test_software_that_is_not_known_is_refused(given, law):
    with pytest.raises(ValueError, match=law):
        system_from_mapping({"cluster": "dgx_h100", "software": given})


@pytest.mark.parametrize(
    "wrong", [{"dense_layer_s": -1e-3}, {"routed_layer_s": float("inf")}, {"attention_share": {"h100": 1.2}}]
)
def test_figures_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="software x: "):
        SoftwareSpec(name="x", **wrong)
