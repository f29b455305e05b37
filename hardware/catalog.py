"""Named chips and clusters, and systems described in place. The door to catalog/*.yaml; prices nothing."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hardware._build import build, system_of
from hardware._describe import Row, describe_chip, describe_system
from hardware._errors import reject_unknown
from hardware._inline import system_from_mapping as _from_mapping
from hardware._library import chip, chip_names, link, link_names, node_defaults, read, source_text
from hardware._sites import grid_names
from hardware.system import SystemSpec

__all__ = [
    "Row",
    "chip",
    "chip_names",
    "cluster",
    "cluster_names",
    "describe_chip",
    "describe_cluster",
    "describe_system",
    "grid_names",
    "link",
    "link_names",
    "system_from_mapping",
    "system_of",
    "usual_clusters",
    "usual_link",
]


def cluster_names() -> tuple[str, ...]:
    """The names of known clusters, in catalogue order."""
    return tuple(read("clusters")["clusters"])


def cluster(name: str, num_chips: int | None = None) -> SystemSpec:
    """The cluster of that name, with its usual or another number of chips.

    >>> cluster("dgx_h100", 64).num_nodes
    8
    """
    key = str(name).strip().lower()
    entries = read("clusters")["clusters"]
    if key not in entries:
        reject_unknown("cluster", name, entries)
    return _cluster(key, entries[key]["num_chips"] if num_chips is None else num_chips)


@lru_cache(maxsize=1024)
def _cluster(name: str, num_chips: int) -> SystemSpec:
    entry = read("clusters")["clusters"][name]
    return build(
        name=name,
        chip_spec=chip(entry["chip"]),
        base=entry["chip"],
        num_chips=num_chips,
        chips_per_node=entry["chips_per_node"],
        intra=entry["intra"],
        inter=entry["inter"],
    )


def usual_link(chip_name: str) -> str:
    """The name of the scale-up link of the node that a chip usually ships in.

    >>> usual_link("h100")
    'nvlink4-900'
    """
    return node_defaults(chip_name).intra


def usual_clusters(chip_name: str) -> tuple[str, ...]:
    """The clusters of the catalogue that are made of a chip.

    >>> usual_clusters("h200")
    ('dgx_h200',)
    """
    return tuple(name for name, entry in read("clusters")["clusters"].items() if entry["chip"] == chip(chip_name).name)


def describe_cluster(name: str) -> tuple[Row, ...]:
    """What is known of a cluster: field, value with its unit, source."""
    system = cluster(name)
    return describe_system(system, source=source_text("clusters", read("clusters")["clusters"][system.name]["source"]))


def system_from_mapping(mapping: str | dict[str, Any]) -> SystemSpec:
    """A system as a space file describes it: a cluster's name, a cluster with changes, or a description in full.

    >>> system_from_mapping({"cluster": "dgx_h100", "num_chips": 64, "chip": {"price_usd_per_hour": 3.0}}).num_nodes
    8
    """
    return _from_mapping(mapping, cluster)
