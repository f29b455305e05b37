"""docs/fusion.md: its spaces, rules, commands and backend do what it says."""

from __future__ import annotations

import re
import shlex

import pytest

from estimator.cost.asked import Asked
from estimator.cost.price import BACKENDS, price
from estimator.graph import BlockKind
from estimator.op import Axis
from estimator.passes.fuse.guard import FACTS, WHOLE
from estimator.passes.fuse.places import parse
from estimator.passes.fuse.reading import CASE, CHANGE, JOIN, PATTERN, RESULT, RULE, rules_of
from estimator.passes.fuse.rule import Share
from estimator.precision import recipe
from search.cli import main
from search.space import parse_space
from search.sweep import sweep_inline
from tests.estimator.cases import LLAMA, block, h100, named


@pytest.fixture(scope="module")
def page(root):
    return (root / "docs" / "fusion.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def examples(page):
    return {kind: re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "yaml", "sh", "toml")}


def test_its_space_has_a_front_over_rule_sets(examples):
    space = parse_space(examples["yaml"][0], "docs/fusion.md")
    assert len(space.axes["fusion"]) == 2
    assert len(sweep_inline(space).ids) > 1


def test_its_rule_is_one(examples):
    (rule,) = rules_of(parse(examples["yaml"][1], "docs/fusion.md"))
    assert rule.fits("h800-80g-sxm")
    assert not rule.fits("a100-80g-sxm")


def test_its_backend_answers(examples):
    space = {}
    exec(compile(examples["python"][0], "docs/fusion.md", "exec"), space)
    inner = space["Table"]()
    b, chip = block(LLAMA, BlockKind.DENSE), h100(8).chip
    told = price(named(b, "input_norm"), b, chip, recipe("bf16"), (Asked(inner, inner.name, inner.priority), *BACKENDS))
    assert told.source == "lab_table"
    assert told.seconds > 4e-6


def test_every_key_of_the_language_is_told(page):
    keys = {
        *RULE,
        *CASE,
        *PATTERN,
        *CHANGE,
        *RESULT,
        *JOIN,
        *FACTS,
        *(s.value for s in Share),
        *(a.value for a in WHOLE),
    }
    assert {key for key in keys if f"`{key}`" not in page and f"`{key}:" not in page} == set()
    assert Axis.FFN.value not in {a.value for a in WHOLE}


def test_its_commands_run(examples, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_kernels.yaml").write_text(examples["yaml"][1], encoding="utf-8")
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "gemm_mine.csv").write_text("dtype,m,n,k,latency_us\nbf16,4096,4096,4096,150\n")
    for line in "".join(examples["sh"]).splitlines():
        words = shlex.split(line.partition(">")[0], comments=True)
        assert words[0] == "search"
        assert main(words[1:]) == 0, line
        assert capsys.readouterr().out
