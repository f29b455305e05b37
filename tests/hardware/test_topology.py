"""Meshes and tori: what share of its links a group of chips reaches, against counting links."""

import numpy as np
import pytest

from estimator.cost.collective import collective, nested_members, point_to_point, point_to_point_loads, tier_loads
from estimator.op import Traffic
from hardware import catalog
from hardware.catalog import system_from_mapping
from hardware.link import Collective
from hardware.topology import SWITCHED, Shape, Topology

MESH = Shape.parse("mesh")
ALL = tuple(Collective)


def share(shape, members, units, kind=Collective.ALL_GATHER):
    return float(shape.reach(np.asarray(float(members)), units, kind))


@pytest.mark.parametrize("kind", ALL)
def test_behind_switches_every_group_has_all_links(kind):
    assert [share(SWITCHED, n, 8, kind) for n in (1, 2, 5, 8)] == [1.0] * 4


def test_in_a_mesh_a_group_has_the_links_to_its_members():
    assert [share(MESH, n, 8) for n in (2, 3, 5, 8)] == [1 / 7, 2 / 7, 4 / 7, 1.0]
    assert share(MESH, 8, 8, Collective.P2P) == 1 / 7


def links_of(coordinates, sides):
    """By enumeration: which of a chip's links (two an axis) lead to another chip of the group, fewest over chips."""
    group = set(coordinates)

    def busy(chip):
        steps = ((a, d) for a in range(len(sides)) for d in (1, -1))
        return sum(tuple((c + d * (i == a)) % sides[i] for i, c in enumerate(chip)) in group for a, d in steps)

    return min(busy(chip) for chip in group)


@pytest.mark.parametrize(("axes", "side"), [(1, 4), (2, 4), (3, 4), (2, 16), (3, 8)])
def test_on_a_torus_a_group_that_covers_whole_axes_has_their_links(axes, side):
    shape, sides = Shape(topology=Topology.TORUS, num_axes=axes), (side,) * axes
    for covered in range(1, axes + 1):
        box = [side if i < covered else 1 for i in range(axes)]
        group = [tuple(int(x) for x in chip) for chip in np.ndindex(*box)]
        counted = links_of(group, sides) / (2 * axes)
        assert share(shape, side**covered, side**axes) == pytest.approx(counted, rel=1e-12)


def test_a_part_of_an_axis_does_not_close_to_a_ring():
    shape = Shape(topology=Topology.TORUS, num_axes=2)
    assert share(shape, 4, 256) == 0.25  # one of four links leads on from the last chip of a line
    assert links_of([(i, 0) for i in range(4)], (16, 16)) == 1


@pytest.mark.parametrize("side", [4, 8, 16, 32])
def test_an_all_to_all_on_a_ring_takes_what_its_links_carry(side):
    # By counting: every chip of a ring sends 1/L of its buffer to each chip, the shorter way round.
    load = 0.0
    for away in range(1, side):
        hops = min(away, side - away)
        load += hops / side  # hops that a chip's buffer makes, which the 2 L links of L chips share
    per_link = load / 2
    alone = 1.0 / 2  # what a link would carry if a chip's whole buffer went to its two neighbours
    shape = Shape(topology=Topology.TORUS)
    assert share(shape, side, side, Collective.ALL_TO_ALL) == pytest.approx(alone / per_link, rel=1e-12)


@pytest.mark.parametrize("text", ["ring", "torus", "mesh2", "switch3", "torus0", ""])
def test_other_shapes_are_refused(text):
    with pytest.raises(ValueError, match="shape is switch, mesh or torusN|at least one axis"):
        Shape.parse(text)


def test_a_ring_over_part_of_a_mesh_takes_longer_by_the_links_it_lacks():
    s = catalog.cluster("mi300x_8x", 8)
    two, eight = (collective(Traffic.ALL_GATHER, s, n, 1.0).per_byte for n in (2.0, 8.0))
    assert two / eight == pytest.approx((1 / 2) / (7 / 8) * 7, rel=1e-12)  # (n - 1)/n over 1/7 and 7/7 of the links
    hop = point_to_point(s, np.asarray(1.0))
    assert float(hop.per_byte) == pytest.approx(1 / (64e9 * 0.70), rel=1e-12)  # one of seven links of 64 GB/s
    assert point_to_point_loads(s, 1.0).tolist() == [1 / 7, 0.0]


def test_loads_are_the_shares_of_links_in_use():
    s = catalog.cluster("tpu_v5p_pod", 512)
    one_axis = tier_loads(Traffic.ALL_GATHER, s, nested_members(s, [(np.asarray(8.0), np.asarray(1.0))]))
    assert one_axis.tolist() == [pytest.approx(1 / 3, rel=1e-12), 0.0]


def test_a_described_tier_may_have_a_shape():
    tier = {"name": "ici", "bytes_per_s": "600 GB/s", "latency_s": 1e-6, "efficiency": 0.9, "shape": "torus3"}
    s = system_from_mapping({"chip": "tpu-v5p", "num_chips": 64, "chips_per_node": 4, "tiers": [tier]})
    assert str(s.tiers[0].shape) == "torus3"
    with pytest.raises(ValueError, match="a shape is switch, mesh or torusN"):
        system_from_mapping(
            {"chip": "tpu-v5p", "num_chips": 64, "chips_per_node": 4, "tiers": [{**tier, "shape": "cube"}]}
        )
