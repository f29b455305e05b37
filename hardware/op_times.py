"""Seconds of operators as they were measured on one chip: sizes and seconds, as data that travels with the chip.

Packed, so that a chip with thousands of them stays one line of a stored space and goes to workers as it is. Knows
neither files nor how an operation finds its row (estimator/cost/lookup.py).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

__all__ = ["COLUMNS", "OpTimes"]

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k", "seconds"), "attention": ("batch", "seq", "heads", "kv_heads", "head_dim", "seconds"),
}  # fmt: skip
"""Of each kind of table; its parts are formats (`bf16`), of attention with the pass (`bf16 forward`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTimes:
    """Tables of one chip. `source`: what they were read from; `digest`: of their content; `packed`: that content."""

    source: str
    digest: str
    packed: str = field(repr=False)

    @classmethod
    def of(cls, source: str, tables: Mapping[str, Mapping[str, np.ndarray]]) -> OpTimes:
        """From rows [N, COLUMNS] of each part of each kind."""
        plain = {kind: {part: rows.tolist() for part, rows in parts.items()} for kind, parts in tables.items()}
        text = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
        packed = base64.b64encode(zlib.compress(text, 9)).decode()
        return cls(source=source, digest=hashlib.blake2b(text, digest_size=8).hexdigest(), packed=packed)

    def tables(self) -> dict[str, dict[str, np.ndarray]]:
        """The rows again; ValueError where they are not whole."""
        try:
            text = zlib.decompress(base64.b64decode(self.packed, validate=True))
            if hashlib.blake2b(text, digest_size=8).hexdigest() != self.digest:
                raise ValueError(f"digest must be that of its rows, but got {self.digest!r}")
            return {
                kind: {part: np.asarray(rows, dtype=np.float64) for part, rows in parts.items()}
                for kind, parts in json.loads(text).items()
            }
        except (binascii.Error, zlib.error, ValueError, AttributeError) as error:
            raise ValueError(
                f"measured operators of {self.source} are damaged ({error}); name their table again"
            ) from error
