"""Formulas in letters: worked out, they are the amounts that are priced."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import spaces
from estimator.build import build
from estimator.formulas import FORMULAS, formulas
from estimator.inventory import inventory
from estimator.model_io import load_model
from estimator.passes import lower, recompute
from estimator.passes.differentiate import differentiate
from estimator.polynomial import Polynomial, letter
from estimator.precision import recipe
from estimator.strategy import Fusion, Recompute, Strategy

MODELS = ("llama3_8b", "deepseek_v3", "nemotron_h_56b", "gpt_oss_120b", "deepseek_v4_flash", "glm_5")


def graphs(name, precision):
    logical = build(load_model(name, [spaces.MODELS]), 4096)
    strategy = Strategy(tp=2, sequence_parallel=True, precision=precision, fusion=tuple(Fusion))
    rank = recompute(lower(logical, strategy, recipe(precision)), Recompute.parse("selective"))
    return logical, differentiate(logical), rank


@pytest.mark.parametrize("precision", ["bf16", "fp8_1x128", "nvfp4"])
@pytest.mark.parametrize("name", MODELS)
def test_a_formula_comes_to_what_is_priced(name, precision):
    for graph in graphs(name, precision):
        r = recipe(precision)
        entries = inventory(graph, r)
        told = formulas(graph, entries, r)
        for entry, formula in zip(entries, told.of, strict=True):
            for amount in FORMULAS:
                exact = formula[amount].at(told.sizes)
                assert exact == pytest.approx(getattr(entry, amount), rel=1e-12), (entry.op.name, amount)
                assert eval(str(formula[amount]), {}, dict(told.sizes)) == pytest.approx(exact, rel=1e-12)
                assert eval(formula[amount].written(told.sizes), {}, {}) == pytest.approx(exact, rel=1e-12)


def test_a_product_is_told_as_one_writes_it():
    graph = build(load_model("llama3_8b", [spaces.MODELS]), 4096)
    entries = inventory(graph, recipe("bf16"))
    told = formulas(graph, entries, recipe("bf16"))
    (at,) = [i for i, entry in enumerate(entries) if entry.scope[-1] == "up_proj"]
    assert str(told.of[at]["flops"]) == "2*ffn*hidden*tokens"
    assert str(told.of[at]["read_bytes"]) == "2*ffn*hidden + 2*hidden*tokens"
    assert str(told.of[at]["written_bytes"]) == "2*ffn*tokens"
    assert told.of[at]["flops"].written(told.sizes) == "2*14336*4096*4096"
    assert told.sizes["ffn"] == 14336


def test_sizes_along_one_axis_are_named_apart():
    graph = build(load_model("deepseek_v3", [spaces.MODELS]), 4096)
    told = formulas(graph, inventory(graph, recipe("bf16")), recipe("bf16"))
    assert {name: size for name, size in told.sizes.items() if name.startswith("latent")} == {
        "latent_1536": 1536, "latent_512": 512, "latent_576": 576,
    }  # fmt: skip
    for name in told.sizes:
        assert name.isidentifier()


NUMBERS = st.integers(-9, 9).map(float)
TERMS = st.lists(st.tuples(NUMBERS, st.sampled_from(["a", "b", "c"]), st.integers(0, 3)), max_size=4)
SIZES = {"a": 3.0, "b": 0.5, "c": 7.0}


def poly(terms):
    total = Polynomial({})
    for factor, name, power in terms:
        term = Polynomial({}) + factor
        for _ in range(power):
            term = term * letter(name)
        total = total + term
    return total


@given(TERMS, TERMS, NUMBERS)
def test_arithmetic_in_letters_is_arithmetic_in_numbers(left, right, number):
    x, y = poly(left), poly(right)
    assert (x + y).at(SIZES) == x.at(SIZES) + y.at(SIZES)
    assert (x * y).at(SIZES) == x.at(SIZES) * y.at(SIZES)
    assert (number - x).at(SIZES) == number - x.at(SIZES)
    assert (x / letter("b")).at(SIZES) == x.at(SIZES) / 0.5
    assert eval(str(x), {}, dict(SIZES)) == x.at(SIZES)
    assert str(x + y) == str(y + x)


def test_a_ratio_cancels():
    a, b, c = (letter(name) for name in "abc")
    for first, second in itertools.permutations((b, c)):
        assert str(a * first / first * second / second) == "a"
    assert str(a * a / b / b) == "a*a/b/b"
