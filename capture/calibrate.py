"""Fits a chip's and a link's curves from measured tables: `search calibrate`, and the catalogue's own fitted figures.

Which device a table is of: its `gpu` column, else its name (`gemm_h100.csv.gz`), else what the caller says. Refuses
tables of a device that the catalogue does not know, unless the caller names it: then peaks are the best that was seen,
and the rest is what the measuring machine said of itself (capture/device.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from capture.device import Device
from capture.fit_attention import REFERENCE_HEAD_DIM, fit_attention
from capture.fit_collectives import KINDS, fit_collectives
from capture.fit_grouped import fit_grouped
from capture.fit_products import THIN, fit_bandwidth, fit_products, stored
from capture.fit_streams import fit_streams
from capture.fits import Chip, Fit
from capture.op_tables import Kind, OpTable
from estimator.op import Traffic
from hardware.catalog import chip, chip_names, link, usual_link
from hardware.chip import ChipSpec
from hardware.dtype import DType
from hardware.units import US

__all__ = ["Calibration", "calibrate", "chip_fields", "link_fields"]

ASSUMED_HBM_EFFICIENCY = 0.88  # of a chip without memory-bound rows: hardware/catalog/chips.yaml, every_chip
ASSUMED_KERNEL_S = 2e-6
SYSTEMS = {"a100_pcie": "a100-80g-pcie", "b200_bf16_ceperm": "b200-180g-sxm"}  # as tables of efficiencies name them
MOST_OF_PEAK = 1.05  # of a chip's stated peak; an assumption: rounded clocks and timers allow as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The fits of one device; `spec` is its catalogue entry, None where it has none; `about` what it said of itself."""

    name: str
    spec: ChipSpec | None
    chip: Chip
    fits: tuple[Fit, ...]
    faults: tuple[str, ...]
    about: Device | None = None

    def of(self, subject: str) -> Fit | None:
        """The first fit whose subject starts so."""
        return next((f for f in self.fits if f.subject.startswith(subject)), None)


def calibrate(
    tables: Sequence[OpTable], *, device: str | None = None, unknown: bool = False, about: Device | None = None
) -> list[Calibration]:
    """The calibration of every device that the tables are of, in the order of their first rows.

    `device` names the device of tables that do not say, or of all if it is the only one. `unknown` allows names that
    the catalogue does not have. `about` is what a measured device said of itself. ValueError where nothing could be
    fitted.
    """
    parts: dict[str, list[OpTable]] = {}
    for table in tables:
        for name, part in _by_device(table, device, unknown):
            parts.setdefault(name, []).append(part)
    found = [_calibrate(name, of_it, about) for name, of_it in parts.items()]
    if not any(c.fits for c in found):
        files = ", ".join(str(t.path) for t in tables) or "no file"
        raise ValueError(f"{files}: nothing here can be fitted; give gemm, attention, stream or nccl tables")
    return found


def _by_device(table: OpTable, device: str | None, unknown: bool) -> list[tuple[str, OpTable]]:
    if device is not None:
        return [(_named(table, device, unknown), table)]
    if table.kind is Kind.SHARE:
        names = table.texts["system"].astype(str)
        return [(spec, table.where(names == name)) for name in dict.fromkeys(names) if (spec := SYSTEMS.get(name))]
    if "gpu" in table.texts:
        names = table.texts["gpu"].astype(str)
        known = {name: _known(name) for name in dict.fromkeys(names)}
        if len(known) == 1 or unknown:
            return [(_named(table, next(iter(known)), unknown), table)]
        return [(spec, table.where(names == name)) for name, spec in known.items() if spec]
    stem = table.path.name.partition(".")[0].rpartition("_")[2]
    return [(_named(table, stem, unknown), table)]


def _known(name: str) -> str | None:
    """The catalogue's name of a device, if it has one."""
    try:
        return chip(name).name
    except ValueError:
        return None


def _named(table: OpTable, name: str, unknown: bool) -> str:
    known = _known(name)
    if known is None and not unknown:
        law = "a table's device must be known by its gpu column, its name or --chip"
        remedy = f"give --chip with one of {', '.join(chip_names())}, or --name for one of your own"
        raise ValueError(f"{table.path}: {law}, but got {name!r}; {remedy}")
    return known or name


def _calibrate(name: str, tables: Sequence[OpTable], about: Device | None) -> Calibration:
    spec = chip(name) if _known(name) else None
    of = {kind: [t for t in tables if t.kind is kind] for kind in Kind}
    device = _device(name, spec, of, about)
    fits: list[Fit] = []
    memory = {"kernel_s": ASSUMED_KERNEL_S, "hbm_efficiency": ASSUMED_HBM_EFFICIENCY}
    streams = [told for t in of[Kind.STREAM] for told in _from(t, [fit_streams(t, device)])]
    thin = [told for t in of[Kind.GEMM] for told in _from(t, [fit_bandwidth(t, device)])]
    for found in (thin, streams):  # streams last: they are what memory-bound operations do
        fits += found
        memory |= {k: v for f in found for k, v in f.values.items()}
    for table in of[Kind.GEMM]:
        fits += _from(table, _products(table, device, memory))
    for table in of[Kind.SHARE]:
        fits += _from(table, [fit_grouped(table, device, memory["hbm_efficiency"])])
    for table in of[Kind.ATTENTION]:
        fits += _from(table, fit_attention(table, device, memory["hbm_efficiency"]))
    for table in of[Kind.COLLECTIVE]:
        tier, rate = _tier(spec, table)
        fits += _from(table, [fit_collectives(table, spec or _stand_in(), rate, tier)])
    faults = tuple(fault for table in tables for fault in table.faults)
    return Calibration(name=name, spec=spec, chip=device, fits=tuple(fits), faults=faults, about=about)


def _from(table: OpTable, found: Sequence[Fit | None]) -> list[Fit]:
    """The fits that were made, with the table they are from."""
    return [replace(fit, table=table.path.name) for fit in found if fit is not None]


def _products(table: OpTable, device: Chip, memory: Mapping[str, float]) -> list[Fit]:
    """16-bit formats first: their slowdown under load is the chip's."""
    order = sorted(set(table.texts["dtype"]), key=lambda d: (stored(d).nbytes < 2.0, str(d)))
    slowdown: float | None = None
    found = []
    for dtype in order:
        found.append(fit_products(table, device, str(dtype), memory, slowdown))
        slowdown = found[0].values["slowdown"]
    return found


def _device(name: str, spec: ChipSpec | None, of: Mapping[Kind, Sequence[OpTable]], about: Device | None) -> Chip:
    """What the device can do at most: as the catalogue says, else the best that its tables show."""
    if spec is not None:
        for table in of[Kind.GEMM]:
            _check_peaks(table, spec)
        peaks = {d.value: flops for d, flops in spec.matrix_flops_per_s.items()}
        return Chip(name=name, num_sms=spec.num_sms, flops_per_s=peaks, hbm_bytes_per_s=spec.hbm_bytes_per_s)
    flops: dict[str, float] = {}
    for table in of[Kind.GEMM]:
        m, n, k, us = (table.numbers[c] for c in ("m", "n", "k", "latency_us"))
        for dtype in dict.fromkeys(table.texts["dtype"]):
            rate = (2.0 * m * n * k / (us * US))[table.texts["dtype"] == dtype]
            form = stored(str(dtype)).value
            flops[form] = max(flops.get(form, 0.0), float(rate.max()))
    moved = [t.numbers["bytes"] / (t.numbers["latency_us"] * US) for t in of[Kind.STREAM]]
    for table in of[Kind.GEMM]:
        m, n, k, us = (table.numbers[c] for c in ("m", "n", "k", "latency_us"))
        width = np.array([stored(str(d)).nbytes for d in table.texts["dtype"]])
        moved.append((n * k * width / (us * US))[m <= THIN])
    rates = np.concatenate(moved) if moved else np.zeros(0)
    if not flops or not len(rates):
        raise ValueError(
            f"{name}: a device that the catalogue does not have needs tables of products and of streams, but got "
            f"{', '.join(k.value for k, tables in of.items() if tables)}; run search measure, or give --chip"
        )
    num_sms = about.num_sms if about else 1
    return Chip(name=name, num_sms=num_sms, flops_per_s=flops, hbm_bytes_per_s=float(rates.max()))


def _check_peaks(table: OpTable, spec: ChipSpec) -> None:
    """ValueError where most rows are faster than the chip can be, or all far slower: times in another unit."""
    m, n, k, us = (table.numbers[c] for c in ("m", "n", "k", "latency_us"))
    for dtype in dict.fromkeys(str(d) for d in table.texts["dtype"]):
        form = _format(table, dtype)
        if form not in spec.matrix_flops_per_s:
            have = ", ".join(d.value for d in spec.matrix_flops_per_s)
            law = f"{spec.name} multiplies {have}"
            raise ValueError(f"{table.path}, column dtype: {law}, but got {dtype}; give --chip with the right one")
        share = (2.0 * m * n * k / (us * US))[table.texts["dtype"] == dtype] / spec.matrix_flops_per_s[form]
        if (above := float(np.mean(share > MOST_OF_PEAK))) > 0.01 or share.max() < 1e-3:
            raise ValueError(
                f"{table.path}, column latency_us: {dtype} products on {spec.name} reach at most its peak, and some a "
                f"thousandth of it, but got {share.max():.3g} of peak ({above:.0%} of rows above); give microseconds, "
                f"or --chip with the right one"
            )


def _format(table: OpTable, dtype: str) -> DType:
    try:
        return stored(dtype)
    except ValueError:
        known = ", ".join(d.value for d in DType)
        raise ValueError(
            f"{table.path}, column dtype: a format is one of {known}, but got {dtype!r}; name one"
        ) from None


def _tier(spec: ChipSpec | None, table: OpTable) -> tuple[str, float]:
    """The scale-up link that a device's collectives run over; of an unknown one, the fastest bus bandwidth seen."""
    if spec is not None:
        name = usual_link(spec.name)
        return name, link(name).bytes_per_s
    n, seconds = table.numbers["gpus"], table.numbers["time_us"] * US
    # What a rank sends of the buffer, as nccl-tests count bus bandwidth: all of it to a neighbour, twice to reduce.
    kinds = [KINDS.get(str(name)) for name in table.texts["collective"]]
    sent = np.where([kind is Traffic.ALL_REDUCE for kind in kinds], 2.0, 1.0) * (n - 1) / n
    rates = table.numbers["bytes"] * np.where([kind is None for kind in kinds], 1.0, sent) / seconds
    return "own", float(np.nanmax(np.where(n > 1, rates, 0.0)))


def _stand_in() -> ChipSpec:
    """A chip for systems of which only the links count."""
    return chip(chip_names()[0])


def chip_fields(found: Calibration) -> dict[str, tuple[object, Fit]]:
    """The catalogue's fields of a chip, rounded as it writes them, and the fit behind each."""
    fields: dict[str, tuple[object, Fit]] = {}
    for memory in (f for f in found.fits if f.subject.startswith("memory")):
        fields["hbm_efficiency"] = round(memory.values["hbm_efficiency"], 3), memory
        fields["kernel_s"] = _microseconds(memory.values["kernel_s"]), memory
    products = {f.subject.removeprefix("gemm "): f for f in found.fits if f.subject.startswith("gemm ")}
    for name, fit in products.items():
        form = stored(name).value
        if f"gemm_efficiency.{form}" in fields and name != form:
            continue  # the format itself before another way to scale it
        fields[f"gemm_efficiency.{form}"] = round(fit.values["gemm_efficiency"], 3), fit
        fields[f"gemm_ramp_k.{form}"] = round(fit.values["gemm_ramp_k"]), fit
    first = next(iter(products.values()), None)
    if first is not None:
        fields["gemm_slowdown"] = round(1.0 + first.values["slowdown"], 3), first
        fields["gemm_kernel_s"] = _microseconds(first.values["gemm_kernel_s"]), first
    attention = found.of("attention ")
    reference = attention and attention.values.get(f"share.{REFERENCE_HEAD_DIM}")
    if attention is not None and reference:
        fields["attention_efficiency"] = round(reference, 3), attention
        others = {int(key.partition(".")[2]): round(value / reference, 3)
                  for key, value in attention.values.items() if key.startswith("share.")}  # fmt: skip
        others.pop(REFERENCE_HEAD_DIM)
        fields["attention_head_dims"] = others, attention
        fields["attention_ramp_keys"] = round(attention.values["ramp_keys"]), attention
        fields["attention_tail"] = round(attention.values["tail"], 2), attention
        fields["attention_kernel_s"] = _microseconds(attention.values["kernel_s"]), attention
        if "backward" in attention.values:
            fields["attention_backward"] = round(attention.values["backward"], 3), attention
    return fields


def link_fields(found: Calibration) -> dict[str, float]:
    """The catalogue's fields of the scale-up link, rounded as it writes them; empty without collectives."""
    fit = found.of("collectives ")
    if fit is None:
        return {}
    shares = {key.partition(".")[2]: round(value, 3) for key, value in fit.values.items() if key.startswith("share.")}
    mean = round(float(np.exp(np.mean(np.log(list(shares.values()))))), 2)
    return {
        "latency_us": round(fit.values["latency_s"] / US, 2), "setup_us": round(fit.values["setup_s"] / US, 1),
        "pair_loss": round(fit.values["pair_loss"], 2), "efficiency": mean, **shares,
    }  # fmt: skip


def _microseconds(seconds: float) -> float:
    return round(seconds / US, 2)
