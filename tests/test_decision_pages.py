"""What docs/report.md and docs/planning.md tell to type works, and the figures that they give are today's."""

from __future__ import annotations

import re
import shlex

import pytest

from results.goodput import Reliability, goodput
from tests.search.conftest import search  # noqa: F401 - a fixture

PAGES = ("report", "planning")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_page_runs(search, root, tmp_path, page):  # noqa: F811
    text = (root / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        name = re.search(r"^name: (\w+)$", block, re.MULTILINE)[1]
        (tmp_path / f"{name}.yaml").write_text(block, encoding="utf-8")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert len(commands) >= 3
    for line in commands:
        command, *words = shlex.split(line, comments=True)
        assert command == "search"
        said = search(*words)
        assert said.code == 0, (line, said)


def test_the_goodput_of_llama_3_is_as_told(root):
    found = goodput(
        Reliability(), failures_per_s=419 / (54 * 86400), num_gpus=16384, num_nodes=2048, step_time_s=[9.73],
        parameters=405e9,
    )  # fmt: skip
    text = (root / "docs" / "planning.md").read_text(encoding="utf-8")
    assert f"comes to {found.share[0]:.0%}".replace("%", " %") in " ".join(text.split())


def test_every_key_and_default_of_goodput_stands_in_the_page(root):
    text = (root / "docs" / "planning.md").read_text(encoding="utf-8")
    for name, value in ((n, getattr(Reliability(), n)) for n in Reliability.__slots__):
        (row,) = re.findall(rf"^\| `{name}` \| ([^|]*) \|", text, re.MULTILINE)
        assert value is None or float(row) == value, name
