"""docs/traces.md tells what the tuner comes to on jobs of models' sizes."""

from __future__ import annotations

import pytest

from tests.search.tuner.tables import CLUSTERS, MODELS, against_defaults, driver_rows, larger_rows, memory_rows


@pytest.fixture
def page(root):
    return (root / "docs" / "traces.md").read_text(encoding="utf-8")


def test_the_page_tells_what_memory_passes_come_to(page):
    for row in memory_rows():
        assert row in page


@pytest.mark.parametrize(("model", "cluster"), [("bert_base", "ring, 25 Gbit/s"), ("vgg16", "ring, 100 Gbit/s")])
def test_the_page_tells_what_is_gained_over_defaults(page, model, cluster):
    assert against_defaults(model, cluster) in page


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_page_tells_every_gain_over_defaults(page, model, cluster):
    assert against_defaults(model, cluster) in page


@pytest.mark.slow
def test_the_page_tells_what_drivers_and_more_workers_come_to(page):
    for row in (*driver_rows(), *larger_rows()):
        assert row in page
