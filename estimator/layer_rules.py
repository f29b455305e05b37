"""What kinds of layers ask of a split: predicates for the table in rules.py. Sizes are arrays `[N]`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from estimator.layers import LayerSpec
from estimator.model import ModelSpec
from estimator.strategy import ContextParallel, Fusion, Strategy

__all__ = ["groups_split", "keys_gathered", "keys_read", "layers_of", "scans_spread", "split_groups"]


@lru_cache(maxsize=256)
def layers_of(model: ModelSpec) -> frozenset[LayerSpec]:
    """Distinct layers, with those of MTP."""
    return frozenset((*model.layer_specs, *((model.mtp_layer_spec,) if model.num_mtp_layers else ())))


def split_groups(model: ModelSpec) -> dict[str, int]:
    """Groups that tp must keep whole, beside attention's heads, by what they are called."""
    found = {}
    if model.mamba is not None:
        found["groups of mamba"] = model.mamba.groups
    if model.linear is not None:
        found["key heads of linear attention"] = model.linear.num_key_heads
    if model.compressed is not None:
        found["o_groups of compressed attention"] = model.compressed.o_groups
    return found


def groups_split(model: ModelSpec, tp: np.ndarray) -> np.ndarray:
    """Whether every rank has whole groups."""
    return np.logical_and.reduce(
        [tp >= 1, *(number % np.maximum(tp, 1) == 0 for number in split_groups(model).values())]
    )


def scans_spread(model: ModelSpec, tp: np.ndarray, cp: np.ndarray) -> np.ndarray:
    """Whether context parallelism can spread the heads of a recurrence, as Ulysses does those of attention."""
    heads = [] if model.mamba is None else [model.mamba.num_heads]
    heads += [] if model.linear is None else [model.linear.num_key_heads]
    spread = [number % np.maximum(tp * cp, 1) == 0 for number in heads]
    return np.logical_or(cp == 1, np.logical_and.reduce([cp >= 1, *spread]))


def _chooses(model: ModelSpec) -> bool:
    return any(layer.indexed or layer.compression for layer in layers_of(model))


def keys_gathered(model: ModelSpec, strategy: Strategy, cp: np.ndarray, seq: int) -> np.ndarray:
    """Whether layers that choose or compress keys have all of them at once, in whole entries of a rank's tokens."""
    if not _chooses(model):
        return np.asarray(cp >= 1)
    entries = {layer.compression for layer in layers_of(model) if layer.compression}
    whole = np.logical_and.reduce([cp >= 1, *(seq % np.maximum(cp * number, 1) == 0 for number in entries)])
    return whole & ((cp == 1) | (strategy.context_parallel is ContextParallel.ALL_GATHER))


def keys_read(model: ModelSpec, strategy: Strategy, like: np.ndarray) -> np.ndarray:
    """Whether layers that choose or compress keys have their kernel."""
    return np.full(like.shape, not _chooses(model) or Fusion.FLASH_ATTENTION in strategy.fusion)
