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


def test_the_readme_tells_the_errors_of_the_accuracy_page(root):
    """Whole percents of its table: all steps, by family, groups left out, memory."""
    page = (root / "docs" / "accuracy.md").read_text(encoding="utf-8")
    table = page.partition("## Today's errors")[2].partition("\n\nP10")[0]
    rows = {}
    for line in table.splitlines():
        if re.match(r"\| [\w-]+ \| \d+ \|", line):
            name, steps, catalogue, groups, _, memory = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name] = (int(steps), [float(x) for x in catalogue.split(" / ")], float(groups.split(" / ")[0]), memory)
    steps, (mean, *_, bias), left_out, memory = rows.pop("all")
    *usual, worst = sorted(mean for _, (mean, *_), *_ in rows.values())
    readme = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"On {steps} published training steps the mean absolute error is {mean:.0f} % (bias {bias:+.0f} %: "
        f"{usual[0]:.0f} to {usual[-1]:.0f} % by family, {worst:.0f} % for ZeRO-3 over hundreds of nodes); "
        f"{left_out:.0f} % where factors are fitted to the other models' steps. "
    ) in readme
    assert f"give a peak memory are off by {float(memory):.0f} %." in readme
    assert f"a model that is {usual[0]:.0f} to {usual[-1]:.0f} % off" in readme


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
