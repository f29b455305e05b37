"""Small models of every family, recorded and canonical once a process, and the same models built from their config."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from capture.model import capture_model, capture_records
from capture.records import Recording
from estimator.build import build
from estimator.captured import CapturedModel
from estimator.graph import OpGraph
from estimator.model import ModelSpec
from tests.estimator.hf_families import FAMILIES

__all__ = ["EQUAL", "SEQ", "built", "canonical", "config_file", "recorded", "spec"]

SEQ = 4096
EQUAL = (
    "llama", "llama, biased", "mistral", "mixtral", "phi3", "gemma", "qwen2", "qwen2_moe", "qwen2_moe, a dense layer",
    "qwen3", "qwen3, biased", "qwen3_moe", "qwen3_moe, a dense layer", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "minimax_m2", "gpt_oss", "deepseek_v2", "deepseek_v3", "deepseek_v3, low-rank queries", "kimi_k2", "glm4_moe",
    "nemotron_h", "nemotron_h, latent experts", "gpt2", "gpt_neox",
)  # fmt: skip
"""Families whose captured graph is the built one, op by op."""
CLASSES = {"kimi_k2": ["DeepseekV3ForCausalLM"]}  # as the publisher's file names them


def config_file(folder: Path, family: str) -> Path:
    """A config.json of the small model."""
    config = FAMILIES[family][0]
    path = folder / "config.json"
    named = {"architectures": CLASSES[config["model_type"]]} if config["model_type"] in CLASSES else {}
    path.write_text(json.dumps(config | named), encoding="utf-8")
    return path


@lru_cache(maxsize=64)
def recorded(folder: Path, family: str, phase: str = "train") -> Recording:
    return capture_records(config_file(folder, family), phase=phase)


@lru_cache(maxsize=64)
def canonical(folder: Path, family: str) -> CapturedModel:
    return capture_model(config_file(folder, family))


@lru_cache(maxsize=64)
def spec(family: str) -> ModelSpec:
    """The model that its config describes, without multi-token prediction, which transformers leaves out."""
    return replace(ModelSpec.from_hf_config(FAMILIES[family][0]), num_mtp_layers=0, mtp_layer=None)


def built(family: str) -> OpGraph:
    return build(spec(family), SEQ)
