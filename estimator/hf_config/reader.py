"""A Hugging Face config that remembers which of its keys were understood, and refuses what was not.

Every key must be read, or checked to be off, or listed as harmless to the shape. Anything else is an error that names
the key, since a model read wrongly is worse than one refused. Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from estimator.mapping import shown

__all__ = ["MAX_LAYERS", "Reader"]

MAX_LAYERS = 10**5  # as many as a model may have; a list is made of them before the model sees their number

# Keys that change neither the shape nor the work of a training step, by what they are about.
HARMLESS = frozenset(
    # names and versions
    "architectures auto_map model_type name_or_path tokenizer_class transformers_version problem_type finetuning_task "
    "prefix id2label label2id num_labels task_specific_params "
    # numbers in the arithmetic: activation function, rotary angles, scales, initial values, regularisation
    "hidden_act initializer_range rms_norm_eps max_position_embeddings rope_theta rope_scaling rope_parameters "
    "rope_interleave norm_topk_prob routed_scaling_factor scoring_func seq_aux aux_loss_alpha "
    "router_aux_loss_coef router_jitter_noise partial_rotary_factor "
    # how it is stored, split or returned; precision is the strategy's business
    "torch_dtype dtype quantization_config pretraining_tp ep_size use_cache use_bfloat16 torchscript return_dict "
    "return_dict_in_generate output_attentions output_hidden_states output_router_logits output_scores "
    "attn_implementation chunk_size_feed_forward "
    # tokens and text generation
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id bad_words_ids "
    "begin_suppress_tokens suppress_tokens forced_bos_token_id forced_eos_token_id do_sample early_stopping "
    "num_beams num_beam_groups diversity_penalty length_penalty repetition_penalty encoder_no_repeat_ngram_size "
    "is_decoder no_repeat_ngram_size exponential_decay_length_penalty min_length max_length num_return_sequences "
    "remove_invalid_values temperature top_k top_p typical_p tf_legacy_loss".split()
)

# Keys of every architecture that must be off: their value must be one of these.
OFF: tuple[object, ...] = (None, False, 0, {})
MUST_BE_OFF = (
    "add_cross_attention", "is_encoder_decoder", "cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads",
)  # fmt: skip


@dataclass(slots=True)
class Reader:
    """A config that remembers which of its keys were understood."""

    config: Mapping[str, Any]
    seen: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)  # what the model leaves out, for whoever reads a result

    @property
    def model_type(self) -> str:
        """The architecture, as the file has it."""
        return str(self.config["model_type"])

    def raw(self, key: str) -> object:
        """The value as it stands, None when absent."""
        self.seen.add(key)
        return self.config.get(key)

    def skip(self, *keys: str) -> None:
        """Keys that do not change the shape of this architecture."""
        self.seen.update(keys)

    def integer(self, key: str, default: int | None = None) -> int:
        """A count; required when there is no default."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ValueError(f"{key} is required for model_type {self.model_type!r}, but is absent; add it")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{key} must be an integer, but got {shown(value)}")
        return value

    def nullable(self, key: str, if_null: int) -> int:
        """An integer where null means `if_null`; absence would mean the class default, which is not assumed."""
        return self.integer(key, if_null if key in self.config else None)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, but got {shown(value)}")
        return value

    def rate(self, keys: Iterable[str], default: float) -> float:
        """A dropout rate from 0 to below 1, under the first of its keys that the file has."""
        for key in keys:
            if (value := self.raw(key)) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise ValueError(f"{key} must be at least 0 and below 1, but got {shown(value)}")
            return float(value)
        return default

    def within(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """An integer from `least` to `most`."""
        value = self.integer(key, default)
        if not least <= value <= most:
            raise ValueError(f"{key} must be from {least} to {most}, but got {shown(value)}; give the model's own")
        return value

    def places(self, key: str, num_layers: int) -> list[int]:
        """A list of layers by number; none when absent."""
        value = self.raw(key)
        if value is None:
            return []
        if not isinstance(value, list) or any(type(i) is not int or not 0 <= i < num_layers for i in value):
            raise ValueError(f"{key} must list layers from 0 to {num_layers - 1}, but got {shown(value)}")
        return value

    def per_layer(self, key: str, num_layers: int, known: Iterable[object]) -> list[Any] | None:
        """A list with one of the `known` values for each layer, None when absent."""
        value, known = self.raw(key), list(known)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers:
            raise ValueError(f"{key} must list num_hidden_layers ({num_layers}) layers, but got {shown(value)}")
        for kind in value:
            if not any(type(kind) is type(k) and kind == k for k in known):
                raise ValueError(f"{key} must be of {known} (no other is modelled), but got {shown(kind)}")
        return value

    def require(self, key: str, *accepted: object) -> None:
        """Refuses a value that is not accepted; None accepts absence."""
        value = self.raw(key)
        if not any(value is a or (type(value) is type(a) and value == a) for a in accepted):
            raise ValueError(f"{key} must be one of {list(accepted)} (no other is modelled), but got {shown(value)}")

    def require_off(self) -> None:
        """Refuses what no architecture here has."""
        for key in MUST_BE_OFF:
            self.require(key, *OFF)

    def require_understood(self) -> None:
        """Refuses keys that nothing has read."""
        unknown = sorted(k for k in map(str, self.config) if k not in self.seen | HARMLESS and not k.startswith("_"))
        if unknown:
            first = unknown[0] if unknown[0].isidentifier() else shown(unknown[0])
            raise ValueError(
                f"{first} is not understood for model_type {self.model_type!r}, and may change the shape (not "
                f"understood in all: {shown(unknown)}); remove a key that does not"
            )
