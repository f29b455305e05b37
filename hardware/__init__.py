"""States hardware: chips, links, clusters, each number with its source. Predicts nothing."""

from __future__ import annotations

from hardware.chip import ChipSpec
from hardware.dtype import DType
from hardware.link import Collective, LinkSpec
from hardware.site import Site
from hardware.system import SystemSpec, Tier

__all__ = ["ChipSpec", "Collective", "DType", "LinkSpec", "Site", "SystemSpec", "Tier"]
