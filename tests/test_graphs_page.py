"""docs/graphs.md: its commands run, and where it shows what they print, they print that."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from estimator.part import Part
from search.cli import main

SHOWN = re.compile(r"```console\n\$ (.*?)\n(.*?)```", re.DOTALL)


def page(root):
    return (root / "docs" / "graphs.md").read_text(encoding="utf-8")


def printed(command, capsys):
    capsys.readouterr()
    assert main(shlex.split(command)[1:]) == 0
    return capsys.readouterr().out


def test_commands_print_what_the_page_shows(root, capsys):
    """`python -m tests.test_graphs_page` rewrites what the page shows."""
    shown = SHOWN.findall(page(root))
    assert len(shown) == 3
    for command, text in shown:
        assert printed(command, capsys) == text


def test_commands_write_the_files_that_the_page_names(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [line for block in re.findall(r"```sh\n(.*?)```", page(root), re.DOTALL) for line in block.splitlines()]
    assert len(lines) == 5
    for line in lines:
        printed(line, capsys)
        assert Path(line.split()[-1]).stat().st_size


def test_the_page_names_every_part(root):
    text = page(root)
    assert all(part.value in text for part in Part)


if __name__ == "__main__":
    import subprocess

    file = Path(__file__).parents[1] / "docs" / "graphs.md"

    def run(match: re.Match[str]) -> str:
        words = [sys.executable, "-m", "search", *shlex.split(match[1])[1:]]
        out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return f"```console\n$ {match[1]}\n{out}```"

    file.write_text(SHOWN.sub(run, file.read_text(encoding="utf-8")), encoding="utf-8")
