"""No anchor is predicted worse than its ceiling; the ceilings are of these rows and rise only where someone says so."""

from __future__ import annotations

import csv
from collections import Counter

import pytest

from search.measured import read_rows
from tests.anchors import anchors, renew
from tests.anchors.anchors import CEILINGS, KINDS, STEPS, ceiling_of, ceilings, errors, write_ceilings

FAMILIES = {
    "bloom", "dgxc", "korthikanti", "llm-foundry", "megatron-bridge", "mlperf", "narayanan", "simumax-a100-pcie",
    "simumax-b200", "vtrain", "zero-bubble",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_no_anchor_is_predicted_worse_than_its_ceiling(kind):
    """Where this fails on purpose, `python -m tests.anchors.renew --raise`, and the commit says why."""
    told = ceilings()
    worse = [
        f"{name}: {error:+.1%}, ceiling {told[name, kind]} %"
        for (name, of), error in errors().items()
        if of == kind and 100.0 * abs(error) > told[name, kind]
    ]
    assert worse == []


def test_every_anchor_has_a_ceiling_and_a_source():
    rows = read_rows(STEPS)
    assert set(ceilings()) == set(errors())
    with STEPS.open(encoding="utf-8", newline="") as file:
        assert all(row["source"] and row["source_url"] for row in csv.DictReader(file))
    assert len({row.cells["case_id"] for row in rows}) == len(rows) <= 100


def test_anchors_are_of_every_family_with_memory_where_it_was_measured():
    families = Counter(row.cells["family"] for row in read_rows(STEPS))
    assert set(families) == FAMILIES
    assert min(families.values()) >= 5
    assert sum(kind == "memory" for _, kind in errors()) >= 20


@pytest.fixture
def own_ceilings(tmp_path, monkeypatch):
    """Ceilings of one's own, which renewing may replace."""
    for module in (anchors, renew):
        monkeypatch.setattr(module, "CEILINGS", tmp_path / "ceilings.tsv")
    today = {key: ceiling_of(error) for key, error in errors().items()}
    write_ceilings(today)
    return today


def test_renewing_lowers_ceilings_and_refuses_to_raise_one_unless_told(own_ceilings, capsys):
    key = next(iter(own_ceilings))
    write_ceilings(own_ceilings | {key: own_ceilings[key] + 5})
    assert renew.main([]) == 0
    assert ceilings() == own_ceilings
    low = own_ceilings | {key: own_ceilings[key] - 1}
    write_ceilings(low)
    assert renew.main([]) == 1
    assert ceilings() == low
    assert f"{key[0]}, {key[1]}: {low[key]} -> {own_ceilings[key]} %" in capsys.readouterr().err
    assert renew.main(["--raise"]) == 0
    assert ceilings() == own_ceilings


def test_the_shipped_ceilings_lie_beside_the_steps():
    assert CEILINGS.parent == STEPS.parent
    assert CEILINGS.exists()
