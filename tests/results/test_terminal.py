"""Claims about the tables people read: order, arithmetic, width, and what stays visible when it is small or odd."""

from __future__ import annotations

import csv
import io
import math

import numpy as np
import pytest

from results.plan import plan_front
from results.report import (
    arithmetic,
    csv_text,
    front_table,
    memory_table,
    ranked,
    rejection_table,
    runs_table,
    scatter,
    settings,
    waterfall,
)
from results.report.batch import batch_table
from results.report.breakdown import TIME_TERMS
from results.report.plan_text import plan_table
from results.report.text import clip, columns, format_cell, title_lines
from results.schema import REJECTION_FIELDS, conform

STEP_AND_MEMORY = ("step_time_s", "device_memory_bytes")
FOUR = ("step_time_s", "reserved_memory_bytes", "tokens_per_s_per_gpu", "cost_usd_per_mtoken")


def fits_a_terminal(text):
    return all(len(line) <= 100 and line.isprintable() for line in text.splitlines()) and text.endswith("\n")


def test_the_best_of_each_objective_comes_first_then_the_knee_then_the_rest(make_front):
    front = make_front(5, step_time_s=[5.0, 3.0, 1.0, 2.0, 4.0], device_memory_bytes=[1.0, 2e9, 5e9, 1.5, 1.2])
    order, marks = ranked(front, STEP_AND_MEMORY)
    assert order == [2, 0, 3, 1, 4]
    assert marks == {2: ["best step_time_s"], 0: ["best device_memory_bytes"], 3: ["knee"]}


def test_an_objective_that_is_better_when_larger_is_best_at_its_largest(make_front):
    order, marks = ranked(make_front(3), ("tokens_per_s", "device_memory_bytes"))
    assert marks[order[0]] == ["best tokens_per_s"]
    assert order[0] == 0


def test_equals_in_one_objective_are_told_apart_by_the_others_and_then_by_id(make_front):
    front = make_front(4, step_time_s=[1.0, 1.0, 1.0, 2.0], mfu=[0.1, 0.3, 0.3, 0.9], id=[6, 9, 8, 7])
    assert ranked(front, ("step_time_s", "mfu"))[0][0] == 2


def test_one_row_can_carry_every_mark(make_front):
    text = front_table(make_front(1), STEP_AND_MEMORY)
    assert "best step_time_s, best device_memory_bytes" in text
    assert "knee" not in text


@pytest.mark.parametrize("objectives", [("step_time_s",), STEP_AND_MEMORY, (*STEP_AND_MEMORY, "num_gpus"), FOUR])
@pytest.mark.parametrize("num_rows", [1, 2, 30])
def test_a_front_fits_a_terminal_whatever_it_holds(make_front, objectives, num_rows):
    long_name = "published\nlayout " * 20 + "x" * 300
    front = make_front(
        num_rows,
        id=2**63 - 1 - np.arange(num_rows),
        system=[long_name] * num_rows,
        recompute=["+".join(["mla_up_proj"] * 12)] * num_rows,
        layout=["+".join(["4"] * 64)] * num_rows,
        step_time_s=10.0 ** np.arange(num_rows),
    )
    reference = make_front(2, id=[-1, -1], name=[long_name, "b"], feasible=[True, False], reason=["", long_name])
    text = front_table(front, objectives, reference=reference)
    assert fits_a_terminal(text)
    assert "\x1b" not in text
    assert f"{num_rows} of {num_rows} points" in text


def test_the_chips_multiply_out_in_sight(make_front):
    row = make_front(1).row(0)
    assert arithmetic(row) == "2048 = tp 1 x pp 16 x dp 128, ep 64"
    assert arithmetic(row | {"cp": 2, "dp": 64, "etp": 4}) == "2048 = tp 1 x cp 2 x pp 16 x dp 64, ep 64, etp 4"
    assert arithmetic(row | {"dp": 100}) == "2048 != tp 1 x pp 16 x dp 100, ep 64"
    assert arithmetic(row | {"num_gpus": math.nan}) == "2048 = tp 1 x pp 16 x dp 128, ep 64"


def test_settings_name_what_has_an_effect_and_nothing_else(make_front):
    row = make_front(1).row(0)
    phrases = settings(row)
    assert phrases[:3] == ["dualpipe", "micro-batch 1 x 120", "zero 1"]
    assert "recompute layernorm+mla_up_proj" in phrases
    assert "no overlap" in phrases
    assert not any("sequence" in phrase or "vpp" in phrase or "context" in phrase for phrase in phrases)
    switched = settings(
        row
        | {"tp": 4, "cp": 2, "vpp": 2, "sequence_parallel": True, "overlap_dp": True, "overlap_ep": True}
        | {"recompute": "block", "recompute_layers": 3, "bucket_bytes": 2**29, "layout": "3+4"}
    )
    for phrase in (
        "vpp 2",
        "layout 3, 4",
        "sequence parallel",
        "context by ring",
        "overlap dp+ep",
        "recompute block of 3 layers a chunk",
        "buckets of 512.0 MiB",
    ):
        assert phrase in switched


def test_settings_tell_what_chunks_and_experts_have_of_their_own_where_it_acts(make_front):
    row = make_front(1).row(0)
    own = row | {"recompute": "block", "recompute_per_chunk": "2+0", "tp_chunks": "1+2+4+4", "expert_bucket_bytes": 0}
    quiet = settings(own)
    assert "recompute block of 2+0 layers by chunk" in quiet
    assert not any("pieces" in phrase or "experts" in phrase for phrase in quiet)
    loud = settings(own | {"overlap_tp": True, "overlap_dp": True})
    assert "tp in 1+2+4+4 pieces" in loud
    assert "of experts all at once" in loud
    assert "of experts 1.0 MiB" in settings(own | {"overlap_dp": True, "expert_bucket_bytes": 2**20})


def test_every_setting_of_a_row_is_shown_once(make_front):
    front = make_front(3, zero_stage=[0, 1, 1])
    text = " ".join(front_table(front, STEP_AND_MEMORY).split())
    assert text.count("dualpipe") == 1
    assert (text.count("zero 0"), text.count("zero 1")) == (1, 2)
    assert "all rows: dualpipe" in text


def test_a_reference_stands_beside_the_front_with_its_distance(make_front):
    reference = make_front(1, id=[-1], name=["published"], step_time_s=[22.0])
    text = " ".join(front_table(make_front(2), ("step_time_s",), reference=reference).split())
    assert "ref 22 s * reference published, 1.1 x best step_time_s" in text


def test_an_infeasible_reference_says_why(make_front):
    reference = make_front(
        1, id=[-1], name=["published"], step_time_s=[math.nan], feasible=[False], reason=["memory: 90 GiB of 76"]
    )
    text = " ".join(front_table(make_front(2), ("step_time_s",), reference=reference).split())
    assert "ref - * reference published, not feasible: memory: 90 GiB of 76" in text
    alone = front_table(make_front(0), ("step_time_s",), reference=reference)
    assert "0 of 0 points" in alone


def test_top_shows_the_first_rows_and_says_how_many_there_are(make_front):
    text = front_table(make_front(9), STEP_AND_MEMORY, top=2)
    assert text.count("2048 =") == 2
    assert "2 of 9 points of the front" in text


def test_an_empty_front_says_so(make_front):
    assert front_table(make_front(0), STEP_AND_MEMORY) == "the front is empty: no configuration is feasible\n"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("step_time_s", 19.943, "19.94 s"),
        ("step_time_s", 0.0032, "3.2 ms"),
        ("device_memory_bytes", 2.0**30, "1.0 GiB"),
        ("num_gpus", 2048.0, "2048"),
        ("tokens_per_s", 3157452.3, "3.2 M"),
        ("cost_usd_per_mtoken", 0.31416, "0.3142"),
        ("sequence_parallel", True, "true"),
        ("mfu", math.inf, "-"),
    ],
)
def test_a_cell_is_shown_in_the_unit_of_its_column(name, value, shown):
    assert format_cell(name, value) == shown


def test_csv_reads_back_to_the_same_bits(make_front):
    front = make_front(3, name=['a "b", c', "", "x"], step_time_s=[0.1, 1 / 3, 1e300])
    rows = list(csv.DictReader(io.StringIO(csv_text(front))))
    assert [float(row["step_time_s"]) for row in rows] == [0.1, 1 / 3, 1e300]
    assert (rows[0]["name"], rows[0]["id"], rows[0]["feasible"]) == ('a "b", c', "1000", "true")
    assert csv_text(front, ["id", "tp"]) == "id,tp\n1000,1\n1001,1\n1002,1\n"


def test_rejections_are_ordered_by_count_with_an_example():
    table = conform(
        {"rule": ["heads", "memory " * 40], "count": [25, 75], "example": ["64 heads by tp 6", "x" * 500]},
        REJECTION_FIELDS,
    )
    text = rejection_table(table)
    assert fits_a_terminal(text)
    lines = text.splitlines()
    assert lines[1].startswith("      75  75.0%  memory")
    assert "      25  25.0%  heads" in lines
    assert lines[-1].strip() == "e.g. 64 heads by tp 6"
    assert rejection_table(conform({"rule": [], "count": []}, REJECTION_FIELDS)) == "nothing was rejected\n"


def test_a_plan_lists_points_in_the_order_given_and_fits_a_terminal(make_front):
    front = make_front(3, step_time_s=[3.0, 1.0, 2.0], tokens_per_s=[1e6, 3e6, 1.5e6])
    text = plan_table(front, plan_front(front, tokens=15e12), [1, 2, 0])
    assert fits_a_terminal(text)
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["1001", "1002", "1000"]
    assert text.count("2048 = tp 1 x pp 16 x dp 128, ep 64") == 3
    large = make_front(1, id=[10**14])
    assert fits_a_terminal(plan_table(large, plan_front(large, tokens=1e18), [0]))


def test_runs_are_listed_in_columns():
    runs = [
        {"path": "runs/" + "a" * 90, "state": "done", "front": 3, "seconds": 2.5, "error": "", "created": "2026-01-01"},
        {"path": "runs/b", "state": "unreadable", "front": None, "seconds": None, "error": "x" * 300, "created": ""},
    ]
    text = runs_table(runs)
    assert fits_a_terminal(text)
    assert "2.5 s" in text
    assert runs_table([]) == "no runs\n"


def step(**terms):
    row = dict.fromkeys(TIME_TERMS, 0.0) | terms
    return row | {"step_time_s": sum(row[name] for name in TIME_TERMS)}


def test_the_bars_of_a_waterfall_start_where_the_last_one_ended():
    text = waterfall(step(forward_s=1.0, backward_s=2.0, bubble_s=1.0))
    bars = [line.partition("|")[2] for line in text.splitlines() if "|" in line]
    assert [(bar.index("#"), bar.rindex("#") + 1) for bar in bars] == [(0, 12), (12, 38), (38, 50), (0, 50)]
    assert "25.0%" in text.splitlines()[0]
    assert "50.0%" in text.splitlines()[1]


def test_a_small_term_keeps_a_mark_and_a_zero_term_is_named():
    text = waterfall(step(forward_s=1.0, jitter_s=1e-9))
    assert next(line for line in text.splitlines() if line.startswith("jitter_s")).endswith("#")
    zero = " ".join(text.splitlines()[4:])
    assert "optimizer_s" in zero
    assert "jitter_s" not in zero
    assert fits_a_terminal(text)


def test_terms_that_do_not_sum_to_the_step_are_called_out():
    assert "terms sum to" not in waterfall(step(forward_s=0.1, backward_s=0.2, bubble_s=0.3))
    assert "the terms sum to 1.0 s, not to the step" in waterfall(step(forward_s=1.0) | {"step_time_s": 1.1})


def test_equal_neighbouring_stages_share_a_column_and_the_fullest_has_a_star():
    middle = {"weights": 2.0**30, "activations": 2.0**31}
    stages = [{"weights": 2.0**32}, middle, dict(middle), middle, {"weights": 2.0**30, "logits": 2.0**31}]
    text = memory_table(stages, capacity_bytes=2.0**33)
    lines = text.splitlines()
    assert lines[0].split() == ["stage", "0*", "1-3", "4"]
    assert lines[2].split() == ["weights", "4.0", "GiB", "1.0", "GiB", "1.0", "GiB"]
    assert next(line for line in lines if line.startswith("logits")).split() == ["logits", "-", "-", "2.0", "GiB"]
    assert next(line for line in lines if line.startswith("total")).split()[1::2] == ["4.0", "3.0", "3.0"]
    assert lines[-1] == "fullest stage 0: 50.0% of 8.0 GiB"


def test_many_unequal_stages_fit_a_terminal():
    text = memory_table([{"weights": float(i), "an item with a rather long name": 1e9} for i in range(64)])
    assert fits_a_terminal(text)
    assert text.count("total") == math.ceil(64 / 7)


@pytest.mark.parametrize("num_rows", [1, 2, 500])
def test_a_scatter_fits_a_terminal_and_marks_knee_and_reference(make_front, num_rows):
    reference = make_front(2, id=[-1, -1], name=["a", "b"], step_time_s=[21.0, math.nan])
    text = scatter(make_front(num_rows), *STEP_AND_MEMORY, reference=reference)
    assert fits_a_terminal(text)
    inside = [line.partition("|")[2] for line in text.splitlines() if "|" in line]
    assert sum(line.count("R") for line in inside) == 1
    assert "step_time_s (log)" in text


def test_a_scatter_puts_the_ends_of_a_front_into_its_corners(make_front):
    front = make_front(3, step_time_s=[1.0, 2.0, 100.0], device_memory_bytes=[1e11, 2e9, 1e9])
    inside = [line.partition("|")[2] for line in scatter(front, *STEP_AND_MEMORY).splitlines() if "|" in line]
    assert inside[0] == "o"
    assert inside[-1] == " " * 79 + "o"
    assert sum(line.count("K") for line in inside) == 1


def test_points_that_share_a_cell_are_drawn_as_several(make_front):
    front = make_front(3, step_time_s=[1.0, 1.0, 100.0], device_memory_bytes=[1e11, 1e11, 1e8])
    text = scatter(front, *STEP_AND_MEMORY)
    inside = "".join(line.partition("|")[2] for line in text.splitlines())
    assert set(inside.strip()) <= {"8", "K", "o", " "}
    assert inside.count("K") == 1


def test_an_axis_with_zeros_is_linear(make_front):
    assert "exposed_comm_ep_s (linear)" in scatter(make_front(4), "step_time_s", "exposed_comm_ep_s")
    assert scatter(make_front(0), *STEP_AND_MEMORY) == "no points to draw\n"


def test_what_a_table_cuts_ends_in_dots():
    lines = columns(["a", "b"], [["x" * 60, "y" * 60], ["x", "y"]])
    assert (len(lines[2]), lines[2][-4:]) == (100, "y...")
    assert "..." not in columns(["a", "b"], [["x" * 60, "y" * 38]])[2]


def test_columns_stand_closer_before_any_of_them_is_cut():
    lines = columns(["a", "b", "c"], [["x" * 50, "y" * 44, "yes"], ["x", "y", "no"]])
    assert [len(line) for line in lines[1:]] == [99, 99, 99]
    assert [line[-4:] for line in lines[2:]] == [" yes", "  no"]
    apart = columns(["a", "b", "c"], [["x" * 50, "y" * 43, "yes"]])
    assert (len(apart[2]), apart[2][-5:]) == (100, "  yes")


@pytest.mark.parametrize("systems", [("dgx_h800",), ("dgx_h800", "dgx_b200")])
def test_a_batch_fits_a_terminal_and_keeps_how_each_run_ended(systems):
    best = {"step_time_s": 12.5, "peak_memory_bytes": 7e10, "cost_usd_per_mtoken": 0.25}
    row = {
        "run": "capacity_of_a_model_with_a_long_name", "systems": systems, "num_gpus": (8192,) * len(systems),
        "legal": 131_000_000, "front": 1234, "best": best, "seconds": 62.5, "outcome": "nothing feasible", "error": "",
    }  # fmt: skip
    text = batch_table([row, row | {"best": {}}])
    assert fits_a_terminal(text)
    assert text.count("nothing feasible") == 2
    assert "best step_time" in text


def test_titles_break_at_underscores_and_names_are_one_line():
    assert all(len(line) <= 12 for line in title_lines("tokens_per_s_per_gpu", 12))
    assert "_".join(" ".join(title_lines("exposed_comm_tp_s", 12)).split()) == "exposed_comm_tp"
    assert clip("a\nb\tc\x1b[31m") == "a b c [31m"
    assert columns(["a", "b"], [["1", "22"]]) == ["a   b", "-----", "1  22"]
