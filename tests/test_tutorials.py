"""Every command of every tutorial runs, in the order of the page, and what the page shows of an answer is said."""

from __future__ import annotations

import re
import shlex

import pytest

from search.cli import main

FOLDER = "docs/tutorials"
PAGES = ("tune_a_job", "bring_my_chip", "bring_my_model", "read_a_trace")
SHARED = ("measured/ops/gemm_h100.csv.gz", "measured/ops/attention_h100.csv.gz", "traces/fine_ring/ring4_400mbit_*")
"""Files that pages take for the reader's own."""
BLOCK = re.compile(r"```(\w*) ?([\w.]*)\n(.*?)```", re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_does_what_it_says(root, shared, tmp_path, monkeypatch, capsys, name):
    page = (root / FOLDER / f"{name}.md").read_text(encoding="utf-8")
    for pattern in SHARED:
        for file in shared.glob(pattern):
            (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    said, ran = "", 0
    for language, file, text in BLOCK.findall(page):
        if file:
            (tmp_path / file).write_text(text, encoding="utf-8")
        elif language == "sh":
            for line in text.splitlines():
                command, *words = shlex.split(line)
                words = [str(p) for w in words for p in (sorted(map(str, tmp_path.glob(w))) if "*" in w else [w])]
                assert command == "search"
                assert main(words) == 0, (line, capsys.readouterr().err)
                told = capsys.readouterr()
                said, ran = said + told.out + told.err, ran + 1
        else:
            assert not language
            assert " ".join(text.split()) in " ".join(said.split()), text
    assert ran >= 5


def test_the_index_names_every_tutorial_and_the_readme_the_index(root):
    index = (root / FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\w+)\.md\)", index)) == set(PAGES) == {
        path.stem for path in (root / FOLDER).glob("*.md") if path.stem != "README"
    }  # fmt: skip
    assert f"({FOLDER}/README.md)" in (root / "README.md").read_text(encoding="utf-8")
