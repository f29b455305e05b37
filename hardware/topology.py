"""States how the chips of a domain are joined, and what share of its links a group of them reaches. Prices nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hardware._errors import reject
from hardware.link import Collective

__all__ = ["SWITCHED", "Shape", "Topology"]


class Topology(Enum):
    """Shapes of a domain; its value is the name used in files."""

    SWITCH = "switch"  # every chip reaches every other with all its links
    MESH = "mesh"  # a chip has its own links to each of the others
    TORUS = "torus"  # a chip has two links along each axis, and axes close to rings


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a tier joins its units: `num_axes` counts for a torus only.

    `reach` is the share of a chip's links that a group can keep busy at once, so that `bytes_per_s` of a link stays
    what all of a chip's links carry together.
    """

    topology: Topology = Topology.SWITCH
    num_axes: int = 1

    def __post_init__(self) -> None:
        if self.num_axes < 1 or (self.num_axes > 1 and self.topology is not Topology.TORUS):
            law = "a torus has at least one axis, and only a torus has several"
            reject(law, f"{self.num_axes} axes of a {self.topology.value}", "write torus2 or torus3")

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `switch`, `mesh` or `torusN`; ValueError names them.

        >>> Shape.parse("torus3").num_axes
        3
        """
        kind, axes = text.rstrip("0123456789"), text[len(text.rstrip("0123456789")) :]
        known = {item.value: item for item in Topology}
        if kind not in known or (kind == Topology.TORUS.value) != bool(axes):
            reject("a shape is switch, mesh or torusN with its number of axes", repr(text), "write it like torus3")
        return cls(topology=known[kind], num_axes=int(axes or 1))

    def __str__(self) -> str:
        return f"{self.topology.value}{self.num_axes if self.topology is Topology.TORUS else ''}"

    def reach(self, members: NDArray[np.float64], units: float, collective: Collective) -> NDArray[np.float64]:
        """Share of its links that each of `members` of a domain of `units` uses in one collective, in (0, 1].

        A hop from one chip to the next: one link. Mesh: those to the other members. Torus: a group lies along as few
        axes of the domain as hold it, on all of whose links it moves at once; where it covers a part of one axis only,
        the ring does not close and half of its links are idle. In an all-to-all, traffic passes through chips on the
        way: on a ring of L each link carries L/8 of what a chip sends (Dally and Towles, Principles and Practices of
        Interconnection Networks, 2004, chapter 3), which is L/4 of what its two links would take if neighbours were
        all that it sent to. Neglected: axes of unequal length, and what other groups send through the same links.
        """
        n = np.asarray(members, dtype=np.float64)
        if self.topology is Topology.SWITCH or units <= 1:
            return np.ones_like(n)
        if self.topology is Topology.MESH:
            others = np.clip(n - 1.0, 1.0, units - 1.0)
            return np.asarray((np.ones_like(n) if collective is Collective.P2P else others) / (units - 1.0))
        d = self.num_axes
        if collective is Collective.P2P:
            return np.full_like(n, 0.5 / d)
        side = units ** (1.0 / d)
        # A hair below the exact power, so that rounding of the root does not open another axis.
        used = np.clip(np.ceil(np.log(np.maximum(n, 1.0)) / np.log(side) - 1e-9), 1.0, d)
        share = used / d * np.where(n < side * (1.0 - 1e-9), 0.5, 1.0)
        if collective is Collective.ALL_TO_ALL:
            share = share / np.maximum(1.0, used * n ** (1.0 / used) / 4.0)
        return np.asarray(share)


SWITCHED = Shape()
