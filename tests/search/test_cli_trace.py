"""`search trace` reads, checks, writes one file and tells what it found."""

import json

import pytest

from search.cli import main
from tests.capture.traces.written import event, header, step, write


@pytest.fixture
def ranks(tmp_path):
    return [
        str(write(tmp_path / f"{r}.jsonl", header(r), *(line for it in range(5) for line in step(r, it))))
        for r in (0, 1)
    ]


def test_import_checks_and_writes_and_show_tells_the_same(ranks, tmp_path, capsys):
    out = tmp_path / "job.dfg"
    assert main(["trace", "import", *ranks, "-o", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file_bytes"] == out.stat().st_size
    assert [rank["events"] for rank in told["ranks"]] == [{"compute": 15, "collective": 5}] * 2
    assert told["pairing"]["collectives"] == 5
    assert main(["trace", "show", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {key: shown[key] for key in ("world", "ranks", "pairing")} == {
        key: told[key] for key in ("world", "ranks", "pairing")
    }


def test_import_without_a_file_only_checks(ranks, capsys):
    assert main(["trace", "import", *ranks]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 ranks" in text
    assert "paired: 5 collectives, 0 transfers" in text


def test_bad_input_is_one_line_and_nothing_is_half_imported(ranks, tmp_path, capsys):
    bad = write(tmp_path / "bad.jsonl", header(1), event("FW", "FW", 2, 1))
    out = tmp_path / "job.dfg"
    assert main(["trace", "import", ranks[0], str(bad), "-o", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "bad.jsonl:2: event 'FW' must end after" in line
    assert not out.exists()
    assert main(["trace", "import", ranks[0], "-o", ranks[0]]) == 2
    assert "must not replace the input" in capsys.readouterr().err
    assert main(["trace", "import", *ranks, "-o", str(out)]) == 0
    assert main(["trace", "import", *ranks, "-o", str(out)]) == 2
    assert "job.dfg: must not replace a file that exists; give another name, or remove it" in capsys.readouterr().err


def test_an_installation_without_the_extra_is_told_which(ranks, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["trace", "import", *ranks]) == 2
    assert "needs msgspec, which this installation lacks; pip install 'trainspace[traces]'" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["recorder's", b"\x1f\x8b\x08junk", b"\0\1\2\n", b"\xff\xfe{}\n"])
def test_a_diff_of_what_was_not_imported_says_how_to(ranks, tmp_path, capsys, content):
    path = tmp_path / "0.jsonl"
    if isinstance(content, bytes):
        path.write_bytes(content)
    assert main(["trace", "diff", str(path), str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"is imported first: search trace import {path} -o job.dfg")


def test_a_file_that_appears_while_traces_are_read_is_not_replaced(ranks, tmp_path, monkeypatch, capsys):
    out = tmp_path / "job.dfg"
    monkeypatch.setattr("search.commands.trace.check_new", lambda name: out.write_text("mine"))
    assert main(["trace", "import", *ranks, "-o", str(out)]) == 2
    assert "job.dfg: must not replace a file that exists" in capsys.readouterr().err
    assert out.read_text() == "mine"
