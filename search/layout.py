"""Layout strings of Megatron Core (`--pipeline-model-parallel-layout`): which layers sit on which pipeline chunk.

A layout lists chunks in model order: chunk i is virtual stage i // pp of rank i % pp. Read by `layers_of` and
`chunk_layers`, written by `layout_string`. Knows nothing of what layers cost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["chunk_layers", "expand", "filled_layers", "layers_of", "layout_string"]

_MAX_SLOTS = 100_000  # A layout longer than this is a typing error, and expanding it would fill the memory.
_LONGEST_GROUP = 8  # chunks that a writer looks at for a pattern that repeats
_TOKEN = re.compile(r"[EtmL|()*]|\d+")


def expand(layout: str) -> str:
    """A layout string without its multiplications and groups. Commas and spaces only please the eye.

    `E` embedding, `t` transformer layer, `m` multi-token-prediction layer, `L` loss, `|` next chunk; `x*n` and
    `(...)*n` repeat.

    >>> expand("Et*2|(t|)*2,tmL")
    'Ett|t|t|tmL'
    """
    tokens = _tokens(layout)
    text, rest = _sequence(tokens, 0, layout)
    if rest != len(tokens):
        raise ValueError(f"brackets of a pipeline layout must match, but {layout!r} has a ')' too many")
    return text


def chunk_layers(layout: str, *, num_chunks: int, num_layers: int, num_mtp_layers: int = 0) -> tuple[int, ...]:
    """Transformer layers per chunk of a layout string, checked against the model and the pipeline.

    >>> chunk_layers("Et|(t*2|)*2tL", num_chunks=4, num_layers=6)
    (1, 2, 2, 1)
    """
    text = expand(layout)
    chunks = text.count("|") + 1
    if chunks != num_chunks:
        raise ValueError(f"a pipeline layout must have pp * vpp ({num_chunks}) chunks, but {layout!r} has {chunks}")
    for symbol, what, expected in (
        ("E", "embedding", 1),
        ("t", "layers", num_layers),
        ("m", "mtp_layers", num_mtp_layers),
        ("L", "loss", 1),
    ):
        if text.count(symbol) != expected:
            raise ValueError(
                f"a pipeline layout must hold {what} {expected} times ({symbol!r}), "
                f"but {layout!r} holds {text.count(symbol)}"
            )
    return layers_of(layout)[0]


def layers_of(layout: str) -> tuple[tuple[int, ...], int]:
    """Transformer layers per chunk of a layout string, and its MTP layers: whatever the model.

    >>> layers_of("Et*2|tmL")
    ((2, 1), 1)
    """
    text = expand(layout)
    if re.fullmatch(r"Et*(\|t*)*m*L", text) is None:
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise ValueError(
            f"a pipeline layout must start with E and end with m and L on its last chunk, but {layout!r} is {shown!r}"
        )
    return tuple(chunk.count("t") for chunk in text.split("|")), text.count("m")


def layout_string(layers: Sequence[int], num_mtp_layers: int = 0) -> str:
    """The string that `layers_of` reads: groups of chunks that repeat are written once.

    >>> layout_string([4] * 15 + [1], 1)
    'Et*4|(t*4|)*14tmL'
    >>> layout_string([1, 2, 2, 3, 2, 3, 0])
    'Et|t*2|(t*2|t*3|)*2L'
    """
    if len(layers) == 1:
        return f"E{_times('t', layers[0])}{_times('m', num_mtp_layers)}L"
    first, *middle, last = layers
    chunks = [f"{_times('t', n)}|" for n in middle]
    parts = [f"E{_times('t', first)}|"]
    while chunks:
        text, used = _shortest_start(chunks)
        parts.append(text)
        chunks = chunks[used:]
    return "".join(parts) + f"{_times('t', last)}{_times('m', num_mtp_layers)}L"


def _times(symbol: str, number: int) -> str:
    return symbol * number if number < 2 else f"{symbol}*{number}"


def _shortest_start(chunks: Sequence[str]) -> tuple[str, int]:
    """The start of some chunks as the group that saves most, and how many chunks it stands for."""
    best, used, saved = chunks[0], 1, 0
    for period in range(1, min(_LONGEST_GROUP, len(chunks) // 2) + 1):
        group, repeats = chunks[:period], 1
        while chunks[repeats * period : (repeats + 1) * period] == group:
            repeats += 1
        plain = "".join(group)
        text = f"|*{repeats}" if plain == "|" else f"({plain})*{repeats}"
        if repeats > 1 and len(plain) * repeats - len(text) > saved:
            best, used, saved = text, period * repeats, len(plain) * repeats - len(text)
    return best, used


def filled_layers(*, num_layers: int, num_chunks: int) -> tuple[int, ...] | None:
    """Chunks of equally many layers, the last of which takes what is left; None where nothing would be left.

    So Megatron lays out DeepSeek-V3 (`Et*4|(t*4|)*14tmL`), whose last chunk also holds MTP and loss.

    >>> filled_layers(num_layers=13, num_chunks=4)
    (4, 4, 4, 1)
    """
    each = -(-num_layers // num_chunks)
    last = num_layers - each * (num_chunks - 1)
    return (*(each,) * (num_chunks - 1), last) if last > 0 else None


def _tokens(layout: str) -> list[str]:
    text = re.sub(r"[\s,]", "", layout)
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        stranger = _TOKEN.sub("", text)[0]
        raise ValueError(
            f"a pipeline layout is written with E t m L | * ( ) and numbers, but {layout!r} has {stranger!r}"
        )
    return tokens


def _sequence(tokens: list[str], at: int, layout: str) -> tuple[str, int]:
    """Expands up to a closing bracket or the end; returns the text and where it stopped."""
    parts: list[str] = []
    while at < len(tokens) and tokens[at] != ")":
        part, at = _item(tokens, at, layout)
        repeats = 1
        if at < len(tokens) and tokens[at] == "*":
            if at + 1 == len(tokens) or not tokens[at + 1].isdigit():
                raise ValueError(f"'*' of a pipeline layout must be followed by a number, but {layout!r} has none")
            repeats = int(tokens[at + 1][:9])
            at += 2
        if sum(map(len, parts)) + len(part) * repeats > _MAX_SLOTS:
            raise ValueError(f"a pipeline layout must hold at most {_MAX_SLOTS} symbols, but {layout!r} holds more")
        parts.append(part * repeats)
    return "".join(parts), at


def _item(tokens: list[str], at: int, layout: str) -> tuple[str, int]:
    """One symbol, or a bracketed group."""
    if tokens[at] == "(":
        text, at = _sequence(tokens, at + 1, layout)
        if at == len(tokens):
            raise ValueError(f"brackets of a pipeline layout must match, but {layout!r} lacks a ')'")
        return text, at + 1
    if tokens[at] == "*" or tokens[at].isdigit():
        raise ValueError(f"a number of a pipeline layout must follow '*' after a symbol or group, but got {layout!r}")
    return tokens[at], at + 1
