"""What is told of each operation: parts add up, and nothing is faster than the chip."""

from __future__ import annotations

import json
import math

import pytest

from search.cli import main


def ops(capsys, *words):
    assert main([*words, "--ops", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["ops"]


CASES = {
    "dense": ("estimate", "llama3_70b:rule_of_thumb"),
    "experts in fp8": ("estimate", "deepseek_v3:published"),
    "hybrid in fp8": ("estimate", "nemotron_h_56b:recipe"),
    "fp4": ("estimate", "llama3_70b:rule_of_thumb", "--set", "strategy.precision=nvfp4", "--set",
            "system={cluster: dgx_b200, num_chips: 512}"),
    "a model": ("graph", "show", "qwen3_32b", "--chip", "h100-80g-sxm", "--backward"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_no_operation_beats_the_peaks_of_the_chip(case, capsys):
    found = ops(capsys, *CASES[case])
    kernels = [op for op in found if op["bound"] != "link"]
    assert len(kernels) > 40
    for op in kernels:
        assert op["read_bytes"] + op["written_bytes"] == pytest.approx(op["hbm_bytes"])
        assert min(op["read_bytes"], op["written_bytes"], op["compute_s"], op["memory_s"]) >= 0
        assert op["confidence"] in {"high", "medium", "low"}
        if op["hbm_bytes"]:
            assert op["intensity"] == pytest.approx(op["flops"] / op["hbm_bytes"])
        assert op["bound"] == ("compute" if op["compute_s"] >= op["memory_s"] else "memory")
        if op["seconds"]:
            assert 0 <= op["utilisation"] <= 1, op
            # Arithmetic and traffic run side by side, but for what is written behind the products.
            assert op["seconds"] >= max(op["compute_s"], op["memory_s"]) * (1 - 1e-12)


def test_a_model_without_a_chip_has_no_prices_to_list(capsys):
    assert main(["graph", "show", "llama3_8b", "--ops"]) == 2
    message = capsys.readouterr().err
    assert "has no prices; name a --chip" in message
    assert message.count("\n") == 1


def test_sources_of_operations_are_those_of_the_shares(capsys):
    assert main(["estimate", "llama3_70b:rule_of_thumb", "--ops", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    told = {op["source"] for op in data["ops"] if op["bound"] != "link"}
    assert told == {name for name, share in data["price_sources"].items() if share > 0}
    assert math.fsum(data["price_sources"].values()) == pytest.approx(1.0)
