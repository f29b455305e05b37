"""docs/traces.md says what the importers do: its example runs, and its tables name every field and category."""

import re

import pytest

from capture.traces.jsonl import CATEGORIES, _Event, _Meta
from capture.traces.records import Topology
from search.cli import main


@pytest.fixture
def page(root):
    return (root / "docs" / "traces.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(page, tmp_path, monkeypatch, capsys):
    (lines,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank0.jsonl").write_text(lines)
    (tmp_path / "rank1.jsonl").write_text(lines.replace('"rank": 0', '"rank": 1').replace('"a"', '"b"'))
    assert main("trace import rank0.jsonl rank1.jsonl -o job.dfg".split()) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    head = re.sub(r"[\d.]+ (ms|s|us|KiB|B)\b", r"… \1", head)
    assert [head, *rest] == expected.splitlines()


def test_the_tables_name_every_field_and_every_category(page):
    section = page.partition("## JSON lines")[2].partition("## The file")[0]
    for name in (*_Event.__struct_fields__, *CATEGORIES, *(topology.value for topology in Topology)):
        assert f"`{name}`" in section or f"`{name}:" in section, name
    for name in _Meta.__struct_fields__:
        assert f"`meta.{name}`" in section or f"`{name}:" in section, name
