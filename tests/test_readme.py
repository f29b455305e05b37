"""The README's examples do what it says they do."""

import re

import pytest

from estimator.precision import RECIPES
from estimator.strategy import ContextParallel, Fusion, Module, Optimizer, RankOrder, Schedule
from search.axes import AXES
from search.space import load_space, parse_space, shipped_spaces
from search.sweep import sweep_inline
from tests.found import REFERENCES, SPACES, counted, predicted, priced, row, sweep


@pytest.fixture
def examples(root):
    text = (root / "README.md").read_text(encoding="utf-8")
    return {kind: re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml")}


def test_the_python_example_runs(examples, capsys):
    (code,) = examples["python"]
    exec(compile(code, "README.md", "exec"), {})
    step_s, mfu, device_bytes, feasible = capsys.readouterr().out.split()
    assert 0 < float(mfu) < 1
    assert float(step_s) > 0
    assert float(device_bytes) < 80 * 1024**3
    assert feasible == "True"


def test_the_space_of_the_readme_has_a_front(examples):
    (text,) = examples["yaml"]
    space = parse_space(text, "README.md")
    assert len(sweep_inline(space).ids) > 1
    assert set(space.references) == {"mine"}


def test_the_file_format_tells_every_axis_and_every_value_of_a_closed_choice(root):
    text = (root / "docs" / "spaces.md").read_text(encoding="utf-8")
    for axis in AXES:
        assert f"`{axis.key[0]}`" in text, axis.name
    for kind in (Schedule, ContextParallel, RankOrder, Fusion, Module, Optimizer):
        for member in kind:
            assert f"`{member.value}`" in text, member
    for name in RECIPES:
        assert f"`{name}`" in text


@pytest.fixture
def section(root):
    text = (root / "README.md").read_text(encoding="utf-8")
    return text.partition("## What the search found")[2].partition("\n## ")[0]


def test_the_readme_tells_what_is_predicted_for_each_reference(section):
    """Where this fails, `python -m tests.found` rewrites the tables."""
    assert {(name, reference) for name in SPACES for reference in load_space(name).references} == set(REFERENCES)
    assert set(SPACES) <= set(shipped_spaces())
    for (name, reference), label in REFERENCES.items():
        space = load_space(name)
        assert f"| {label} | {predicted(priced(space, space.references[reference]))} |" in section


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
def test_the_readme_tells_the_fastest_point_of_the_front_that_needs_no_more_memory(section, name):
    """Where this fails, `python -m tests.found` rewrites the tables."""
    found = sweep(name)
    for reference in found.space.references:
        assert row(found, reference) in section
    assert re.search(rf"\| `{name}` \| .* \| {re.escape(counted(found))} \| \d+ \|\n", section)
