"""The README's examples do what it says they do."""

import re

import pytest

from estimator.precision import RECIPES
from estimator.step import evaluate
from estimator.strategy import ContextParallel, Fusion, Module, Optimizer, RankOrder, Schedule
from hardware.units import GIB
from search.axes import AXES
from search.space import load_space, parse_space
from search.sweep import sweep_inline
from tests.search.small import swept

FOUND = [("deepseek_v3", "published"), ("llama3_405b", "published"), ("gpt3_175b", "narayanan_2021"),
         ("gpt3_175b", "korthikanti_2022"), ("qwen3_235b", "recipe"), ("qwen3_235b", "preset"),
         ("llama3_70b", "rule_of_thumb"), ("llama3_8b_small", "fully_sharded")]  # fmt: skip


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


def found(root):
    """Rows of the table of references: (space, reference), what is predicted, what was found."""
    text = (root / "README.md").read_text(encoding="utf-8")
    section = text.partition("## What the search found")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "GiB" in line and line.startswith("|")]
    return [(names, row[1], row[2]) for names, row in zip(FOUND, rows, strict=True)]


def told(step_s, memory_bytes):
    """Step time to three digits and memory in GiB, as the table writes them."""
    return f"{step_s:#.3g} s", f"{memory_bytes / GIB:.1f} GiB"


def test_the_readme_tells_what_is_predicted_for_each_reference(root):
    for (name, reference), predicted, _ in found(root):
        space = load_space(name)
        result = evaluate(space.model, space.references[reference], space.system, space.workload)
        for text in told(float(result.step_time_s), float(result.peak_memory_bytes)):
            assert text in predicted, (name, reference, text)
        assert f"{100 * float(result.mfu):.1f} %" in predicted


@pytest.mark.slow
def test_the_readme_tells_the_fastest_point_of_the_front_that_needs_no_more_memory(root):
    fronts = {name: swept(load_space(name)).values() for name, _ in FOUND}
    for (name, reference), predicted, best in found(root):
        space = load_space(name)
        limit = float(
            evaluate(space.model, space.references[reference], space.system, space.workload).peak_memory_bytes
        )
        text = told(*min(point for point in fronts[name] if point[1] <= limit))
        if best == "the same":
            assert all(part in predicted for part in text)
        else:
            assert all(part in best for part in text), (name, reference, text)
