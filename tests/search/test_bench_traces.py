"""The trace that `search bench` imports is one."""

from capture.traces.assemble import CODE
from capture.traces.recognise import read_all
from capture.traces.records import Kind
from search.bench_traces import STEP_OPS, imported, write_profile


def test_a_step_of_the_written_trace_has_its_kernels_copies_and_collectives(tmp_path):
    path = tmp_path / "a.json"
    write_profile(path, 1)
    (trace,) = read_all([path])
    counts = {kind: int((trace.kind == CODE[kind]).sum()) for kind in (Kind.COMPUTE, Kind.COPY, Kind.COLLECTIVE)}
    assert counts == {Kind.COMPUTE: STEP_OPS, Kind.COPY: STEP_OPS // 10, Kind.COLLECTIVE: STEP_OPS // 50}
    assert len(trace.before) >= sum(counts.values())
    imported(str(path), str(tmp_path / "a.dfg"))
    assert (tmp_path / "a.dfg").is_file()


def test_a_large_trace_is_as_large_as_asked(tmp_path):
    path = tmp_path / "a.json"
    write_profile(path, 3_000_000)
    assert 3_000_000 <= path.stat().st_size < 5_000_000
    assert read_all([path])[0].iteration.max() >= 1
