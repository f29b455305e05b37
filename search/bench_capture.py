"""Cases of `search bench` about captured graphs: how long a capture takes, how large its file is, how fast it sweeps.

The config of DeepSeek-V3 is made from the shipped model's sizes, so that an installed copy needs no file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from capture.model import capture_model
from estimator.captured import CapturedModel
from estimator.graph_file import graph_text
from estimator.model import ModelSpec
from estimator.model_io import load_model
from search.space import load_space
from spaces import MODELS

__all__ = ["capture_s", "captured", "graph_bytes", "peak_rss_bytes", "sweep_captured_over_spec"]

MODEL = "deepseek_v3"
NUM_CAPTURES = 5
NUM_PAIRS = 3


def _config(model: ModelSpec) -> dict[str, object]:
    """What a config.json of DeepSeek-V3's architecture says of these sizes."""
    mla, moe = model.mla, model.moe
    assert mla is not None
    assert moe is not None
    return {
        "model_type": "deepseek_v3", "hidden_size": model.hidden, "intermediate_size": model.ffn,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads, "vocab_size": model.vocab, "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank, "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim, "v_head_dim": mla.v_head_dim, "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.ffn, "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": moe.num_dense_layers, "n_group": 8, "topk_group": moe.max_nodes_per_token,
    }  # fmt: skip


def captured() -> CapturedModel:
    """DeepSeek-V3, captured from a config of its sizes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(_config(load_model(MODEL, [MODELS]))), encoding="utf-8")
        return capture_model(path)


def capture_s() -> float:
    """Forward and backward of 671 B parameters to the canonical graph, imports done."""
    captured()
    return median(_timed() for _ in range(NUM_CAPTURES))


def _timed() -> float:
    start = time.perf_counter()
    captured()
    return time.perf_counter() - start


def peak_rss_bytes() -> float:
    """Of a process that captures the model alone: the framework's own memory included."""
    code = (
        "from search.bench_capture import captured\ncaptured()\n"
        "(line,) = (line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(int(line.split()[1]) * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    return float(done.stdout.split()[-1])


def graph_bytes() -> float:
    """The file of the 61 layers."""
    return float(len(graph_text(captured())))


def sweep_captured_over_spec() -> float:
    """Candidates priced a second of the captured graph over those of the model file: the median of pairs."""
    from search.sweep import measure_rate

    space = load_space(MODEL)
    ours = replace(space, model=captured())
    plain = replace(space, model=replace(space.model, num_mtp_layers=0, mtp_layer=None))
    return median(measure_rate(ours)[0] / measure_rate(plain)[0] for _ in range(NUM_PAIRS))
