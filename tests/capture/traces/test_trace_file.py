"""The file of imported traces gives back what was written, and nothing else passes for one."""

import dataclasses
import io
import json
import zipfile

import numpy as np
import pytest

from capture.traces.pairing import pair
from capture.traces.recognise import read_all
from capture.traces.trace_file import read_traces, write_traces
from tests.capture.traces.written import header, step, write


@pytest.fixture
def traces(tmp_path):
    return read_all(
        [write(tmp_path / f"{r}.jsonl", header(r, machine="vm", topology="ring"), *step(r)) for r in (0, 1)]
    )


def test_a_file_gives_back_every_bit(tmp_path, traces):
    pairing = pair(traces)
    assert write_traces(tmp_path / "a.dfg", traces, pairing) == (tmp_path / "a.dfg").stat().st_size
    held = read_traces(tmp_path / "a.dfg")
    assert held.pairing == pairing
    for trace, back in zip(traces, held.traces, strict=True):
        for field in dataclasses.fields(trace):
            mine, its = getattr(trace, field.name), getattr(back, field.name)
            if isinstance(mine, np.ndarray):
                assert mine.dtype == its.dtype
                assert mine.tobytes() == its.tobytes(), field.name
            else:
                assert mine == its, field.name


def test_the_shipped_traces_pass_through_a_file(shared, tmp_path):
    traces = read_all(sorted((shared / "traces" / "fine_ring").glob("ring4_400mbit_rank*")))
    write_traces(tmp_path / "a.dfg", traces, pair(traces))
    for trace, back in zip(traces, read_traces(tmp_path / "a.dfg").traces, strict=True):
        np.testing.assert_array_equal(trace.start_s, back.start_s)


def test_a_file_is_never_written_over_and_nothing_is_left_behind(tmp_path, traces):
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "a.dfg"
    write_traces(path, traces, pair(traces))
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"a\.dfg"):
        write_traces(path, traces[:1], pair(traces[:1]))
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["a.dfg"]


def test_other_files_and_later_versions_are_refused(tmp_path, traces):
    path = tmp_path / "a.dfg"
    path.write_bytes(b"hello")
    with pytest.raises(ValueError, match="must be a file of `search trace import -o`"):
        read_traces(path)
    for head, told in (({"format": "trainspace.traces", "version": 2}, "but is of 2;"), ({}, "must be a file"),
                       ([], "must be a file")):  # fmt: skip
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("header.json", json.dumps(head))
        with pytest.raises(ValueError, match=told):
            read_traces(path)
    path.unlink()
    write_traces(path, traces, pair(traces))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="must be a file"):
        read_traces(path)


def rewritten(path, change):
    """The file with its members changed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def array(values):
    held = io.BytesIO()
    np.save(held, np.array(values))
    return held.getvalue()


@pytest.mark.parametrize(
    ("member", "content", "told"),
    [
        ("0/name.npy", array([0, 1, 2, 99]), "name of rank 0 points outside its table"),
        ("0/after.npy", array([7]), "after of rank 0 points outside its table"),
        ("0/end_s.npy", array([1.0]), "end_s of rank 0 is of another shape or type"),
        ("0/kind.npy", array(["a"]), "kind of rank 0 is of another shape or type"),
        ("0/kind.npy", b"", "must be whole"),
        (
            "header.json",
            b'{"format": "trainspace.traces", "version": 1, "ranks": [{}], "pairing": {}}',
            "must be whole",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, traces, member, content, told):
    path = tmp_path / "a.dfg"
    write_traces(path, traces, pair(traces))
    rewritten(path, lambda members: members.update({member: content}))
    with pytest.raises(ValueError, match=told) as caught:
        read_traces(path)
    assert "\n" not in str(caught.value)


def test_importing_what_is_imported_is_told(tmp_path, traces):
    write_traces(tmp_path / "a.dfg", traces, pair(traces))
    with pytest.raises(ValueError, match="is imported already; see it with `search trace show`"):
        read_all([tmp_path / "a.dfg"])
