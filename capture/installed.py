"""Says in one line which extra brings what a command needs and this installation lacks. Imports none of it."""

from __future__ import annotations

import importlib.util

__all__ = ["require_installed"]


def require_installed(who: str, *names: str, extra: str = "capture") -> None:
    """ValueError where one of the packages is missing, with the extra that holds them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        remedy = f"pip install 'trainspace[{extra}]'"
        raise ValueError(f"{who} needs {' and '.join(missing)}, which this installation lacks; {remedy}")
