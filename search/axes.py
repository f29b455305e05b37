"""The strategy half of a space: which values each choice may take. Knows nothing of whether they fit each other.

One table, `AXES`, gives every choice its place in the canonical order, its reader and its writer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import Enum
from typing import Any

from estimator.precision import RECIPES
from estimator.strategy import (
    DEFAULT_FUSION,
    Chunks,
    ContextParallel,
    CudaGraph,
    Fusion,
    LayoutRule,
    Module,
    Offload,
    Optimizer,
    Overlap,
    OwnFusion,
    RankOrder,
    Recompute,
    Schedule,
    Strategy,
)
from search.layout import layers_of
from search.yaml_lines import Document, Key, Plain

__all__ = ["AXES", "OPEN", "Axis", "axis_values", "member", "read_axes", "read_axis", "read_strategy", "strategy_of",
           "whole", "write_axes"]  # fmt: skip

MAX_VALUES = 100_000  # of one axis
MAX_DEGREE = 10**6
MAX_NBYTES = 10**15
MAX_PIECES = 1024  # of a collective
MAX_PREFETCH = 64  # blocks
OVERLAPS = ("tp", "cp", "ep", "pp", "dp")
OFFLOADS = tuple(f.name for f in fields(Offload))
NESTED = {"overlap": OVERLAPS, "offload": OFFLOADS}
"""Mappings under `strategy` whose entries are axes of their own, `overlap_tp` and so on."""
CHUNKS = tuple(f.name for f in fields(Chunks))


class Open(Enum):
    """The value of an axis that is left to a sampler: it is one of too many to list."""

    OPEN = "search"


OPEN = Open.OPEN

Read = Callable[[Document, Key, Plain], object]
Write = Callable[[object], Plain]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One choice of a strategy. `read` gives one value from YAML or raises SpaceError; `write` is its inverse."""

    name: str
    read: Read
    write: Write
    is_list: bool = False  # one value is itself written as a list
    is_mapping: bool = False  # or as a mapping
    may_search: bool = False  # may be left to a sampler, by the word `search`

    @property
    def key(self) -> Key:
        """Where the axis stands under `strategy`."""
        head, _, tail = self.name.partition("_")
        return (head, tail) if head in NESTED and tail in NESTED[head] else (self.name,)


def whole(document: Document, key: Key, value: Plain, low: int, high: int) -> int:
    """A whole number between two bounds; 25e6 is one, true is not."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or int(value) != value:
        raise document.error(key, "must be a whole number", value, f"{low} to {high}")
    if not low <= value <= high:
        raise document.error(key, f"must be at least {low} and at most {high}", value, f"{low} to {high}")
    return int(value)


def member(document: Document, key: Key, value: Plain, known: list[str]) -> str:
    """One of the known words."""
    if not isinstance(value, str) or value not in known:
        near = get_close_matches(str(value), known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise document.error(key, f"must be a known name{hint}", value, ", ".join(known))
    return value


def _whole(low: int, high: int) -> Read:
    return lambda document, key, value: whole(document, key, value, low, high)


def _enum(kind: type[Enum]) -> Read:
    names = [item.value for item in kind]
    return lambda document, key, value: kind(member(document, key, value, names))


def _write_enum(value: object) -> Plain:
    assert isinstance(value, Enum)
    return str(value.value)


def _same(value: object) -> Plain:
    assert isinstance(value, int | str)  # bool is an int
    return value


def _read_bool(document: Document, key: Key, value: Plain) -> object:
    if not isinstance(value, bool):
        raise document.error(key, "must be true or false", value, "true, false")
    return value


def _read_flag(document: Document, key: Key, value: Plain) -> object:
    return int(value) if isinstance(value, bool) else whole(document, key, value, 0, 1)


def _read_share(document: Document, key: Key, value: Plain) -> object:
    """A number from 0 to 1; whole ones are integers, so that 1 and 1.0 are one value."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise document.error(key, "must be a share from 0 to 1", value, "0, 0.5, 1")
    return int(value) if value in (0, 1) else float(value)


def _write_share(value: object) -> Plain:
    assert isinstance(value, int | float)
    return value


def _read_precision(document: Document, key: Key, value: Plain) -> object:
    return member(document, key, value, sorted(RECIPES))


def _read_recompute(document: Document, key: Key, value: Plain) -> object:
    if value is None or value is False:  # `off` and `no`
        return Recompute()
    if not isinstance(value, str | list):
        raise document.error(key, "must be a kind or module names", value, "none, full, block, layernorm+mla_up_proj")
    if value == []:
        raise document.error(key, "a list must not be empty", value, "none")
    names = [m.value for m in Module]
    parts = value if isinstance(value, list) else value.split("+")
    kinds = ["none", "full", "block", "selective"] if isinstance(value, str) and len(parts) == 1 else []
    words = [member(document, key, part, [*kinds, *names]) for part in parts]
    return Recompute.parse(words[0] if kinds else words)


FUSION_EDITS = ("enable", "disable")


def _read_fusion(document: Document, key: Key, value: Plain) -> object:
    """A set of names, or what to add to the default set and to take from it."""
    if isinstance(value, dict):
        document.mapping(key, FUSION_EDITS)
        more, less = (_fusion_names(document, (*key, word), value.get(word, [])) for word in FUSION_EDITS)
        if more & less:
            names = ", ".join(sorted(f.value for f in more & less))
            raise document.error(key, f"a rule must not be both enabled and disabled, but {names} is", value)
        return (DEFAULT_FUSION | more) - less
    if value in (None, False, "none"):
        return frozenset()
    return _fusion_names(document, key, value)


def _fusion_names(document: Document, key: Key, value: Plain) -> frozenset[Fusion | OwnFusion]:
    parts = value.split("+") if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise document.error(key, "must be a list of names", value, "[flash_attention, fused_norm], none")
    known = {rule.value: rule for rule in (*Fusion, *document.fusion_rules)}
    return frozenset(known[member(document, key, part, list(known))] for part in parts)


def _write_fusion(value: object) -> Plain:
    assert isinstance(value, frozenset)
    return sorted(f.value for f in value)


_LAYOUTS = "even, auto, [4, 4, 4, 3], Et*4|(t*4|)*2t*3L"


def _read_layout(document: Document, key: Key, value: Plain) -> object:
    if value is None or value == "even":
        return None
    if value == LayoutRule.AUTO.value:
        return LayoutRule.AUTO
    if isinstance(value, str) and (value.startswith("E") or "|" in value):
        try:
            return layers_of(value)[0]
        except ValueError as error:
            raise document.error(key, str(error), accepted=_LAYOUTS) from None
    if not isinstance(value, list) or not value:
        raise document.error(key, "must be a word, a string of Megatron or layers per chunk", value, _LAYOUTS)
    return tuple(whole(document, (*key, i), item, 0, MAX_DEGREE) for i, item in enumerate(value))


def _write_layout(value: object) -> Plain:
    return _write_enum(value) if isinstance(value, LayoutRule) else list(value) if isinstance(value, tuple) else None


def _read_per_chunk(document: Document, key: Key, value: Plain) -> object:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise document.error(key, "must be null or recomputed layers per chunk", value, "null, a list such as [2, 1]")
    return tuple(whole(document, (*key, i), item, 0, MAX_DEGREE) for i, item in enumerate(value))


def _write_per_chunk(value: object) -> Plain:
    assert value is None or isinstance(value, tuple)
    return None if value is None else list(value)


def _read_chunks(document: Document, key: Key, value: Plain) -> object:
    if not isinstance(value, dict):
        return Chunks(**dict.fromkeys(CHUNKS, whole(document, key, value, 1, MAX_PIECES)))
    given = document.mapping(key, CHUNKS)
    return Chunks(**{name: whole(document, (*key, name), n, 1, MAX_PIECES) for name, n in given.items()})


def _write_chunks(value: object) -> Plain:
    assert isinstance(value, Chunks)
    numbers: dict[str, Plain] = {name: getattr(value, name) for name in CHUNKS}
    return numbers[CHUNKS[0]] if len(set(numbers.values())) == 1 else numbers


def _read_expert_bucket(document: Document, key: Key, value: Plain) -> object:
    return None if value is None else whole(document, key, value, 0, MAX_NBYTES)


def _write_expert_bucket(value: object) -> Plain:
    return None if value is None else _same(value)


_DEGREE = _whole(1, MAX_DEGREE)

AXES: tuple[Axis, ...] = (
    Axis(name="tp", read=_DEGREE, write=_same),
    Axis(name="cp", read=_DEGREE, write=_same),
    Axis(name="pp", read=_DEGREE, write=_same),
    Axis(name="ep", read=_DEGREE, write=_same),
    Axis(name="etp", read=_DEGREE, write=_same),
    Axis(name="vpp", read=_DEGREE, write=_same),
    Axis(name="micro_batch", read=_DEGREE, write=_same),
    Axis(name="dp_replicate", read=_DEGREE, write=_same),
    Axis(name="schedule", read=_enum(Schedule), write=_write_enum),
    Axis(name="interleave_group", read=_whole(0, MAX_DEGREE), write=_same),
    Axis(name="sequence_parallel", read=_read_bool, write=_same),
    Axis(name="context_parallel", read=_enum(ContextParallel), write=_write_enum),
    Axis(name="rank_order", read=_enum(RankOrder), write=_write_enum),
    Axis(name="precision", read=_read_precision, write=_same),
    Axis(name="fusion", read=_read_fusion, write=_write_fusion, is_list=True, is_mapping=True, may_search=True),
    Axis(name="recompute", read=_read_recompute, write=str),
    Axis(name="recompute_layers", read=_whole(0, MAX_DEGREE), write=_same),
    Axis(name="recompute_per_chunk", read=_read_per_chunk, write=_write_per_chunk, is_list=True, may_search=True),
    Axis(name="zero_stage", read=_whole(0, 3), write=_same),
    Axis(name="reshard_after_forward", read=_read_flag, write=_same),
    Axis(name="prefetch_blocks", read=_whole(0, MAX_PREFETCH), write=_same),
    *(Axis(name=f"offload_{what}", read=_read_share, write=_write_share) for what in OFFLOADS),
    *(Axis(name=f"overlap_{traffic}", read=_read_flag, write=_same) for traffic in OVERLAPS),
    Axis(name="tp_chunks", read=_read_chunks, write=_write_chunks, is_mapping=True, may_search=True),
    Axis(name="bucket_bytes", read=_whole(0, MAX_NBYTES), write=_same),
    Axis(name="expert_bucket_bytes", read=_read_expert_bucket, write=_write_expert_bucket, may_search=True),
    Axis(name="layout", read=_read_layout, write=_write_layout, is_list=True, may_search=True),
    Axis(name="optimizer", read=_enum(Optimizer), write=_write_enum),
    Axis(name="cuda_graph", read=_enum(CudaGraph), write=_write_enum),
    Axis(name="shared_expert_overlap", read=_read_bool, write=_same),
    Axis(name="redundant_experts", read=_whole(0, MAX_DEGREE), write=_same),
)
"""Every choice of a strategy, in the canonical order: the last varies fastest."""

_SPREADS = ("range", "powers_of_two")
_MODULES = frozenset(m.value for m in Module)


def axis_values(strategy: Strategy) -> dict[str, object]:
    """A strategy as one value per axis."""
    holders = {"overlap": strategy.overlap, "offload": strategy.offload}

    def value(axis: Axis) -> object:
        head, *tail = axis.key
        return getattr(holders[str(head)], str(tail[0])) if tail else getattr(strategy, axis.name)

    return {axis.name: value(axis) for axis in AXES}


def strategy_of(values: Mapping[str, object]) -> Strategy:
    """The strategy with one value per axis; absent axes take Strategy's defaults.

    >>> strategy_of({"tp": 8, "overlap_dp": 1}).overlap.dp
    1
    """
    plain: dict[str, Any] = dict(values)
    kinds = {"overlap": Overlap, "offload": Offload}
    for holder, names in NESTED.items():
        mine = {name: plain.pop(f"{holder}_{name}") for name in names if f"{holder}_{name}" in plain}
        plain[holder] = kinds[holder](**mine)
    return Strategy(**plain)


def read_axes(document: Document, key: Key) -> dict[str, tuple[object, ...]]:
    """All axes of the mapping at `key`: one value where it is silent (Strategy's default)."""
    defaults = axis_values(Strategy())
    given = dict(_given(document, key))
    return {a.name: read_axis(document, a, *given[a.name]) if a.name in given else (defaults[a.name],) for a in AXES}


def read_strategy(document: Document, key: Key, base: Mapping[str, object]) -> Strategy:
    """The strategy of the mapping at `key`, with one value per name; `base` where it is silent."""
    values = dict(base)
    by_name = {axis.name: axis for axis in AXES}
    for name, (at, value) in _given(document, key):
        values[name] = by_name[name].read(document, at, value)
    return strategy_of(values)


def write_axes(axes: Mapping[str, tuple[object, ...]]) -> dict[str, Plain]:
    """What `read_axes` reads."""
    result: dict[str, Any] = {}
    for axis in AXES:
        values = [value.value if isinstance(value, Open) else axis.write(value) for value in axes[axis.name]]
        if axis.name == "recompute" and len(values) > 1 and set(values) <= _MODULES:  # a flat list could be one choice
            values = [[value] for value in values]
        holder = result.setdefault(str(axis.key[0]), {}) if len(axis.key) == 2 else result
        holder[str(axis.key[-1])] = values[0] if len(values) == 1 else values
    return result


def _given(document: Document, key: Key) -> Iterator[tuple[str, tuple[Key, Plain]]]:
    """The entries of a strategy mapping by axis name, with their places; unknown keys are errors."""
    holder = document.mapping(key)
    known = tuple(dict.fromkeys(str(axis.key[0]) for axis in AXES))
    for name, value in holder.items():
        at = (*key, name)
        if name == "dp":
            rule = "dp is what remains, num_chips / (tp * cp * pp)"
            raise document.error(at, rule, value, "a constraint such as 'dp == 8'")
        if name not in known:
            raise document.unknown(at, known)
        if name not in NESTED:
            yield name, (at, value)
            continue
        for part, item in document.mapping(at, NESTED[name]).items():
            yield f"{name}_{part}", ((*at, part), item)


def read_axis(document: Document, axis: Axis, key: Key, value: Plain) -> tuple[object, ...]:
    """The values of one axis, each once, in the order given; OPEN alone where a sampler is to find them."""
    if axis.may_search and value == OPEN.value:
        return (OPEN,)
    values: list[object] = []
    for at, item in _spread(document, axis, key, value):
        values.append(axis.read(document, at, item))
        if len(values) > MAX_VALUES:
            raise document.error(key, f"an axis must have at most {MAX_VALUES} values", value)
    return tuple(dict.fromkeys(values))


def _spread(document: Document, axis: Axis, key: Key, value: Plain) -> Iterator[tuple[Key, Plain]]:
    """The values before they are read: those of a list, of a range, or the one."""
    if isinstance(value, dict) and not (axis.is_mapping and not set(value) & set(_SPREADS)):
        yield from ((key, number) for number in _numbers(document, axis, key, value))
    elif isinstance(value, list) and not _is_one(axis, value):
        if not value:
            raise document.error(key, "a list must not be empty", value, "at least one value")
        _check_modules(document, axis, key, value)
        for i, item in enumerate(value):
            at = (*key, i)
            yield from _spread(document, axis, at, item) if isinstance(item, dict) else iter([(at, item)])
    else:
        yield key, value


def _is_one(axis: Axis, value: list[Plain]) -> bool:
    """Whether a list is one value: names of a fusion set, numbers of a layout."""
    if axis.name == "layout":
        return all(isinstance(item, int | float) for item in value)
    return axis.is_list and not any(isinstance(item, list | dict) for item in value)


def _check_modules(document: Document, axis: Axis, key: Key, value: list[Plain]) -> None:
    """A flat list of recompute modules could be one choice or several."""
    if axis.name == "recompute" and len(value) > 1 and all(isinstance(v, str) and v in _MODULES for v in value):
        one = "+".join(str(item) for item in value)
        accepted = f"{one} (one choice), {[[item] for item in value]} (one choice each)"
        raise document.error(key, "a list of modules alone is ambiguous", value, accepted)


def _numbers(document: Document, axis: Axis, key: Key, value: dict[str, Plain]) -> Iterator[int]:
    """The numbers of `{range: [first, last, step]}` or `{powers_of_two: [first, last]}`, the last included."""
    if len(value) != 1 or next(iter(value)) not in _SPREADS:
        raise document.error(key, "a mapping must hold one of range, powers_of_two", value, "{range: [1, 60]}")
    ((kind, bounds),) = value.items()
    at = (*key, kind)
    lengths = (2, 3) if kind == "range" else (2,)
    if not isinstance(bounds, list) or len(bounds) not in lengths:
        example = "[first, last] or [first, last, step]" if kind == "range" else "[first, last]"
        raise document.error(at, "must be a list of bounds", bounds, example)
    numbers = [whole(document, (*at, i), bound, 0, MAX_NBYTES) for i, bound in enumerate(bounds)]
    if numbers[0] > numbers[1]:
        raise document.error(at, "the first bound must not exceed the last", bounds)
    if kind == "range":
        return iter(_range(document, at, numbers))
    for i, number in enumerate(numbers):
        if number < 1 or number & (number - 1):
            raise document.error((*at, i), "must be a power of two", number, "1, 2, 4, 8 ...")
    return (1 << i for i in range(numbers[0].bit_length() - 1, numbers[1].bit_length()))


def _range(document: Document, key: Key, numbers: list[int]) -> range:
    step = numbers[2] if len(numbers) == 3 else 1
    if step < 1:
        raise document.error((*key, 2), "a step must be at least 1", step)
    values = range(numbers[0], numbers[1] + 1, step)
    if len(values) > MAX_VALUES:
        raise document.error(key, f"an axis must have at most {MAX_VALUES} values, but this has {len(values)}", numbers)
    return values
