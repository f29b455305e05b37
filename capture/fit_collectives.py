"""Fits collectives of one device and one tier: what share of the wire each kind reaches, a hop's and a start's latency.

The formulas are the estimator's own (estimator/cost/collective.py), linear in bytes, hops and starts: their
coefficients are asked of it with links of one byte a second or one second a hop, so that a fitted link means there what
it meant here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from capture.fits import Fit, frameworks
from capture.fitting import Parameter, central, fit, held_out, quality
from capture.op_tables import OpTable
from estimator.cost.collective import collective, point_to_point
from estimator.op import Traffic
from hardware.chip import ChipSpec
from hardware.link import LinkSpec
from hardware.system import UNBOUNDED, SystemSpec, Tier
from hardware.units import GB, KIB, MIB, US

__all__ = ["KINDS", "fit_collectives"]

KINDS: Mapping[str, Traffic | None] = {
    "all_reduce": Traffic.ALL_REDUCE, "all_gather": Traffic.ALL_GATHER, "reduce_scatter": Traffic.REDUCE_SCATTER,
    "all_to_all": Traffic.ALL_TO_ALL, "alltoall": Traffic.ALL_TO_ALL, "p2p": None, "send_recv": None,
}  # fmt: skip
"""What tables call a collective; None: from one rank to the next."""
NAMES = {"alltoall": "all_to_all", "send_recv": "p2p"}
LEAST_BYTES, SMALL_BYTES, FEWEST = MIB, 32 * KIB, 12
RANGES = {"below 1 MiB, not fitted": (4096.0, MIB), "from 16 MiB": (16 * MIB, np.inf)}


def fit_collectives(table: OpTable, chip: ChipSpec, wire_bytes_per_s: float, tier: str) -> Fit | None:
    """Latency, setup and share of the wire per kind, of groups inside one domain. None with too few rows.

    Fitted from 1 MiB on, where training's traffic lies, each doubling alike: smaller messages go by other protocols
    with lower floors, and take down to a third of what the curve says.
    """
    rows = table.where((table.numbers["nodes"] == 1) & (table.numbers["bytes"] >= 4096.0))
    rows = rows.where(np.array([name in KINDS for name in rows.texts["collective"]], dtype=bool))
    rows = rows.where(rows.numbers["gpus"] > 1)
    if rows.num_rows < FEWEST:
        return None
    names = np.array([NAMES.get(name, name) for name in rows.texts["collective"]], dtype=object)
    kinds, at_kind = np.unique(names.astype(str), return_inverse=True)
    (kind, ranks, nbytes), seconds, _ = central(
        [at_kind.astype(np.float64), rows.numbers["gpus"], rows.numbers["bytes"]], _seconds(rows)
    )
    kind = kind.astype(np.int64)
    terms: np.ndarray = np.zeros((3, len(seconds)))  # seconds per byte at one byte a second; hops; starts
    for i, name in enumerate(kinds):
        for n in np.unique(ranks[kind == i]):
            here = (kind == i) & (ranks == n)
            terms[:, here] = np.array(_terms(KINDS[name], n, chip))[:, None]
    used, out = nbytes >= LEAST_BYTES, held_out(kind, ranks, nbytes)
    if len(np.unique(kind[used & ~out])) < len(np.unique(kind[used])):  # groups are too few to hold out whole ones
        out = held_out(kind, ranks, nbytes, apart=True)
    hop_us = _hop_us(nbytes, seconds, terms, out)

    def predict(at: np.ndarray, where: np.ndarray) -> np.ndarray:
        rate = wire_bytes_per_s * at[3:][kind[where]] * (1.0 - at[2] / ranks[where] ** 2)
        return nbytes[where] * terms[0, where] / rate + (terms[1, where] * at[0] + terms[2, where] * at[1]) * US

    parameters = (
        Parameter(start=hop_us, low=0.0, high=1e5, step=0.0), Parameter(start=8.0, low=0.0, high=1e6, step=4.0),
        Parameter(start=0.5, low=0.0, high=3.0, step=0.25),
        *(Parameter(start=0.7, low=0.001, high=1.0, step=0.1) for _ in kinds),
    )  # fmt: skip
    seen = used & ~out
    found = fit(lambda at: predict(at, seen), seconds[seen], parameters)
    values = {"latency_s": found[0] * US, "setup_s": found[1] * US, "pair_loss": found[2],
              "wire_bytes_per_s": wire_bytes_per_s}  # fmt: skip
    values |= {f"share.{name}": float(share) for name, share in zip(kinds, found[3:], strict=True)}
    parts = {"all": used & out} | {name: out & (nbytes >= a) & (nbytes < b) for name, (a, b) in RANGES.items()}
    return Fit(
        subject=f"collectives {tier}", values=values,
        errors={name: quality(predict(found, w), seconds[w], int(seen.sum())) for name, w in parts.items()},
        num_rows=rows.num_rows, measured_by=frameworks(rows.texts.get("version", rows.texts.get("source"))),
        remark=f"wire {wire_bytes_per_s / GB:g} GB/s one way; groups of {ranks.min():.0f} to {ranks.max():.0f}",
    )  # fmt: skip


def _hop_us(nbytes: np.ndarray, seconds: np.ndarray, terms: np.ndarray, out: np.ndarray) -> float:
    """Microseconds of a hop: what each further member adds to messages that hold next to nothing."""
    small = (nbytes <= SMALL_BYTES) & ~out
    if small.sum() < FEWEST:
        return 1.0  # assumption, as links without small messages have in the catalogue
    found = fit(
        lambda at: (terms[1, small] * at[0] + terms[2, small] * at[1]) * US, seconds[small],
        (Parameter(start=1.0, low=0.0, high=1e5, step=0.5), Parameter(start=8.0, low=0.01, high=1e6, step=4.0)),
    )  # fmt: skip
    return float(found[0])


def _seconds(rows: OpTable) -> np.ndarray:
    """Measured seconds; where a table gives only bus bandwidth, by the factors of nccl-tests."""
    seconds = rows.numbers["time_us"] * US
    if not np.isnan(seconds).any():
        return seconds
    n = rows.numbers["gpus"]
    twice = np.where(rows.texts["collective"] == "all_reduce", 2.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        from_bus = rows.numbers["bytes"] * twice * (n - 1) / n / (rows.numbers["busbw_gbps"] * GB)
    return np.where(np.isnan(seconds), from_bus, seconds)


def _terms(kind: Traffic | None, ranks: float, chip: ChipSpec) -> tuple[float, float, float]:
    """Coefficients of bytes, hops and starts, from the estimator."""

    def cost(bytes_per_s: float, latency_s: float, setup_s: float) -> tuple[float, float]:
        wire = LinkSpec(name="unit", bytes_per_s=bytes_per_s, latency_s=latency_s, setup_s=setup_s, efficiency=1.0,
                        source="unit")  # fmt: skip
        tier = Tier(name="unit", span=UNBOUNDED, link=wire)
        system = SystemSpec(name="unit", chip=chip, num_chips=int(ranks), tiers=(tier,), chips_per_node=int(ranks))
        found = point_to_point(system, 1.0) if kind is None else collective(kind, system, ranks, 1.0)
        return float(found.per_byte), float(found.latency_s)

    return cost(1.0, 0.0, 0.0)[0], cost(1.0, 1.0, 0.0)[1], cost(1.0, 0.0, 1.0)[1]
