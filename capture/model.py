"""The graph-driven door: a config.json goes in, a model with its captured graph comes out.

Imports PyTorch and transformers only when called, and says which extra brings them where they are missing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from capture.installed import require_installed
from estimator.captured import CapturedModel

if TYPE_CHECKING:
    from capture.records import Recording

__all__ = ["PHASES", "capture_model", "capture_records"]

PHASES = ("train", "prefill", "decode")
NEEDS = ("torch", "transformers")


def capture_model(
    path: str | Path, *, phase: str = "train", num_layers: int | None = None, allow_unknown: bool = False,
    trust_remote_code: bool = False,
) -> CapturedModel:  # fmt: skip
    """The model of a Hugging Face config.json, without weights and without the network.

    ValueError where the file is no such config, where transformers cannot build or run the model without data, and
    where an operation is unknown (unless allowed: then it is priced as memory-bound and listed).
    """
    recording, name, notes = _recorded(path, phase, num_layers, trust_remote_code)
    from capture.canonical import canonicalise

    try:
        return canonicalise(recording, name, notes, allow_unknown=allow_unknown)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def capture_records(
    path: str | Path, *, phase: str = "train", num_layers: int | None = None, trust_remote_code: bool = False
) -> Recording:  # fmt: skip
    """The operations as they ran: what a canonical graph is made of, backward included."""
    return _recorded(path, phase, num_layers, trust_remote_code)[0]


def _recorded(
    path: str | Path, phase: str, num_layers: int | None, trust_remote_code: bool
) -> tuple[Recording, str, tuple[str, ...]]:  # fmt: skip
    require_installed("capture", *NEEDS)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing of a capture is on the hub
    from capture.architecture import read_architecture
    from capture.fake import record

    architecture = read_architecture(Path(path), trust_remote_code=trust_remote_code)
    try:
        recording = record(architecture, phase, num_layers)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return recording, architecture.name, architecture.notes
