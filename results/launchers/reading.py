"""What every reader ends with: conflicts, sizes that follow from others, and what became of each setting."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from results.launchers.job import Imported
from results.launchers.settings import Settings, Value
from results.launchers.table import Values

__all__ = ["check_exclusive", "data_parallel", "finished", "model_label", "skip_as_priced", "whole_batch"]


def check_exclusive(given: Settings, groups: Sequence[Sequence[str]]) -> None:
    """ValueError where a file gives two settings that the framework takes one of."""
    for group in groups:
        there = [name for name in group if name in given and given.take(name) is not False]
        if len(there) > 1:
            one, other = (given.spelled(name) for name in there[:2])
            raise ValueError(f"{given.place(there[1])}: {one} and {other} exclude one another; keep one of them")


def data_parallel(given: Settings, num_chips: int | None, degrees: Mapping[str, Value]) -> int | None:
    """Data-parallel ranks: what the degrees leave of the GPUs."""
    inner = 1
    for name in ("tp", "cp", "pp"):
        size = degrees[name]
        assert isinstance(size, int)
        inner *= size
    if num_chips is None:
        return None
    if num_chips % inner:
        told = " * ".join(f"{name} {degrees[name]}" for name in ("tp", "cp", "pp"))
        raise ValueError(f"{given.source}: GPUs ({num_chips}) must be divisible by {told}; correct one, or give --gpus")
    return num_chips // inner


def whole_batch(given: Settings, batch: int | None, micro: Value, dp: int | None) -> int | None:
    """Sequences of a step: what the file says, else one micro-batch per data-parallel rank."""
    if batch is not None:
        return batch
    if dp is None or not isinstance(micro, int):
        given.missing.append("global batch: the file has none, and GPUs are not known; give --gpus N")
        return None
    given.note(f"global_batch={micro * dp}", "the file has none: one micro-batch for each data-parallel rank")
    return micro * dp


def model_label(source: str) -> str:
    """A name for a model that a file describes.

    >>> model_label("jobs/llama 7b.sh")
    'llama_7b'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", Path(source).stem).strip("_.-") or "imported"


def skip_as_priced(given: Settings, priced_as: Mapping[str, Sequence[str]]) -> None:
    """Uses settings whose value says what is priced anyway; others have no counterpart."""
    for name, accepted in priced_as.items():
        if name in given:
            value = str(given.take(name)).lower()
            if value not in accepted:
                given.without_counterpart(name)


def finished(
    given: Settings, *, framework: str, model: str | Values | None, num_chips: int | None, seq: int | None,
    global_batch: int | None, strategy: Values, unknown: Sequence[str], costs: Callable[[str], bool | None],
) -> Imported:  # fmt: skip
    """The job, with every unused setting told apart: `costs` says of a name whether it may matter, None: unknown."""
    ignored, strangers = [], list(unknown)
    for name in given.rest():
        if name not in given:
            continue
        matters = costs(name)
        if matters is None:
            strangers.append(given.spelled(name))
        elif matters:
            given.without_counterpart(name)
        else:
            ignored.append(given.spelled(name))
    return Imported(
        framework=framework,
        model=model,
        num_chips=num_chips,
        seq=seq,
        global_batch=global_batch,
        strategy=strategy,
        unknown=tuple(dict.fromkeys(strangers)),
        unmodelled=tuple(dict.fromkeys(given.unmodelled)),
        ignored=tuple(dict.fromkeys(ignored)),
        assumed=tuple(given.assumed),
        missing=tuple(dict.fromkeys(given.missing)),
    )
