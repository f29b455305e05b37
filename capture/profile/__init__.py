"""Records training loops while they run, one file a rank, and synchronises gradients so that each transfer is known.

Runs inside the process that trains. `profile` records what runs in its block; `Synchroniser` is the ring and the
parameter server, `apply_plan` a tuner's plan on a real model. All load torch, so they are looked up when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capture.profile.plan import apply_plan
    from capture.profile.profiler import profile
    from capture.profile.synchroniser import Synchroniser, comm_hook

__all__ = ["Synchroniser", "apply_plan", "comm_hook", "profile"]

HOMES = {"apply_plan": "plan", "profile": "profiler", "Synchroniser": "synchroniser", "comm_hook": "synchroniser"}


def __getattr__(name: str) -> object:
    """What needs torch, from the module that holds it."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"capture.profile.{HOMES[name]}"), name)
