"""docs/launch_files.md does what it says: its files, its commands and what it shows of their answers."""

import re
import shlex

import pytest

from results.launchers.names import version_of
from search.cli import main


@pytest.fixture(scope="module")
def page(root):
    return (root / "docs" / "launch_files.md").read_text(encoding="utf-8")


def blocks(page):
    """(language, file, text) of every fenced block."""
    return re.findall(r"```(\w*) ?([\w.]*)\n(.*?)```", page, re.DOTALL)


def test_the_page_does_what_it_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {name: text for _, name, text in blocks(page) if name in {"pretrain.sh", "space.yaml"}}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    printed = []
    for language, name, text in blocks(page):
        for line in text.splitlines() if language == "sh" and not name else []:
            assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
            printed.append(capsys.readouterr().out)
    shown = {name: text for _, name, text in blocks(page) if name in {"mine.yaml", "best.sh"}}
    for name, text in shown.items():
        assert text in (tmp_path / name).read_text()
    (answer,) = [text for language, name, text in blocks(page) if not language]
    assert answer in "".join(printed)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("megatron_lm", "megatron-core 0.19.2"),
        ("megatron_bridge", "megatron-bridge 0.6.2"),
        ("torchtitan", "torchtitan 0.2.2"),
        ("deepspeed", "deepspeed 0.19.8"),
        ("megatron_deepspeed", "Megatron-DeepSpeed at 207b2d5"),
    ],
)
def test_the_page_names_the_versions_of_the_lists(name, told, page):
    assert told in page
    assert told.split()[-1] in version_of(name)
