"""Measured rows to the report of `search validate`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from hardware.units import GIB
from results.report.validation import validation_table
from search.measured import Row, read_rows
from search.ranking import kendall_tau_b, regret
from search.validate import validate
from tests.search.measured_rows import HEADER, Told, cells, fingerprint, write

FREE = (
    "case_id", "family", "source", "source_url", "model", "params_b", "notes", "step_time_s", "tokens_per_s_per_gpu",
    "tflops_per_gpu", "mfu", "hfu", "peak_mem_gib", "peer", "peer_step_time_s", "peer_mfu", "peer_mem_gib",
)  # fmt: skip


def _rows(tmp_path: Path, *rows: dict[str, str]) -> tuple[Row, ...]:
    return read_rows(write(tmp_path / "t.csv", *rows))


def _says(*seconds: float) -> Callable[..., Told]:
    """A predictor that gives these step times, one call after another."""
    queue = iter(seconds)
    return lambda *_configuration: Told(step_time_s=next(queue))


@pytest.fixture
def measured(shared: Path) -> tuple[Row, ...]:
    """The shared table."""
    return read_rows(shared / "measured" / "train_steps.csv")


def test_every_shared_row_is_scored_or_skipped_with_a_reason_or_incomplete(measured: tuple[Row, ...]) -> None:
    report = validate(measured, fingerprint)
    cases = report["cases"]
    unscored = [c for c in cases if c["skipped"] is None and c["error"] is None and c["memory_error"] is None]
    assert report["rows"] == len(cases) == 570
    assert report["scored"] + sum(report["skipped"].values()) + len(unscored) == 570
    assert all(c["skipped"] for c in cases if c["predicted_step_time_s"] is None)
    incomplete = {row.cells["case_id"] for row in measured if row.cells["complete"] == "0"}
    assert {c["case_id"] for c in unscored} <= incomplete
    assert report["scored"] == report["overall"]["n"] == sum(f["n"] for f in report["families"].values())
    assert "is empty" not in " ".join(c["skipped"] or "" for c in cases if c["case_id"] not in incomplete)


def test_the_product_itself_predicts_a_row_of_every_scored_family(measured: tuple[Row, ...]) -> None:
    scored = {case["case_id"] for case in validate(measured, fingerprint)["cases"] if case["error"] is not None}
    one = {row.cells["family"]: row for row in measured if row.cells["case_id"] in scored}
    report = validate(one.values())
    assert len(one) == report["scored"] == 11
    assert all(0 < case["predicted_step_time_s"] < 10_000 for case in report["cases"])
    assert all(0 < case["predicted_peak_memory_bytes"] < 1e12 for case in report["cases"])


def test_predictions_do_not_depend_on_where_a_row_comes_from_or_what_was_measured(measured: tuple[Row, ...]) -> None:
    garbled = []
    for number, (row, other) in enumerate(zip(measured, (*measured[7:], *measured[:7]), strict=True)):
        foreign = {name: other.cells[name] if number % 2 else "\N{SNOWMAN} tp=1" for name in FREE}
        garbled.append(Row(place="elsewhere", cells={**row.cells, **foreign}))
    predicted = ("predicted_step_time_s", "predicted_peak_memory_bytes", "assumed")
    before = [[case[key] for key in predicted] for case in validate(measured, fingerprint)["cases"]]
    after = [[case[key] for key in predicted] for case in validate(garbled, fingerprint)["cases"]]
    assert before == after
    assert sum(case[0] is not None for case in before) > 400


def test_a_configuration_column_does_move_the_prediction(tmp_path: Path) -> None:
    rows = _rows(tmp_path, cells(), cells(ffn="14208"), cells(inter_node="ib-hdr-8x200g"), cells(dp_overlap="1"))
    times = [case["predicted_step_time_s"] for case in validate(rows, fingerprint)["cases"]]
    assert len(set(times)) == 4


def test_errors_are_fractions_and_their_spread_is_as_documented(tmp_path: Path) -> None:
    rows = _rows(tmp_path, *(cells(case_id=str(i), step_time_s="2") for i in range(6)))
    report = validate(rows, _says(2.5, 1.5, 2.25, 2, 2, 1))
    assert [case["error"] for case in report["cases"]] == [0.25, -0.25, 0.125, 0, 0, -0.5]
    spread = report["overall"]["step_time"]
    assert spread == {
        "mape": 1.125 / 6,
        "median_ape": (0.125 + 0.25) / 2,
        "p90_ape": (0.25 + 0.5) / 2,  # rank 0.9 * 5 = 4.5 of the sorted sizes
        "bias": -0.375 / 6,
    }
    assert report["families"]["made-up"]["step_time"] == spread


@pytest.mark.parametrize(
    ("kind", "nbytes"), [("allocated", 1e9), ("reserved", 2e9), ("nvidia-smi", 3e9), ("unknown", 1e9), ("", 1e9)]
)
def test_memory_is_compared_in_the_counter_it_was_measured_with(tmp_path: Path, kind: str, nbytes: float) -> None:
    rows = _rows(tmp_path, cells(peak_mem_gib="2", mem_kind=kind))
    case = validate(rows, fingerprint)["cases"][0]
    assert case["predicted_peak_memory_bytes"] == nbytes
    assert case["memory_error"] == nbytes / (2 * GIB) - 1


def test_an_incomplete_row_is_reported_but_not_scored(tmp_path: Path) -> None:
    report = validate(_rows(tmp_path, cells(), cells(case_id="b", complete="0")), fingerprint)
    case = report["cases"][1]
    assert (case["skipped"], case["error"], case["measured_step_time_s"]) == (None, None, 2.0)
    assert case["predicted_step_time_s"] == report["cases"][0]["predicted_step_time_s"]
    assert (report["rows"], report["scored"], report["skipped"]) == (2, 1, {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq": "-1"}, "t.csv line 3, column seq"),
        ({"heads": "many"}, "t.csv line 3, column heads"),
        ({"tp": "3"}, "t.csv line 3, column n_gpus"),
        ({"step_time_s": "fast"}, "t.csv line 3, column step_time_s"),
        ({"step_time_s": "0"}, "t.csv line 3, column step_time_s"),
        ({"step_time_s": "inf"}, "t.csv line 3, column step_time_s"),
        ({"peak_mem_gib": "-2"}, "t.csv line 3, column peak_mem_gib"),
        ({"mem_kind": "felt"}, "t.csv line 3, column mem_kind"),
        ({"complete": "maybe"}, "t.csv line 3, column complete"),
        ({"step_time_s": "0.02"}, "t.csv line 3, column step_time_s: must not mean a step below"),
        ({"step_time_s": "2000"}, "t.csv line 3, column step_time_s: must not mean a step above"),
        ({"step_time_s": "", "tokens_per_s_per_gpu": "524288"}, "t.csv line 3, column tokens_per_s_per_gpu: must not"),
        ({"peak_mem_gib": "53687091200"}, "t.csv line 3, column peak_mem_gib: must be at most the 79.65 GiB"),
        ({"step_time_s": ""}, "complete is 1, but neither a step time nor a memory"),
        ({"precision": "mxfp8x"}, "precision mxfp8x is not modelled"),
    ],
)
def test_a_bad_row_is_skipped_with_its_reason_and_the_others_run(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    report = validate(_rows(tmp_path, cells(), cells(**changes), cells()), fingerprint)
    assert [case["skipped"] is None for case in report["cases"]] == [True, False, True]
    assert report["cases"][1]["skipped"].startswith(reason)
    assert report["skipped"] == {report["cases"][1]["skipped"]: 1}
    assert report["scored"] == 2


def test_a_row_of_too_few_cells_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", cells())
    path.write_text(path.read_text() + "b,made-up,1\n")
    case = validate(read_rows(path), fingerprint)["cases"][1]
    assert case["skipped"] == f"t.csv line 3: a row must have {len(HEADER)} cells, but this one has 3"


def test_a_configuration_that_the_rules_refuse_is_skipped_with_the_rule(tmp_path: Path) -> None:
    def refuse(*_configuration: object) -> Told:
        message = "heads (64) must be divisible by tp (6);\n  try 8"
        raise ValueError(message)

    case = validate(_rows(tmp_path, cells()), refuse)["cases"][0]
    assert case["skipped"] == "heads (64) must be divisible by tp (6); try 8"


def test_a_prediction_without_a_step_time_is_skipped_with_its_reason(tmp_path: Path) -> None:
    rows = _rows(tmp_path, cells())
    report = validate(rows, lambda *_: Told(step_time_s=float("nan"), reason="does not fit"))
    assert report["skipped"] == {"no step time is predicted: does not fit": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"case_id,family\na,b\n", "must have the columns complete, arch"),
        (b"\xff\xfe\x00c", "UTF-8"),
        (",".join([*HEADER, "tp"]).encode() + b"\n", "once, but tp"),
        (",".join(HEADER).encode() + b'\n"a,b\n', "line 2: not CSV"),
    ],
)
def test_a_file_that_is_no_such_table_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_rows(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_in_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            read_rows(path)


def test_columns_that_only_tell_where_a_row_comes_from_may_be_absent(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    kept = [name for name in HEADER if name not in {"notes", "source", "peer", "mfu", "params_b", "model"}]
    path.write_text(",".join(kept) + "\n" + ",".join(cells()[name] for name in kept) + "\n")
    assert validate(read_rows(path), fingerprint)["scored"] == 1


def test_an_absent_column_counts_as_empty_and_what_is_assumed_for_it_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    kept = [name for name in HEADER if name not in {"zero_stage", "mtp_layers", "tokens_per_s_per_gpu", "mem_kind"}]
    path.write_text(",".join(kept) + "\n" + ",".join(cells()[name] for name in kept) + "\n")
    report = validate(read_rows(path), fingerprint)
    assert report["scored"] == 1
    assert any(line.startswith("zero_stage=0") for line in report["cases"][0]["assumed"])


def test_a_table_without_measured_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("case_id,family,complete,arch,layers,hidden,seq,gpu\n")
    with pytest.raises(ValueError, match="add step_time_s, tokens_per_s_per_gpu or peak_mem_gib"):
        read_rows(path)


def test_every_complete_row_of_the_shared_table_gets_its_predictions(measured: tuple[Row, ...]) -> None:
    complete = {row.cells["case_id"] for row in measured if row.cells["complete"] == "1"}
    cases = [case for case in validate(measured, fingerprint)["cases"] if case["case_id"] in complete]
    assert len(cases) == 478
    assert all(case["predicted_step_time_s"] for case in cases)
    with_memory = [case for case in cases if case["measured_peak_memory_bytes"]]
    assert len(with_memory) == 71
    assert all(case["predicted_peak_memory_bytes"] for case in with_memory)


def test_a_byte_order_mark_and_spaces_are_no_part_of_a_cell(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", cells(arch=" llama ", precision=" bf16"))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert validate(read_rows(path), fingerprint)["scored"] == 1


def test_an_empty_table_gives_an_empty_report(tmp_path: Path) -> None:
    report = validate(_rows(tmp_path), fingerprint)
    assert (report["rows"], report["scored"], report["families"]) == (0, 0, {})
    assert report["overall"]["step_time"]["mape"] is None
    assert "0 rows" in validation_table(report)


def test_the_report_has_the_documented_keys_and_plain_values(tmp_path: Path) -> None:
    report = validate(_rows(tmp_path, cells(), cells(seq="")), fingerprint)
    assert list(report) == ["rows", "scored", "skipped", "families", "overall", "cases"]
    parts = ["n", "step_time", "memory", "ranking"]
    assert list(report["families"]["made-up"]) == parts
    assert list(report["overall"]) == [*parts, "bands", "price_sources", "repeat_noise", "worst"]
    for summary in (report["overall"], report["families"]["made-up"]):
        assert list(summary["step_time"]) == list(summary["memory"]) == ["mape", "median_ape", "p90_ape", "bias"]
        assert list(summary["ranking"]) == ["groups", "tau", "regret"]
    for case in report["cases"]:
        assert list(case) == [
            "case_id", "family", "predicted_step_time_s", "p10_s", "p90_s", "measured_step_time_s", "error",
            "predicted_peak_memory_bytes", "measured_peak_memory_bytes", "memory_error", "assumed", "skipped",
        ]  # fmt: skip
    json.dumps(report, allow_nan=False)


def _ranking(tmp_path: Path, predicted: list[float], *rows: dict[str, str]) -> dict[str, Any]:
    ranking: dict[str, Any] = validate(_rows(tmp_path, *rows), _says(*predicted))["overall"]["ranking"]
    return ranking


def test_layouts_of_one_task_on_one_machine_are_ranked(tmp_path: Path) -> None:
    rows = [
        cells(micro_batch="1", step_time_s="3"),
        cells(micro_batch="2", step_time_s="2"),
        cells(micro_batch="4", step_time_s="1"),
    ]
    assert _ranking(tmp_path, [30, 20, 10], *rows) == {"groups": 1, "tau": 1.0, "regret": 0.0}
    assert _ranking(tmp_path, [10, 20, 30], *rows) == {"groups": 1, "tau": -1.0, "regret": 2.0}


def test_rows_of_other_tasks_machines_or_families_are_not_ranked_against_each_other(tmp_path: Path) -> None:
    others = [{"n_gpus": "128", "dp": "16"}, {"seq": "4096"}, {"precision": "fp8"}, {"family": "b"}, {"layers": "30"}]
    for other in others:
        rows = [cells(micro_batch="1", step_time_s="3"), cells(micro_batch="2", step_time_s="2", **other)]
        assert _ranking(tmp_path, [1, 2], *rows) == {"groups": 0, "tau": None, "regret": None}


def test_differences_within_the_noise_of_repeats_count_as_none(tmp_path: Path) -> None:
    repeats = [cells(seq=str(seq), step_time_s=s) for seq in (1024, 2048, 4096) for s in ("2", "2.2")]
    rows = [*repeats, cells(micro_batch="1", step_time_s="2"), cells(micro_batch="2", step_time_s="2.15")]
    report = validate(_rows(tmp_path, *rows), _says(*[1] * 6, 2, 1))
    assert report["overall"]["repeat_noise"] == {"made-up": pytest.approx(0.1)}
    assert report["overall"]["ranking"]["groups"] == 0
    rows[-1] = cells(micro_batch="2", step_time_s="2.3")
    ranking = validate(_rows(tmp_path, *rows), _says(*[1] * 6, 2, 1))["overall"]["ranking"]
    assert ranking == {"groups": 1, "tau": -1.0, "regret": pytest.approx(0.15)}


def test_to_take_a_layout_that_measures_alike_costs_nothing(tmp_path: Path) -> None:
    rows = [cells(micro_batch=m, step_time_s=s) for m, s in (("1", "2"), ("2", "2.01"), ("4", "3"))]
    assert _ranking(tmp_path, [2, 1, 3], *rows) == {"groups": 1, "tau": pytest.approx(2 / 6**0.5), "regret": 0.0}


def test_repeats_of_a_layout_count_once_with_their_median(tmp_path: Path) -> None:
    rows = [cells(step_time_s=s) for s in ("1", "2", "9")] + [cells(micro_batch="2", step_time_s="4")]
    ranking = _ranking(tmp_path, [6, 6, 6, 5], *rows)
    assert ranking == {"groups": 1, "tau": -1.0, "regret": 1.0}


def test_layouts_that_measure_alike_are_not_a_group(tmp_path: Path) -> None:
    rows = [cells(step_time_s="2"), cells(micro_batch="2", step_time_s="2.01")]
    assert _ranking(tmp_path, [1, 2], *rows)["groups"] == 0


def test_tau_b_counts_ties_as_kendall_does() -> None:
    # 5 concordant pairs, none discordant, one tied on the left of 6: 5 / sqrt(5 * 6)
    assert kendall_tau_b([1, 2, 2, 3], [1, 3, 2, 4], noise=0) == pytest.approx(5 / 30**0.5, rel=1e-15)
    assert kendall_tau_b([1, 1], [1, 2]) == 0.0
    assert kendall_tau_b([1, 2], [1, 1]) is None
    assert kendall_tau_b([1], [1]) is None


def test_any_of_the_layouts_that_are_predicted_alike_could_be_taken() -> None:
    assert regret([1, 1, 2], [10, 14, 10]) == 12 / 10 - 1


def test_tau_does_not_depend_on_the_order_of_the_rows() -> None:
    rng = np.random.default_rng(0)
    told, truth = rng.random(9), rng.random(9)
    order = rng.permutation(9)
    assert kendall_tau_b(told[order], truth[order]) == kendall_tau_b(told, truth)
    assert regret(told[order], truth[order]) == regret(told, truth)


def test_the_worst_rows_tell_where_their_time_goes(tmp_path: Path) -> None:
    report = validate(_rows(tmp_path, cells(), cells(case_id="b", seq="65536", global_batch="16")))
    assert [row["case_id"] for row in report["overall"]["worst"]] == [
        case["case_id"] for case in sorted(report["cases"], key=lambda case: -abs(case["error"]))
    ]
    for row in report["overall"]["worst"]:
        parts = row["seconds"]
        assert sum(parts.values()) == pytest.approx(row["predicted_step_time_s"], rel=1e-12)
        assert list(parts.values()) == sorted(parts.values(), reverse=True)
    by_name = {row["case_id"]: row["seconds"] for row in report["overall"]["worst"]}
    shares = {name: s["attention"] / s["matrix products"] for name, s in by_name.items()}
    assert 5 * shares["a"] < shares["b"] <= 8 * shares["a"]  # eight times the sequence, and less to pay beside it
    assert "matrix products" in validation_table(report)
    assert "seconds of kernels rest on:" in validation_table(report)


def test_the_page_needs_nothing_else_and_shows_every_scored_row(search: Callable[..., Any], tmp_path: Path) -> None:
    rows = [cells(), cells(case_id="<b>", seq="4096", n_gpus="", precision=""), cells(case_id="c", seq="x")]
    path = write(tmp_path / "t.csv", *rows)
    page = tmp_path / "page.html"
    assert search("validate", path, "--html", page).code == 0
    text = page.read_text()
    ElementTree.fromstring(text.partition("\n")[2].replace('<meta charset="utf-8">', ""))
    assert text.count("<circle") == 4 * 2 - 1  # one row says nothing of its chips
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert not re.search(r"<script|<link|<img|src=|@import|url\(", text)
    assert set(re.findall(r"https?://[^\s\"<]+", text)) == {"http://www.w3.org/2000/svg"}
    again = search("validate", path, "--html", page)
    assert again.code == 2
    assert "must not replace" in again.err
    assert page.read_text() == text


def test_the_table_names_families_worst_rows_and_every_reason(tmp_path: Path) -> None:
    rows = _rows(
        tmp_path,
        cells(case_id="fine", step_time_s="1"),
        cells(case_id="worst", step_time_s="1"),
        cells(case_id="unscored", complete="0"),
        cells(case_id="skipped", precision="nvfp5"),
    )
    text = validation_table(validate(rows, _says(1.1, 3, 1)))
    assert "made-up" in text
    assert "+200.0%" in text
    assert text.index("worst ") < text.index("fine ")
    assert "4 rows: 2 scored, 1 incomplete, 1 skipped" in text
    assert "1 skipped: precision nvfp5 is not modelled; modelled are" in text
    assert "(skipped)" in text
