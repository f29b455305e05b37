"""Which blocks sit on which pipeline chunk and rank. Counts only: no bytes, no seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from estimator.graph import BlockKind
from estimator.model import ModelSpec
from estimator.schedule import placement
from estimator.strategy import Schedule

__all__ = ["Layout", "alike", "even_layers", "layout_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """C chunks in model order on p ranks, K block kinds.

    `counts` [C, K]: blocks that run on each chunk. `first` [C, L + 1, K]: blocks among the first N layers of a chunk
    (what block recompute takes); where each chunk recomputes its own number of layers, `first` [C, 3, K] holds none,
    these, all of them: block recompute of one "layer". `held` [p, K]: blocks whose weights a rank holds; a shared
    weight is held once. `chunks_of` [p, v']: chunks that a rank runs.

    Most chunks are alike: `class_of` [C] gives each its class, and the first chunk of a class stands for it in
    `classes` [Q]. `leads`: the first of every set of ranks that hold the same blocks and run chunks of the same
    classes.
    """

    counts: np.ndarray
    first: np.ndarray
    held: np.ndarray
    chunks_of: np.ndarray
    class_of: np.ndarray
    classes: np.ndarray
    leads: np.ndarray


def even_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers per chunk as even as they go.

    What is left over goes to the middle: the last chunk, then the first, then those next to them stay short, for they
    also hold head, MTP and embedding.

    >>> even_layers(61, 16)
    (3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 3)
    """
    base, left = divmod(num_layers, num_chunks)
    order: list[int] = []
    low, high = 0, num_chunks - 1
    while low <= high:
        order.append(high)
        if low != high:
            order.append(low)
        low, high = low + 1, high - 1
    longer = set(order[num_chunks - left :])
    return tuple(base + (chunk in longer) for chunk in range(num_chunks))


@lru_cache(maxsize=4096)
def layout_of(
    model: ModelSpec, kinds: tuple[BlockKind, ...], schedule: Schedule, pp: int, vpp: int,
    layers: tuple[int, ...] | None = None, recomputed: tuple[int, ...] | None = None,
) -> Layout:  # fmt: skip
    """Counts for `layers` per chunk (None: even), of which the first `recomputed` are recomputed (None: as asked).

    Embedding and positions sit on the first chunk; head and MTP on the last, which keeps a copy of the embedding for
    MTP's look-ups.
    """
    num_chunks = pp * vpp
    layers = layers or even_layers(model.num_layers, num_chunks)
    column = {kind: i for i, kind in enumerate(kinds)}
    layer_columns = [column[BlockKind.of(layer)] for layer in model.layer_specs]
    counts = np.zeros((num_chunks, len(kinds)))
    first = np.zeros((num_chunks, max(layers) + 1, len(kinds)))
    start = 0
    for chunk, num in enumerate(layers):
        for n in range(max(layers)):
            first[chunk, n + 1] = first[chunk, n]
            if n < num:
                first[chunk, n + 1, layer_columns[start + n]] += 1
        counts[chunk] = first[chunk, -1]
        start += num
    if recomputed is not None:
        assert len(recomputed) == num_chunks
        first = np.stack([first[:, 0], first[np.arange(num_chunks), recomputed], first[:, -1]], axis=1)
    for kind in (BlockKind.EMBEDDING, BlockKind.POSITIONS):
        if kind in column:
            counts[0, column[kind]] = 1
    counts[-1, column[BlockKind.HEAD]] = 1
    if model.num_mtp_layers:
        counts[-1, column[BlockKind.EMBEDDING]] = 1
        counts[-1, column[BlockKind.MTP]] = model.num_mtp_layers
        counts[-1, column[BlockKind.of(model.mtp_layer_spec)]] += model.num_mtp_layers
    chunks_of = placement(schedule, pp, vpp)
    held = counts[chunks_of].sum(axis=1)
    embedding, head = column[BlockKind.EMBEDDING], column[BlockKind.HEAD]
    held[:, embedding] = np.minimum(held[:, embedding], 1)
    if model.tied_embeddings:
        held[:, embedding] = np.where(held[:, head] > 0, 0, held[:, embedding])
    class_of, classes = alike([np.append(first[chunk].ravel(), counts[chunk]) for chunk in range(num_chunks)])
    _, leads = alike([np.append(class_of[chunks_of[rank]], held[rank]) for rank in range(pp)])
    return Layout(
        counts=counts, first=first, held=held, chunks_of=chunks_of, class_of=class_of, classes=classes, leads=leads
    )


def alike(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Class of each row, and the first row of each class."""
    seen: dict[bytes, int] = {}
    firsts: list[int] = []
    class_of = np.empty(len(rows), dtype=np.int64)
    for i, row in enumerate(rows):
        key = row.tobytes()
        if key not in seen:
            seen[key] = len(firsts)
            firsts.append(i)
        class_of[i] = seen[key]
    return class_of, np.array(firsts, dtype=np.int64)
