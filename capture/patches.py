"""What a capture changes in transformers and its models, all in one place. As of 2026-12-01, transformers 5.24.

Each patch either keeps an operation in one piece that a model would unroll (attention, recurrences), or gives a model
that runs without data what it would read from data. Nothing is changed for good: `patched` undoes all of it.

| what | why |
|---|---|
| attention function and mask function `capture`, by transformers' own registries | one record with q, k, v and the mask's window or chunk, in place of the s x s arithmetic of one of ten kernels |
| `torch_chunk_gated_delta_rule`, `torch_recurrent_gated_delta_rule` | the PyTorch form loops over chunks in Python: 72 thousand operations at 4k tokens |
| `mamba2_chunk_scan`, `mamba2_selective_state_update` | the PyTorch form spells out the kernel's matrix products with temporaries that no kernel writes |
| `find_packed_sequence_indices` | asks the data whether sequences are packed; a captured sequence is not |
| `chunked_overlay` | its padding is read from data; a captured sequence has none |
| `Llama4TextMoe.forward` | runs every expert on every token; served and trained, a token visits its experts only |
"""  # noqa: E501 - a table

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from capture.recorder import one_record

__all__ = ["ATTENTION", "patched", "window_of"]

ATTENTION = "capture"
PROBE = 1 << 20  # a query so far from the start that windows and chunks show


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:  # fmt: skip
    """query: [batch, heads, queries, qk], key: [batch, kv heads, keys, qk] -> [batch, queries, heads, v]."""
    batch, heads, queries, _ = query.shape
    shape = (batch, queries, heads, value.shape[-1])
    extra = {name: options.get(name) for name in ("s_aux", "indices") if options.get(name) is not None}
    named = {"query": query, "key": key, "value": value, "mask": attention_mask, **extra}
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    settings = {name: options[name] for name in ("dropout", "softcap") if options.get(name)}
    (out,) = one_record("attention", given, lambda: (query.new_empty(shape),), settings)
    return out, None


def window_of(mask_function: Callable[..., Any]) -> tuple[int, int]:
    """(window, chunk) of a mask function, found by asking it; (0, 0) where it is plainly causal.

    ValueError where it is none of the three.
    """

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(0, 0, torch.tensor(query), torch.tensor(key)))

    def first_seen(query: int) -> int:
        low, high = 0, query
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if sees(query, middle) else (middle + 1, high)
        return low

    if not sees(PROBE, PROBE) or sees(PROBE, PROBE + 1):
        raise ValueError("a mask that is not causal is not modelled; capture a causal language model")
    first, next_first = first_seen(PROBE), first_seen(PROBE + 1)
    if first == next_first == 0:
        return 0, 0
    if next_first == first + 1:
        return PROBE - first + 1, 0
    chunk = first - first_seen(first - 1)
    if all(first_seen(query) == query // chunk * chunk for query in (PROBE, PROBE + 1, PROBE - 1, chunk, chunk - 1)):
        return 0, chunk
    raise ValueError("a mask that is neither causal nor a window nor chunks is not modelled")


def _mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], q_offset: int = 0,
    **_: Any,
) -> Tensor:  # fmt: skip
    """[batch, 1, queries, keys] of booleans."""
    try:
        with torch.device("cpu"):
            window, chunk = _probed(mask_function)
        options: dict[str, Any] = {"window": window, "chunk": chunk}
    except ValueError as error:  # a mask that no layer reads does no harm
        options = {"refused": str(error)}
    (out,) = one_record(
        "mask", {}, lambda: (torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta"),),
        options,
    )  # fmt: skip
    return out


def _probed(mask_function: Callable[..., Any]) -> tuple[int, int]:
    from capture.recorder import paused

    with paused():
        return window_of(mask_function)


def _chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64,
    initial_state: Tensor | None = None, output_final_state: bool = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query, key: [batch, seq, key heads, k]; value: [batch, seq, value heads, v]; g, beta: without the v."""
    state = (value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    named = {"query": query, "key": key, "value": value, "decay": g, "beta": beta}
    made = lambda: (torch.empty_like(value), value.new_empty(state, dtype=torch.float32))  # noqa: E731
    out, last = one_record("gated_delta_rule", named, made, {"chunk": chunk_size, "state": initial_state is not None})
    return out, last if output_final_state else None


def _mamba2_chunk_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None, return_final_states: bool = False,
    **_: Any,
) -> Any:  # fmt: skip
    """hidden_states: [batch, seq, heads, head]; B, C: [batch, seq, groups, state] -> as hidden_states."""
    batch, _seq, heads, width = hidden_states.shape
    named = {"x": hidden_states, "dt": dt, "decay": A, "B": B, "C": C, "skip": D, "step_bias": dt_bias}
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    state = (batch, heads, width, B.shape[-1])
    made = lambda: (torch.empty_like(hidden_states), hidden_states.new_empty(state))  # noqa: E731
    out, last = one_record("mamba2_scan", given, made, {"chunk": chunk_size, "state": initial_states is not None})
    return (out, last) if return_final_states else out


def _mamba2_step(
    state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """One token: hidden_states [batch, heads, head] and the state so far."""
    named = {"x": hidden_states, "dt": dt, "decay": A, "B": B, "C": C, "skip": D, "step_bias": dt_bias, "state": state}
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    (out,) = one_record("mamba2_step", given, lambda: (torch.empty_like(hidden_states),))
    return out


def _delta_step(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    return _chunk_gated_delta_rule(query, key, value, g, beta, **{**options, "chunk_size": 1})


def _llama4_moe(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama4TextMoe with each token sent to its experts only: rows are ordered by expert as in other models."""
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    logits = nn.functional.linear(hidden_states, self.router.weight)
    scores, chosen = torch.topk(logits, self.top_k, dim=1)
    _, order = torch.sort(chosen.reshape(-1))
    rows = hidden_states[order // self.top_k] * torch.sigmoid(scores.float()).to(scores.dtype).reshape(-1)[order, None]
    counts = torch.histc(chosen.reshape(-1).int(), bins=self.num_experts, min=0, max=self.num_experts - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    gate, up = torch._grouped_mm(rows, self.experts.gate_up_proj, offs=offsets).chunk(2, dim=-1)
    rows = torch._grouped_mm(up * self.experts.act_fn(gate), self.experts.down_proj, offs=offsets)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0), device=order.device)
    routed = rows[back].view(hidden_states.shape[0], self.top_k, self.hidden_dim).sum(dim=1)
    return routed + self.shared_expert(hidden_states), logits


def _chunked_overlay(chunk_size: int, left_padding: Tensor) -> Callable[..., Any]:
    return lambda _batch, _head, query, key: key // chunk_size == query // chunk_size


MODEL_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_step,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
    "mamba2_selective_state_update": _mamba2_step,
}
MODEL_METHODS: dict[str, tuple[str, Callable[..., Any]]] = {"Llama4TextMoe": ("forward", _llama4_moe)}


@contextmanager
def patched(classes: Set[type[nn.Module]]) -> Iterator[None]:
    """Models of these module classes run as the table above says."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(masking_utils, "find_packed_sequence_indices", lambda _positions: None))
        stack.enter_context(patch.object(masking_utils, "chunked_overlay", _chunked_overlay))
        for module in {sys.modules[each.__module__] for each in classes}:
            for name, function in MODEL_FUNCTIONS.items():
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, function))
        for each in classes:
            if each.__name__ in MODEL_METHODS:
                stack.enter_context(patch.object(each, *MODEL_METHODS[each.__name__]))
        yield


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
