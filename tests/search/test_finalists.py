"""Which rows are finalists and why, and what a replay does to their order."""

from __future__ import annotations

import math

import pytest

from results.schema import FRONT_FIELDS, conform
from search.finalists import finalists, key_of, name_of, order_line, reranked, system_of_row
from tests.search.small import SMALL

TWO = ("step_time_s", "peak_memory_bytes")
NONE = conform({field.name: [] for field in FRONT_FIELDS}, FRONT_FIELDS)


@pytest.fixture
def table(small_run):
    """Rows like those of the small run: (id, seconds, gigabytes) and what else is to differ."""
    (base,) = small_run.read_front().where(small_run.read_front()["id"] == 0).rows()

    def make(*points, **common):
        rows = [
            base | {"id": number, "step_time_s": seconds, "peak_memory_bytes": gigabytes * 1e9} | common | more
            for number, seconds, gigabytes, more in points
        ]
        return conform({field.name: [row[field.name] for row in rows] for field in FRONT_FIELDS}, FRONT_FIELDS)

    return make


def curve(num):
    return [(10 + i, 1.0 + i, 100.0 / (1 + 3 * i), {"tp": 1 + i // 2, "zero_stage": i % 2}) for i in range(num)]


def told(found):
    return {one.row["name"] or one.row["id"]: one.why for one in found}


def test_the_best_of_each_objective_the_knee_and_the_next_best_are_finalists(table):
    found = told(finalists(table(*curve(9)), NONE, TWO, 2))
    assert found[10] == ("best step_time_s",)
    assert found[18] == ("best peak_memory_bytes",)
    assert ("knee",) in found.values()
    assert list(found.values()).count(("next best step_time_s",)) == 2
    assert len(found) == 5


def test_next_best_of_another_structure_come_first(table):
    found = told(finalists(table(*curve(9)), NONE, TWO, 4))
    assert [number for number, why in found.items() if why == ("knee",)] == [11]
    # 10 and 11 share a structure, as 12 and 13 do, and so on: 12, 14 and 16 bring a new one, 13 none.
    next_best = [number for number, why in found.items() if why == ("next best step_time_s",)]
    assert next_best == [12, 14, 16, 13]


def test_of_one_structure_the_next_best_are_taken_all_the_same(table):
    front = table(*[(i, 1.0 + i, 9.0 - i, {"zero_stage": i % 3}) for i in range(6)])
    found = told(finalists(front, NONE, TWO, 2))
    assert [number for number, why in found.items() if why == ("next best step_time_s",)] == [
        number for number in range(1, 5) if found.get(number) != ("knee",)
    ][:2]


@pytest.mark.parametrize(("more", "num"), [(0, 3), (1, 4), (4, 7), (1000, 9)])
def test_more_than_there_are_is_all_there_are(table, more, num):
    assert len(finalists(table(*curve(9)), NONE, TWO, more)) == num


def test_a_front_of_one_point_has_one_finalist_with_every_reason(table):
    (only,) = finalists(table((7, 1.0, 2.0, {})), NONE, TWO, 3)
    assert only.why == ("best step_time_s", "best peak_memory_bytes")


def test_reference_points_that_fit_are_finalists_and_others_are_not(table):
    reference = table((-1, 5.0, 5.0, {"name": "mine", "tp": 8}),
                      (-1, math.nan, 5.0, {"name": "illegal", "feasible": False, "num_gpus": math.nan}))  # fmt: skip
    found = told(finalists(table(*curve(3)), reference, TWO, 0))
    assert found["mine"] == ("reference mine",)
    assert "illegal" not in found


def test_a_reference_point_that_is_a_finalist_is_named_there(table):
    front = table(*curve(9))
    best = front.row(0)
    reference = table((-1, 1.0, 100.0, {"name": "mine", "tp": best["tp"], "zero_stage": best["zero_stage"]}))
    found = told(finalists(front, reference, TWO, 0))
    assert found[10] == ("best step_time_s", "reference mine")
    assert "mine" not in found


def test_one_reference_on_two_sizes_of_a_cluster_is_two_finalists(table):
    reference = table((-1, 5.0, 5.0, {"name": "mine", "num_gpus": 64.0, "dp": 64}),
                      (-1, 4.0, 5.0, {"name": "mine", "num_gpus": 128.0, "dp": 128}))  # fmt: skip
    found = finalists(table(*curve(3)), reference, TWO, 0)
    assert len({one.key for one in found if one.row["name"]}) == 2


def row(number, estimated, replayed):
    return {"id": number, "name": "", "system": "s", "num_gpus": 8, "estimated_step_time_s": estimated,
            "replayed_step_time_s": replayed, "fits": True}  # fmt: skip


def test_replayed_time_orders_finalists_and_what_was_not_replayed_comes_last():
    rows = reranked([row(1, 1.0, 3.0), row(2, 0.5, math.nan), row(3, 2.0, 2.0), row(4, 3.0, 2.5)])
    assert [(r["id"], r["rank_estimated"], r["rank_replayed"]) for r in rows] == [
        (3, 2, 1),
        (4, 3, 2),
        (1, 1, 3),
        (2, 0, 0),
    ]
    assert order_line(rows) == "ranking changed: by replay 3, 4, 1; by estimate 1, 3, 4"


def test_equal_replays_keep_the_order_of_the_estimate_and_nothing_is_said():
    rows = reranked([row(7, 2.0, 5.0), row(5, 2.0, 5.0), row(9, 1.0, 5.0)])
    assert [r["id"] for r in rows] == [9, 5, 7]
    assert order_line(rows) == ""
    assert order_line(reranked([])) == ""


def test_what_takes_more_memory_than_there_is_stands_behind_all_that_fits():
    rows = reranked([row(1, 1.0, 1.0) | {"fits": False}, row(2, 2.0, 2.0), row(3, 3.0, math.nan)])
    assert [(r["id"], r["rank_replayed"]) for r in rows] == [(2, 1), (1, 2), (3, 0)]
    assert order_line(rows) == "ranking changed: by replay 2, 1; by estimate 1, 2"


def test_the_key_of_a_row_survives_the_file(small_run):
    front = small_run.read_front()
    keys = {key_of(point) for point in front.rows()}
    assert len(keys) == len(front)


def test_a_row_is_on_the_system_of_its_size():
    space = SMALL["cost over chip counts"]
    assert len({system.num_chips for system in space.systems}) > 1
    for system in space.systems:
        degrees = {"tp": 2, "cp": 1, "pp": 1, "dp": system.num_chips // 2}
        assert system_of_row(space, {"system": system.name, **degrees}) is system
    with pytest.raises(ValueError, match="no system is called 'elsewhere'"):
        system_of_row(space, {"system": "elsewhere", "tp": 1, "cp": 1, "pp": 1, "dp": 8})


def test_a_row_is_called_by_its_id_or_by_its_name_where_it_has_none():
    assert name_of({"id": 0, "name": ""}) == "0"
    assert name_of({"id": -1, "name": "mine"}) == "mine"
