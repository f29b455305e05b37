"""Units: factors to SI, and formatters for people. Everything inside is SI; conversion happens once, at the door."""

from __future__ import annotations

import math
from types import MappingProxyType

__all__ = [
    "DAY", "GB", "GBIT", "GIB", "HOUR", "KB", "KIB", "MB", "MIB", "MS", "TB", "TFLOPS", "UNITS", "US",
    "format_bytes", "format_count", "format_seconds", "parse_quantity",
]  # fmt: skip

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
KIB, MIB, GIB = 1024.0, 1024.0**2, 1024.0**3
TFLOPS = 1e12
GBIT = 1e9 / 8  # bytes: a 400 Gb/s port moves 400 * GBIT bytes per second
US, MS = 1e-6, 1e-3
HOUR, DAY = 3600.0, 86400.0

_BY_BASE = {
    "B": {"B": 1.0, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024.0**4},
    "B/s": {"B/s": 1.0, "MB/s": MB, "GB/s": GB, "TB/s": TB, "Gb/s": GBIT},
    "FLOPS": {"FLOPS": 1.0, "GFLOPS": 1e9, "TFLOPS": TFLOPS, "PFLOPS": 1e15},
    "s": {"s": 1.0, "ms": MS, "us": US},
    "W": {"W": 1.0, "kW": 1e3},
    "USD/h": {"USD/h": 1.0},
    "1/h": {"1/h": 1.0},
    "kg/kWh": {"kg/kWh": 1.0, "g/kWh": 1e-3},
    "USD/kWh": {"USD/kWh": 1.0},
}

UNITS = MappingProxyType({unit: factor for units in _BY_BASE.values() for unit, factor in units.items()})
"""Factor of each unit to the unit that field names carry: SI, but rates per hour and per kWh stay so."""


def parse_quantity(text: str, base: str | None = None) -> float:
    """Read a number with an optional unit into SI, of the kind of quantity that `base` measures ("" for none).

    >>> parse_quantity("400 Gb/s", "B/s")
    50000000000.0
    >>> parse_quantity("1e12")
    1000000000000.0
    """
    number, _, unit = text.strip().partition(" ")
    unit = unit.strip()
    allowed = UNITS if base is None else _BY_BASE.get(base, {})
    if unit and unit not in allowed:
        listed = f"units here are {', '.join(allowed)}" if allowed else "here it has no unit"
        msg = f"a quantity is a number and a unit, but got {text!r}; {listed}"
        raise ValueError(msg)
    try:
        return float(number) * (UNITS[unit] if unit else 1.0)
    except ValueError:
        msg = f"a quantity is a number and a unit, but got {text!r}; write it like '80 GiB' or 80e+9"
        raise ValueError(msg) from None


def _scaled(x: float, steps: tuple[tuple[float, str], ...]) -> str:
    """Pick the largest step that x reaches once rounded to one decimal, so that 1023.99 KiB reads 1.0 MiB."""
    fits = [step for step in steps if round(abs(x) / step[0], 1) >= 1.0]
    factor, name = fits[0] if fits else steps[-1]
    return f"{round(x / factor, 1) + 0.0:.1f} {name}"  # the sum writes -0.0 as 0.0


def format_bytes(x: float) -> str:
    """Bytes in binary units, one decimal.

    >>> format_bytes(72.4 * GIB), format_bytes(512)
    ('72.4 GiB', '512 B')
    """
    if not math.isfinite(x) or abs(x) < KIB:
        return f"{x:.0f} B"
    return _scaled(x, ((1024.0**4, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")))


def format_seconds(x: float) -> str:
    """Seconds in s, ms, us or ns, one decimal; from two hours on in hours, from two days on in days.

    >>> format_seconds(19.94), format_seconds(0.0032), format_seconds(0.0), format_seconds(-1e-17)
    ('19.9 s', '3.2 ms', '0.0 s', '0.0 ns')
    """
    if not math.isfinite(x) or x == 0.0:
        return f"{x:.1f} s"
    if abs(x) >= 2 * DAY:
        return f"{x / DAY:.1f} days"
    if abs(x) >= 2 * HOUR:
        return f"{x / HOUR:.1f} h"
    return _scaled(x, ((1.0, "s"), (MS, "ms"), (US, "us"), (1e-9, "ns")))


def format_count(x: float) -> str:
    """A count: as it is under a thousand, then K, M, B, and scientific from 10^12 on.

    >>> format_count(671e9), format_count(1.2e13), format_count(42)
    ('671.0 B', '1.2e13', '42')
    """
    if not math.isfinite(x) or abs(x) < 1e3:
        return f"{x:g}"
    if abs(x) >= 999.95e9:  # 999.95e9 would print as 1000.0 B
        mantissa, exponent = f"{x:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return _scaled(x, ((1e9, "B"), (1e6, "M"), (1e3, "K")))
