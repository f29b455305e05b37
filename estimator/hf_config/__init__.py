"""Hugging Face `config.json` of the architectures we know, translated into the keys of our own model files.

Every key must be understood (reader.py). Of a model that sees or hears too, the text part is read, and a note says so.
Knows nothing of ModelSpec.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from estimator.hf_config import deepseek, hybrid, layer_norm, llama
from estimator.hf_config.reader import Reader
from estimator.hf_config.shape import Fields
from estimator.mapping import shown, told_kind

__all__ = ["ARCHITECTURES", "read_hf_config"]

ARCHITECTURES: Mapping[str, Callable[[Reader], Fields]] = {
    **llama.ARCHITECTURES, **deepseek.ARCHITECTURES, **hybrid.ARCHITECTURES, **layer_norm.ARCHITECTURES,
}  # fmt: skip

DROPOUTS: Mapping[str, tuple[str, ...]] = {
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "hidden_dropout": ("hidden_dropout", "resid_pdrop"),  # the embedding's, a key of its own, is that of layers
}
DEFAULT_DROPOUT = {"gpt2": 0.1}  # the class default where a file is silent

# Often asked for, and not expressible: by what they have that the others lack.
FOUR_NORMS = "a layer has a norm behind attention and MLP as well as before"
BARE_NORM = "its LayerNorm has no bias"
UNMODELLED = {
    "cohere": BARE_NORM, "cohere2": BARE_NORM, "gemma2": FOUR_NORMS, "gemma3_text": FOUR_NORMS, "glm4": FOUR_NORMS,
}  # fmt: skip

# Keys of a file that wraps a text model: how other senses come in.
WRAPPER_HARMLESS = frozenset(
    "vision_config audio_config text_config boi_token_index eoi_token_index image_token_index image_token_id "
    "boi_token_id eoi_token_id audio_token_id video_token_id vision_start_token_id vision_end_token_id "
    "media_placeholder_token_id ignore_index use_unified_vision_chunk video_placeholder mm_tokens_per_image".split()
)


def read_hf_config(source: Mapping[str, Any] | str | Path) -> Fields:
    """Keys and values of our model files (their parts nested) from a mapping, a JSON file or a folder with one."""
    if isinstance(source, Mapping):
        return _translate(source)
    path = Path(source)
    if os.path.isdir(path) and not os.path.isfile(path / "config.json"):
        raise ValueError("a folder of a model holds a config.json, but this has none; give the file")
    path = path / "config.json" if os.path.isdir(path) else path  # not path.is_dir(), which raises on a name too long
    return _translate(_load(path)) | {"name": _name_of(path)}


def _load(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror}); give a config.json or its folder") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it must be JSON text ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"it must hold a JSON object, but got {told_kind(config)}; give a config.json")
    return config


def _name_of(path: Path) -> str:
    """`Qwen3-8B` of `Qwen--Qwen3-8B_config.json`, and of `Qwen3-8B/config.json`."""
    return path.resolve().parent.name if path.stem == "config" else path.stem.removesuffix("_config").split("--")[-1]


def _translate(config: Mapping[str, Any]) -> Fields:
    model_type, inner = config.get("model_type"), config.get("text_config")
    if _known(config):
        return _read(config)
    if isinstance(inner, Mapping) and _known(inner):
        return _read_text_part(config, inner)
    for kind in (model_type, inner.get("model_type") if isinstance(inner, Mapping) else None):
        if isinstance(kind, str) and kind in UNMODELLED:
            raise ValueError(f"model_type {kind!r} is not modelled: {UNMODELLED[kind]}; have {sorted(ARCHITECTURES)}")
    if model_type is None and not isinstance(inner, Mapping):
        raise ValueError(f"model_type is absent, which names the architecture; give one of {sorted(ARCHITECTURES)}")
    raise ValueError(f"model_type {shown(model_type)} is not a known architecture; have {sorted(ARCHITECTURES)}")


def _known(config: Mapping[str, Any]) -> bool:
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in ARCHITECTURES


def _read(config: Mapping[str, Any]) -> Fields:
    reader = Reader(config)
    reader.require_off()
    fields: Fields = {"name": reader.model_type} | ARCHITECTURES[reader.model_type](reader)
    for field, keys in DROPOUTS.items():
        if rate := reader.rate(keys, DEFAULT_DROPOUT.get(reader.model_type, 0.0)):
            fields[field] = rate
    reader.require_understood()
    return fields | ({"notes": tuple(reader.notes)} if reader.notes else {})


def _read_text_part(config: Mapping[str, Any], inner: Mapping[str, Any]) -> Fields:
    outer = Reader(config)
    tied = "tie_word_embeddings"
    outer.require_off()
    outer.skip(tied, *WRAPPER_HARMLESS)
    outer.require_understood()
    fields = _read({tied: config[tied], **inner} if tied in config else inner)
    note = f"the text part alone of {shown(config.get('model_type'))}, without what sees or hears"
    return fields | {"notes": (note, *fields.get("notes", ()))}
