"""What a transformer layer is made of, and how a model file writes the layers of a model. Knows no sizes.

A layer is a mixer of tokens, an MLP, or both. Models of one kind of layer say nothing here; hybrids give a pattern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from estimator.mapping import from_mapping, shown
from estimator.precision import Tag

__all__ = ["LayerSpec", "Mixer", "Mlp", "expand_layers"]


class Mixer(Tag):
    """How a layer's tokens see one another."""

    ATTENTION = "attention"
    LINEAR = "linear"  # gated delta rule (Yang 2024, arXiv:2412.06464)
    MAMBA = "mamba"  # Mamba-2 (Dao and Gu 2024, arXiv:2405.21060)
    NONE = "none"


class Mlp(Tag):
    """What a layer does to each token alone."""

    DENSE = "dense"
    MOE = "moe"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer. Windows, chunks, compression and rotations are attention's; the sizes stand in the model.

    >>> LayerSpec(window=128, mlp=Mlp.MOE).name
    'window128+moe'
    >>> LayerSpec().name, LayerSpec(mlp=Mlp.MOE).name, LayerSpec(mixer=Mixer.MAMBA, mlp=Mlp.NONE).name
    ('dense', 'moe', 'mamba')
    """

    mixer: Mixer = Mixer.ATTENTION
    mlp: Mlp = Mlp.DENSE
    window: int = 0  # a token sees itself and the window - 1 tokens before it; 0: all before it
    chunk: int = 0  # a token sees those before it in its chunk of the sequence (Llama 4); 0: all
    rope: bool = True  # false: no position embedding (NoPE)
    indexed: bool = False  # an indexer chooses the keys that a token sees (DeepSeek-V3.2, arXiv:2512.02556)
    compression: int = 0  # tokens per compressed entry of keys and values (DeepSeek-V4); 0: none
    hash_routed: bool = False  # a token's word chooses its experts, the router only weighs them (DeepSeek-V4)

    def __post_init__(self) -> None:
        for name in ("window", "chunk", "compression"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, but got {getattr(self, name)}")
        if self.mixer is Mixer.NONE and self.mlp is Mlp.NONE:
            raise ValueError("mixer and mlp must not both be none; leave the layer out, or give it one of them")
        only_attention = self.window or self.chunk or self.indexed or self.compression or not self.rope
        if self.mixer is not Mixer.ATTENTION and only_attention:
            raise ValueError(
                f"window, chunk, rope, indexed and compression are attention's, but the mixer is {self.mixer.value}; "
                "leave them out"
            )
        if self.window and self.chunk:
            raise ValueError(f"window ({self.window}) and chunk ({self.chunk}) must not both be set; give one")
        if self.chunk and (self.indexed or self.compression):
            raise ValueError("chunk goes with neither indexed nor compression; leave it out")
        if self.indexed and self.window and not self.compression:
            raise ValueError("indexed chooses among all keys, so it goes with no window but beside compression")
        if self.hash_routed and self.mlp is not Mlp.MOE:
            raise ValueError(f"hash_routed needs mlp: moe, but got {self.mlp.value}; leave it out")

    @property
    def num_halves(self) -> int:
        """Residual branches: mixer and MLP."""
        return (self.mixer is not Mixer.NONE) + (self.mlp is not Mlp.NONE)

    @property
    def name(self) -> str:
        """A short name, `dense` and `moe` for plain layers."""
        routed = "hash-moe" if self.hash_routed else "moe"
        mlp = {Mlp.DENSE: "dense", Mlp.MOE: routed, Mlp.NONE: ""}[self.mlp]
        if self.mixer is Mixer.NONE:
            return {"dense": "mlp"}.get(mlp, f"{mlp}-mlp")
        traits = [f"{n}{size}" for n in ("window", "chunk", "compression") if (size := getattr(self, n))]
        traits += [word for word, on in (("indexed", self.indexed), ("nope", not self.rope)) if on]
        if self.mixer is Mixer.ATTENTION:
            mixer = "-".join(traits) or ("" if mlp else "attention")
        else:
            mixer = self.mixer.value
        return "+".join(part for part in (mixer, mlp) if part)


def expand_layers(value: object, num_layers: int) -> tuple[LayerSpec, ...]:
    """One layer per place from what a model file writes; a pattern shorter than the model repeats.

    A list has layers (mappings of LayerSpec's fields) with `repeat` for a run of equal ones. A mapping has a text
    `pattern` with a letter per layer, and `kinds`: the layer of each letter.

    >>> [layer.name for layer in expand_layers([{"window": 8, "repeat": 2}, {}], 6)]
    ['window8+dense', 'window8+dense', 'dense', 'window8+dense', 'window8+dense', 'dense']
    >>> kinds = {"M": {"mixer": "mamba", "mlp": "none"}, "-": {"mixer": "none"}}
    >>> [layer.name for layer in expand_layers({"pattern": "M-", "kinds": kinds}, 2)]
    ['mamba', 'mlp']
    """
    if isinstance(value, Mapping):
        pattern = _lettered(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        pattern = [layer for i, item in enumerate(value) for layer in _run(item, f"layers.{i}")]
    else:
        raise ValueError(f"layers must be a list of layers, or a pattern with its kinds, but got {shown(value)}")
    if not pattern or num_layers % len(pattern):
        raise ValueError(
            f"num_layers ({num_layers}) must be a multiple of the layers listed ({len(pattern)}), which repeat"
        )
    return tuple(pattern) * (num_layers // len(pattern))


MAX_RUN = 10**5  # as many layers as a model may have


def _run(item: object, where: str) -> list[LayerSpec]:
    if isinstance(item, LayerSpec):
        return [item]
    if not isinstance(item, Mapping):
        raise ValueError(f"{where} must hold fields of a layer, but got {shown(item)}; write {{}} for a plain one")
    repeat: Any = item.get("repeat", 1)
    if type(repeat) is not int or not 1 <= repeat <= MAX_RUN:
        raise ValueError(f"{where}.repeat must be an integer from 1 to {MAX_RUN}, but got {shown(repeat)}")
    return [from_mapping(LayerSpec, {k: v for k, v in item.items() if k != "repeat"}, f"{where}.")] * repeat


def _lettered(value: Mapping[str, Any]) -> list[LayerSpec]:
    pattern, kinds = value.get("pattern"), value.get("kinds")
    if set(value) != {"pattern", "kinds"} or not isinstance(pattern, str) or not isinstance(kinds, Mapping):
        raise ValueError(f"layers must have a text `pattern` and `kinds` of its letters, but got {shown(value)}")
    known = {str(letter): _run(layer, f"layers.kinds.{letter}") for letter, layer in kinds.items()}
    unknown = sorted(set(pattern) - known.keys())
    if unknown:
        raise ValueError(f"layers.kinds must have every letter of the pattern, but lacks {unknown}; have {list(known)}")
    return [layer for letter in pattern for layer in known[letter]]
