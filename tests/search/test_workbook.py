"""Claims about the workbook of a run: openpyxl reads it, formulas are worked out here and held against prices."""

from __future__ import annotations

import re

import pytest

from results.report.breakdown import TIME_TERMS
from results.schema import FRONT_FIELDS
from search.commands.ops import price_ops
from search.commands.point import read_point

openpyxl = pytest.importorskip("openpyxl")


@pytest.fixture
def book(search, small_run, tmp_path):
    assert search("show", "latest", "--xlsx", "front.xlsx").code == 0
    return openpyxl.load_workbook(tmp_path / "front.xlsx")


def worked_out(book, sheet, cell, **changed):
    """The value of a formula made of + - * / MAX, SUM and SUMIFS; `changed`: cells of the sheet chip, by name."""
    value = book[sheet][cell].value
    if sheet == "chip" and cell in changed:
        return changed[cell]
    if not isinstance(value, str) or not value.startswith("="):
        return value
    text = value[1:].replace("MAX(", "max(").replace("$", "")
    if found := re.fullmatch(r"SUM\(([A-Z]+)(\d+):[A-Z]+(\d+)\)", text):
        letter, first, last = found.groups()
        return sum(worked_out(book, sheet, f"{letter}{n}", **changed) for n in range(int(first), int(last) + 1))
    if found := re.fullmatch(r'SUMIFS\(([A-Z]+)2:[A-Z]+(\d+),([A-Z]+)2:.*,"(\w+)"\)', text):
        amounts, last, phases, phase = found.groups()
        lines = [n for n in range(2, int(last) + 1) if book[sheet][f"{phases}{n}"].value == phase]
        return sum(worked_out(book, sheet, f"{amounts}{n}", **changed) for n in lines)

    def number(match):
        return repr(float(worked_out(book, match[1] or sheet, match[2], **changed)))

    return eval(re.sub(r"(?:(chip)!)?\b([A-Z]{1,2}\d+)\b", number, text), {"max": max})


def test_the_front_is_all_there_with_its_units(book, small_run):
    sheet, front = book["front"], small_run.read_front()
    assert [cell.value for cell in sheet[1]] == [field.name for field in FRONT_FIELDS]
    assert [cell.value or "" for cell in sheet[2]] == [field.unit for field in FRONT_FIELDS]
    ids = [row[0].value for row in sheet.iter_rows(min_row=3)]
    assert sorted(ids) == sorted(map(str, front["id"].tolist()))
    column = [field.name for field in FRONT_FIELDS].index("step_time_s")
    for row in sheet.iter_rows(min_row=3):
        step = front["step_time_s"][front.find(int(row[0].value))]
        assert row[column].value == pytest.approx(step, rel=1e-15)  # a sheet has sixteen digits


def test_waterfalls_sum_to_the_step(book):
    sheet = book["waterfall"]
    assert [sheet.cell(row, 1).value for row in range(2, 2 + len(TIME_TERMS))] == list(TIME_TERMS)
    last = len(TIME_TERMS)
    for column in "BCD":
        step = sheet[f"{column}{last + 3}"].value
        assert worked_out(book, "waterfall", f"{column}{last + 2}") == pytest.approx(step, rel=1e-9)
        assert worked_out(book, "waterfall", f"{column}{last + 4}") == pytest.approx(0.0, abs=1e-9 * step)


def test_the_formula_of_every_operation_gives_its_price(book, small_run):
    sheet = book["ops"]
    heads = [cell.value for cell in sheet[1]]
    seconds = openpyxl.utils.get_column_letter(heads.index("seconds") + 1)
    point = read_point(f"{small_run.path}:{book['front']['A3'].value}", None, [])
    priced = price_ops(point)
    assert len(priced) > 40  # traffic of groups of one is none
    for line, op in enumerate(priced, start=2):
        assert sheet[f"{chr(65 + heads.index('name'))}{line}"].value == op.name
        assert worked_out(book, "ops", f"{seconds}{line}") == pytest.approx(op.seconds, rel=1e-12)
        assert sheet[f"{chr(65 + heads.index('else_s'))}{line}"].value == pytest.approx(0.0, abs=1e-12)
    sums = {sheet[f"A{n}"].value: sheet[f"{chr(65 + len(heads) - 1)}{n}"].coordinate
            for n in range(len(priced) + 2, sheet.max_row + 1) if sheet[f"A{n}"].value}  # fmt: skip
    for phase in ("forward", "backward"):
        told = sum(op.times * op.seconds for op in priced if op.phase == phase)
        assert worked_out(book, "ops", sums[f"all of {phase}"]) == pytest.approx(told, rel=1e-12)


def test_twice_the_bandwidth_halves_what_memory_bounds(book, small_run):
    heads = [cell.value for cell in book["ops"][1]]
    seconds = openpyxl.utils.get_column_letter(heads.index("seconds") + 1)
    point = read_point(f"{small_run.path}:{book['front']['A3'].value}", None, [])
    rate, share = book["chip"]["B1"].value, book["chip"]["B2"].value
    at = {name: heads.index(name) + 1 for name in ("flops", "reached_flops_per_s", "moved_bytes", "kernel_s")}
    bound = []
    for line in range(2, len(price_ops(point)) + 2):
        flops, reached, moved, ramp = (book["ops"].cell(line, column).value for column in at.values())
        if flops / reached < moved / (2.0 * rate * share):
            once, halved = (
                worked_out(book, "ops", f"{seconds}{line}", **more) for more in ({}, {"B1": 2.0 * rate})
            )  # fmt: skip
            assert halved - ramp == pytest.approx((once - ramp) / 2.0)
            bound.append(line)
    assert len(bound) > 10
