"""What the jitted loops of the sweep pass to each other: columns of structures, options, constraints, counts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from search.tree import Tree

__all__ = ["COUNTS", "DERIVED", "NUM_DERIVED", "OPTION_VALUES", "Filter", "Kinds", "Options", "Part"]

COUNTS = ("structures", "covered", "fits", "priced", "out_of_memory")
DERIVED = (
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu_bf16", "cost_usd_per_mtoken",
    "energy_j_per_token", "co2_kg_per_mtoken", "peak_memory_bytes", "reserved_memory_bytes", "device_memory_bytes",
    "num_gpus", "fixed_host_s",
)  # fmt: skip
"""Columns that follow from step time and memory alone, in the order in which `_derive` fills them."""
OPTION_VALUES = ("recompute_layers", "zero_stage", "overlap_tp", "overlap_ep", "overlap_pp", "overlap_dp",
                 "bucket_bytes", "recompute", "dp_replicate", "reshard_after_forward", "prefetch_blocks",
                 "offload_activations", "offload_parameters", "offload_gradients", "offload_states")  # fmt: skip


NUM_DERIVED = len(DERIVED)


class Part(NamedTuple):
    """Columns of the structures of one world (search/structures.py)."""

    row: np.ndarray
    kit: np.ndarray
    net: np.ndarray
    shared: np.ndarray
    replicas: np.ndarray
    layout: np.ndarray
    schedule: np.ndarray
    program: np.ndarray
    pp: np.ndarray
    vpp: np.ndarray
    m: np.ndarray
    id: np.ndarray
    flags: np.ndarray
    zero: np.ndarray
    num_blocks: np.ndarray
    legal: np.ndarray


class Kinds(NamedTuple):
    """Variants of the structures of one world, and what they keep where (search/worlds.py); `prices` as World has it.

    `tree`: the variants of every kit (search/tree.py). A way to keep is one of `gathers` [G, 2] (resharding, prefetch)
    and one of `hosts` [H, 4] (shares on the host), number g H + h; `share_of` [H]: which of `shares`, those of
    activations; `rest_of` [H]: which of `rests` [., 3], those of parameters, gradients and states. `pairs`
    [variants, G H]: whether rules let both stand together.
    """

    prices: np.ndarray
    ids: np.ndarray
    needs: np.ndarray
    tree: Tree
    gathers: np.ndarray
    hosts: np.ndarray
    share_of: np.ndarray
    shares: np.ndarray
    rest_of: np.ndarray
    rests: np.ndarray
    keep_ids: np.ndarray
    keep_needs: np.ndarray
    pairs: np.ndarray


class Options(NamedTuple):
    """Option axes of one world; `corner` is the index of the cheapest pseudo-choice on the tables' recompute axis."""

    plain: np.ndarray
    plain_codes: np.ndarray
    block_layers: np.ndarray
    block_ids: np.ndarray
    told_layers: np.ndarray
    block_code: float
    buckets: np.ndarray
    bucket_ids: np.ndarray
    corner: int
    use_step: bool
    use_memory: bool


class Filter(NamedTuple):
    """Constraints as postfix programs, concatenated: `ends` [C].

    `values` [V]: scratch (DERIVED, OPTION_VALUES, then the structure's own values from `own` [S, W], and its variant's
    from `of_variant` [variants, X]); `scale` [7] turns step time into columns.
    """

    opcodes: np.ndarray
    operands: np.ndarray
    ends: np.ndarray
    values: np.ndarray
    stack: np.ndarray
    own: np.ndarray
    of_variant: np.ndarray
    scale: np.ndarray
