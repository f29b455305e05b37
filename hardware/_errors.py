"""How the hardware package says no: the law, the offence, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn

__all__ = ["reject", "reject_unknown"]


def reject(law: str, offence: object, remedy: str) -> NoReturn:
    """Raise a ValueError of three parts.

    >>> reject("num_chips must be at least 1", 0, "count the chips of the whole system")
    Traceback (most recent call last):
    ValueError: num_chips must be at least 1, but got 0; count the chips of the whole system
    """
    msg = f"{law}, but got {offence}; {remedy}"
    raise ValueError(msg)


def reject_unknown(kind: str, name: object, known: Iterable[object]) -> NoReturn:
    """Raise a ValueError for a name that is not known, with the nearest known one.

    >>> reject_unknown("chip", "h10", ["h100", "a100"])
    Traceback (most recent call last):
    ValueError: unknown chip 'h10'; did you mean 'h100'? Known: a100, h100
    """
    names = sorted(str(k) for k in known)
    close = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}? Known" if close else "; known"
    msg = f"unknown {kind} {name!r}{hint}: {', '.join(names)}"
    raise ValueError(msg)
