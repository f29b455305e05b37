"""docs/inference.md tells what is predicted, names every choice, and its example is a space."""

from __future__ import annotations

import re
from functools import cache

import pytest

import spaces
from estimator.inference import SERVED_COLUMNS, Deployment, Formats, Requests, ServingPhase
from estimator.inference.formats import ACTIVATIONS, CACHES, WEIGHTS
from estimator.inference.step import infer
from estimator.model_io import load_model
from hardware.catalog import cluster
from search.served import SERVED_AXES, parse_served
from search.served_sweep import sweep_served

FP8 = Formats(weights="fp8", activations="fp8")


@pytest.fixture
def page(root):
    return (root / "docs" / "inference.md").read_text(encoding="utf-8")


@cache
def model(name):
    return load_model(name, [spaces.MODELS])


def test_the_page_names_every_choice_and_format(page):
    for axis in SERVED_AXES:
        assert f"`{axis.name}`" in page
    for name in (*WEIGHTS, *ACTIVATIONS, *CACHES):
        assert f"`{name}`" in page


def test_the_example_of_the_page_has_a_front(page):
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    space = parse_served(text, "docs/inference.md")
    found = sweep_served(space, lambda done, found: None)
    assert len(found.rows) > 3
    assert set(space.references) == {"one"}


def test_the_page_tells_what_is_predicted_of_single_sequences(page):
    rows = re.findall(r"^\| (\w+) \| (\d) \| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([-+]\d+) % \|$", page, re.MULTILINE)
    assert len(rows) == 13
    for name, chips, weights, published, predicted, off in rows:
        tp = int(chips)
        deployment = Deployment(tp=tp, etp=tp if model(name).moe else 1, formats=Formats(weights=weights))
        request = Requests(phase=ServingPhase.DECODE, batch=1, context=5, output=200)
        result = infer(model(name), deployment, cluster("dgx_a100", tp), request)
        assert result.feasible
        assert f"{result.tokens_per_s:.1f}" == predicted
        assert abs(float(predicted) / float(published) - 1 - int(off) / 100) < 0.006  # of rounded figures


@pytest.mark.parametrize(
    ("chips", "phase", "batch", "context", "system"),
    [(128, "decode", 96, 4989, "dgx_h800"), (32, "prefill", 2, 4096, "dgx_h800"), (32, "prefill", 4, 2000, "dgx_h100")],
)
def test_the_page_tells_what_is_predicted_of_nodes(page, chips, phase, batch, context, system):
    deployment = Deployment(ep=chips, formats=FP8, overlap_ep=True)
    request = Requests(phase=ServingPhase(phase), batch=batch * chips, context=context)
    result = infer(model("deepseek_v3"), deployment, cluster(system, chips), request)
    assert result.feasible
    assert f"{result.tokens_per_s_per_gpu * 8:,.0f} at {batch} " in page


def rate(chips, phase, batch, context, system, skew, **more):
    deployment = Deployment(ep=chips, formats=FP8, overlap_ep=True, redundant_experts=32, **more)
    request = Requests(phase=ServingPhase(phase), batch=batch * chips, context=context, routing_skew=skew,
                       acceptance=0.85)  # fmt: skip
    return f"{infer(model('deepseek_v3'), deployment, cluster(system, chips), request).tokens_per_s_per_gpu * 8:,.0f}"


def test_the_page_tells_what_skew_and_drafts_make_of_nodes(page):
    unit = (144, "decode", 96, 4989, "dgx_h800")
    balanced, skewed, drafted = rate(*unit, 0.0), rate(*unit, 1.0), rate(*unit, 0.0, drafts=1)
    text = " ".join(page.split())
    assert f"predict {balanced} at 96 sequences a chip where routing is balanced and {skewed} at a" in text
    assert f"in 85 of 100 cases, {drafted}." in text
    for name, prompt in (("H800, 4,096", (32, "prefill", 2, 4096, "dgx_h800")),
                         ("H100, 2,000", (32, "prefill", 4, 2000, "dgx_h100"))):  # fmt: skip
        row = " | ".join(rate(*prompt, skew) for skew in (0.0, 0.5, 1.0, 1.5))
        assert f"| {name} tokens | {row} |" in page


def test_columns_are_described():
    assert all(c.description and c.better in {"lower", "higher"} for c in SERVED_COLUMNS)
