"""What a clock belongs to: the host's name and its boot. Ranks that share both share a clock."""

from __future__ import annotations

import socket
from pathlib import Path

__all__ = ["machine_id"]

BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Host and boot; where the system tells no boot, the host alone."""
    try:
        boot = BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}/{boot}"
