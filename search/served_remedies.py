"""What would make a deployment fit in memory: a smaller batch, narrower formats, more parallelism, more chips."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from estimator.inference import InferenceResult
from estimator.inference.step import infer
from search.served import ServedPoint, ServedSpace

__all__ = ["ServedRemedy", "served_remedies"]

NARROWER = {"weights": ("fp8", "int8", "int4"), "kv_cache": ("fp8", "int4")}
MAX_DOUBLINGS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRemedy:
    """A changed point that fits: what was changed, and what it comes to."""

    change: str
    tokens_per_s: float
    seconds: float  # for a decoded token, or for the first one in prefill
    device_memory_bytes: float

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {name: getattr(self, name) for name in ("change", "tokens_per_s", "seconds", "device_memory_bytes")}


def served_remedies(space: ServedSpace, point: ServedPoint, *, top: int = 4) -> list[ServedRemedy]:
    """The fewest changes that fit, most tokens a second first; more chips where nothing else does."""
    single = list(_changes(space, point))
    for number in (1, 2):
        found = []
        for chosen in itertools.combinations(single, number):
            names = [name for name, _, _ in chosen]
            if len(set(names)) < number:
                continue
            changed = point
            for name, value, _ in chosen:
                changed = _with(changed, name, value)
            found += _fitting(space, changed, ", ".join(text for _, _, text in chosen))
        if found:
            return sorted(found, key=lambda r: -r.tokens_per_s)[:top]
    for doubling in range(1, MAX_DOUBLINGS + 1):
        chips = point.system.num_chips * 2**doubling
        larger = ServedPoint(point.system.with_chips(chips), point.batch, point.values)
        wide = [(f"num_chips {chips}", larger)]
        for name in ("tp", "pp", "ep"):
            grown = point.values[name] * 2**doubling
            wide.append((f"num_chips {chips}, {name} {grown}", _with(larger, name, grown)))
        found = [remedy for text, changed in wide for remedy in _fitting(space, changed, text)]
        if found:
            return sorted(found, key=lambda r: -r.tokens_per_s)[:top]
    return []


def _changes(space: ServedSpace, point: ServedPoint) -> Iterator[tuple[str, object, str]]:
    """One choice each: its name, its value, and how it is told."""
    if (batch := _largest_batch(space, point)) is not None:
        yield "batch", batch, f"batch {batch}"
    for name, formats in NARROWER.items():
        for value in formats:
            if value != point.values[name]:
                yield name, value, f"{name} {value}"
    for name in ("tp", "pp", "ep"):
        yield name, 2 * point.values[name], f"{name} {2 * point.values[name]}"


def _largest_batch(space: ServedSpace, point: ServedPoint) -> int | None:
    """Most sequences that fit where everything else stays; bytes grow with the batch."""
    each = max(point.system.num_chips // (point.values["tp"] * point.values["pp"]), 1)
    low, high = 0, point.batch // each
    while high - low > 1:
        middle = (low + high) // 2
        result = _priced(space, ServedPoint(point.system, middle * each, point.values))
        if result is not None and result.feasible:
            low = middle
        else:
            high = middle
    return low * each or None


def _with(point: ServedPoint, name: str, value: object) -> ServedPoint:
    if name == "batch":
        assert isinstance(value, int)
        return ServedPoint(point.system, value, point.values)
    return ServedPoint(point.system, point.batch, {**point.values, name: value})


def _priced(space: ServedSpace, point: ServedPoint) -> InferenceResult | None:
    try:
        return infer(space.model, point.deployment, point.system, space.requests(point.batch))
    except ValueError:  # a law forbids it here
        return None


def _fitting(space: ServedSpace, point: ServedPoint, change: str) -> list[ServedRemedy]:
    result = _priced(space, point)
    if result is None or not result.feasible:
        return []
    per_token = result.columns["time_per_output_token_s"]
    seconds = per_token if per_token == per_token else result.columns["time_to_first_token_s"]
    return [ServedRemedy(change=change, tokens_per_s=result.columns["tokens_per_s"], seconds=seconds,
                         device_memory_bytes=result.columns["device_memory_bytes"])]  # fmt: skip
