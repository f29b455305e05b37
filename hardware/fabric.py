"""Reads the names of links: FABRIC[-GENERATION][-NxRATEg][-NIC]. Knows the grammar, not the numbers.

    nvlink5-1800-nvl72    NVLink 5, 1800 GB/s both ways per chip, 72 chips a domain
    ib-ndr-8x400g         InfiniBand NDR, eight 400 Gb/s ports a node
    roce-1600g            RoCE, 1600 Gb/s a node in all
    ib-hdr-cx6            InfiniBand HDR through ConnectX-6; number of ports left to the default
    xgmi-896-mesh         896 GB/s both ways per chip over its links to each of the others
    ici-1200-torus3-pod8960  two links along each of three axes, 1200 GB/s both ways per chip in all

A written rate wins over what generation or NIC suggest. `podN` and `spanN` are other spellings of `nvlN`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from hardware._errors import reject, reject_unknown
from hardware.topology import Shape

__all__ = ["Fabric", "FabricKind", "parse"]


class FabricKind(Enum):
    """Families of links; its value is the name used in files."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    HCCS = "hccs"
    UB = "ub"
    XGMI = "xgmi"
    ICI = "ici"
    NEURONLINK = "neuronlink"
    IB = "ib"
    ROCE = "roce"
    RDMA = "rdma"
    OMNIPATH = "omnipath"
    ETH = "eth"

    @property
    def is_network(self) -> bool:
        """Whether chips reach it through NICs of their node."""
        return self in _NETWORKS


_NETWORKS = {FabricKind.IB, FabricKind.ROCE, FabricKind.RDMA, FabricKind.OMNIPATH, FabricKind.ETH}
_SPELLINGS = {"infiniband": "ib", "opa": "omnipath", "ethernet": "eth", "rocev2": "roce"}
_GENERATIONS = ("qdr", "fdr", "edr", "hdr100", "hdr", "ndr200", "ndr", "xdr")
_NICS = ("cx4", "cx5", "cx6", "cx7", "cx8", "bf2", "bf3")

_NICS_RATE = re.compile(r"(\d+)x(\d+(?:\.\d+)?)g")
_TOTAL = re.compile(r"(\d+(?:\.\d+)?)g")
_DOMAIN = re.compile(r"(?:nvl|pod|span)(\d+)")
_SHAPE = re.compile(r"mesh|torus[1-9]")
_NUMBER = re.compile(r"(?:gen|v)?(\d+)")
_NIC = re.compile(r"(?:connectx|cx)-?(\d)|(?:bluefield|bf)-?(\d)")
_WORD = re.compile(r"[a-z][a-z0-9]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What a link's name states; None where it is silent.

    Attributes:
        both_ways_gb_per_s: of one chip, for scale-up links.
        node_gbit: Gb/s of a node in all, one way.
        num_nics, nic_gbit: the two factors of node_gbit, where given.
        domain: chips that share one scale-up domain; shape: how they are joined.
    """

    text: str
    kind: FabricKind
    generation: str | None = None
    both_ways_gb_per_s: float | None = None
    node_gbit: float | None = None
    num_nics: int | None = None
    nic_gbit: float | None = None
    domain: int | None = None
    shape: Shape | None = None
    nic: str | None = None
    remarks: tuple[str, ...] = field(default=())


def parse(text: str) -> Fabric:
    """Read one name of a link.

    >>> f = parse("ib-hdr-8x200g"); f.kind, f.generation, f.node_gbit
    (<FabricKind.IB: 'ib'>, 'hdr', 1600.0)
    >>> parse("nvlink5-1800-nvl72").domain
    72
    """
    clean = str(text).strip().lower()
    clean = re.sub(r"(connectx|bluefield)-(\d)", r"\1\2", clean)
    head, *rest = clean.split("-")
    found, remarks = _head(text, head), []
    for token in rest:
        for key, value in _token(text, token, found).items():
            if key in found:
                law = f"a link's name states each part once ({key})"
                reject(law, repr(text), "drop one of the two")
            found[key] = value
    if "nic" in found and found["nic"] not in _NICS:
        if "node_gbit" not in found:
            reject_unknown(f"part of link {text!r}:", found["nic"], (*_GENERATIONS, *_NICS, "NxRATEg", "RATEg"))
        remarks.append(f"{text}: NIC {found['nic']!r} is not in the catalogue; the fabric's efficiency is taken")
    return Fabric(text=str(text), remarks=tuple(remarks), **found)  # type: ignore[arg-type]


def _head(text: str, head: str) -> dict[str, object]:
    head = _SPELLINGS.get(head, head)
    match = re.fullmatch(r"([a-z]+)(\d*)", head)
    kinds = {kind.value: kind for kind in FabricKind}
    if match is None or match[1] not in kinds or (match[2] and kinds[match[1]].is_network):
        reject_unknown(f"fabric of link {text!r}:", head, kinds)
    found: dict[str, object] = {"kind": kinds[match[1]]}
    if match[2]:
        found["generation"] = match[2]
    return found


def _token(text: str, token: str, found: dict[str, object]) -> dict[str, object]:
    """What one part of a name states."""
    if match := _NICS_RATE.fullmatch(token):
        count, rate = int(match[1]), float(match[2])
        _above_zero(text, count * rate)
        return {"num_nics": count, "nic_gbit": rate, "node_gbit": count * rate}
    if match := _TOTAL.fullmatch(token):
        return {"node_gbit": _above_zero(text, float(match[1]))}
    if match := _DOMAIN.fullmatch(token):
        return {"domain": int(_above_zero(text, float(match[1])))}
    if _SHAPE.fullmatch(token):
        return {"shape": Shape.parse(token)}
    if token in _GENERATIONS:
        return {"generation": token}
    if match := _NIC.fullmatch(token):
        return {"nic": f"cx{match[1]}" if match[1] else f"bf{match[2]}"}
    kind = found["kind"]
    assert isinstance(kind, FabricKind)
    if match := _NUMBER.fullmatch(token):
        if token[0] in "gv" or (int(match[1]) < 10 and not kind.is_network and "generation" not in found):
            return {"generation": match[1]}
        if not kind.is_network:
            return {"both_ways_gb_per_s": _above_zero(text, float(match[1]))}
    if _WORD.fullmatch(token):
        return {"nic": token}
    reject_unknown(
        f"part of link {text!r}:", token, (*_GENERATIONS, *_NICS, "NxRATEg", "RATEg", "nvlN", "mesh", "torusN")
    )


def _above_zero(text: str, value: float) -> float:
    if value <= 0:
        reject("a link's rates and counts are above 0", repr(text), "write it like ib-ndr-8x400g")
    return value
