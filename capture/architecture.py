"""From a Hugging Face config.json to the model class that it names, without the network.

Code that a config brings along is run only when it is trusted. Of a model that sees or hears too, the text model is
taken. Refuses files that are no config, and says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from estimator.mapping import given, shown, told_kind
from estimator.parts import MAX_SIZE

__all__ = ["Architecture", "quiet", "read_architecture"]

MAX_LAYERS = 10_000  # each is made, though without data
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
         "vocab_size", "head_dim", "num_experts", "num_local_experts", "n_routed_experts")  # fmt: skip
MODEL_TYPE = "transformers lists what it knows as CONFIG_MAPPING, 'llama' for one"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A configuration object of transformers, and what makes its causal language model for an attention function."""

    name: str
    config: Any
    make: Callable[[str], Any]
    notes: tuple[str, ...] = ()


def read_architecture(path: Path, *, trust_remote_code: bool = False) -> Architecture:
    """ValueError names the file, the key and what would be accepted."""
    content = _content(path)
    _check_sizes(path, content)
    try:
        return _of_content(path, content, trust_remote_code)
    except ImportError as error:
        raise ValueError(f"{path}: its code cannot be imported ({error})") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers keeps its advice, and its doubts about values that it refuses later, to itself."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _content(path: Path) -> dict[str, Any]:
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{path}: a folder of a model holds a config.json, but this has none; give the file")
    path = path / "config.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give a config.json or its folder") from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        law = "must be JSON text, but is empty" if not text.strip() else f"must be JSON text ({error})"
        raise ValueError(f"{path}: {law}; give a Hugging Face config.json") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: must hold a JSON object, but got {told_kind(content)}; give a Hugging Face config.json"
        )
    if not isinstance(content.get("model_type"), str):
        raise ValueError(
            f"{path}: model_type must be a text, which names the code, but {given(content, 'model_type')}; {MODEL_TYPE}"
        )
    return content


def _check_sizes(path: Path, content: dict[str, Any]) -> None:
    inner = content.get("text_config")
    for prefix, part in (("", content), ("text_config.", inner if isinstance(inner, dict) else {})):
        for key in SIZES:
            value = part.get(key)
            least, most = 0 if key.endswith("experts") else 1, MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise ValueError(
                    f"{path}: {prefix}{key} must be a whole number from {least} to {most}, but got {shown(value)}; "
                    "give the model's own"
                )


def _of_content(path: Path, content: dict[str, Any], trust_remote_code: bool) -> Architecture:
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind, notes = content["model_type"], []
    plain = {key: value for key, value in content.items() if key != "quantization_config"}
    if trust_remote_code and "auto_map" in content:
        folder = path if path.is_dir() else path.parent
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        trusted = partial(AutoModelForCausalLM.from_config, config, trust_remote_code=True)
        return Architecture(_name_of(path), config, lambda attention: trusted(attn_implementation=attention))
    if kind in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[kind]
    else:
        config_class = _named_class(path, kind, content, transformers)
        notes.append(f"model_type {kind!r} is read as {config_class.model_type!r}, whose class the file names")
    try:
        with quiet():
            config = config_class.from_dict(plain)
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: transformers {transformers.__version__} refuses it: {reason}") from error
    text = config.get_text_config()
    if text is not config:
        notes.append(f"the text part alone of {kind!r}, without what sees or hears")
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{path}: transformers {transformers.__version__} has no causal language model of {text.model_type!r}; "
            "another version may, or --trust-remote-code where the folder holds the code"
        )
    made = partial(MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]._from_config, text)
    return Architecture(_name_of(path), text, lambda attention: made(attn_implementation=attention), tuple(notes))


def _named_class(path: Path, kind: str, content: dict[str, Any], transformers: Any) -> Any:
    """The config class of the first architecture that the file names and transformers has (Kimi-K2: DeepSeek-V3)."""
    names = content.get("architectures") or []
    for name in names:
        found = getattr(transformers, name, None)
        if found is not None:
            return found.config_class
    remote = "; its own code may: --trust-remote-code" if "auto_map" in content else ""
    known = f"transformers {transformers.__version__} knows neither model_type {kind!r} nor {names or 'architectures'}"
    raise ValueError(f"{path}: {known}{remote}")


def _name_of(path: Path) -> str:
    """`Qwen3-8B` of `Qwen--Qwen3-8B_config.json`, and of `Qwen3-8B/config.json`."""
    path = path / "config.json" if path.is_dir() else path
    return path.resolve().parent.name if path.stem == "config" else path.stem.removesuffix("_config").split("--")[-1]
