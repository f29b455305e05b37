"""Claims about the page of a run, looked at in a real browser; numbers are held against the tables they come from."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from estimator.strategy import Recompute
from results.pareto import non_dominated
from results.report import arithmetic, settings
from results.report.breakdown import TIME_TERMS
from results.report.run_page import RunFacts, page_html
from results.schema import FRONT_FIELDS, Plain, conform, strategy_columns
from results.store import RunFolder
from search.commands.page import details_of, gathered, report_html
from search.space import load_space
from tests.browser import open_browser
from tests.search.conftest import price

WIDTHS = (1280, 400)
SEVEN_DIGITS = 1e-6  # columns are kept as float32


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of DeepSeek-V3 on 2,048 H800: unbeaten variants of the published layout as its front."""
    space = load_space("deepseek_v3")
    base = space.references["published"]
    recomputes = [Recompute.parse(text) for text in ("none", "mla_up_proj", "layernorm+mla_up_proj", "full")]
    variants = [
        replace(base, pp=pp, zero_stage=zero, recompute=recompute)
        for pp, zero, recompute in itertools.product((8, 16), (1, 2, 3), recomputes)
    ]
    table = price(space, [(7 * i, "", strategy) for i, strategy in enumerate(variants)])
    table = table.where(table["feasible"].astype(bool))
    names = [objective.column for objective in space.objectives]
    front = table.take(non_dominated(np.stack([table[name] for name in names], axis=1), table["id"]))
    manifest = {
        "state": "done",
        "counts": {"raw": space.raw_size, "legal": 1000, "fits": 900, "priced": 900, "front": len(front)},
        "seconds": {"sweep": 0.5, "total": 1.5}, "sampler": "exhaustive", "sampler_reason": "exact", "closest": [],
    }  # fmt: skip
    folder = RunFolder.create(tmp_path_factory.mktemp("page") / "run", space.name, space.resolved_yaml(), manifest)
    folder.write_front(front.columns)
    folder.write_reference(price(space, [(-1, name, s) for name, s in space.references.items()]).columns)
    folder.write_rejections([{"rule": "memory", "count": 100, "example": "90 GiB of 76 GiB"}])
    folder.close()
    assert len(front) >= 3
    return folder


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report_html(gathered(run, load_space("deepseek_v3"))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    browser = open_browser()
    yield browser
    browser.driver.quit()


@pytest.fixture
def opened(browser, page):
    browser.open(page)
    return browser


def test_the_page_asks_for_nothing_from_outside(page):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?:src|href)\s*=\s*[\"'](?!#|data:)", text) == []
    assert re.findall(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_readable_and_the_console_silent(browser, page, width):
    browser.open(page, width)
    assert browser.complaints() == []
    assert browser.run("return document.documentElement.scrollWidth") <= width
    for picture in ("#points", "#lines", "#swimlane", "#chips"):
        colours = browser.run(
            "const c = document.querySelector(arguments[0]);"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "return new Set(new Uint32Array(d.buffer)).size", picture
        )  # fmt: skip
        assert colours > 3, picture
    small = "return [...document.querySelectorAll('main *')].filter(e => e.childNodes.length && e.innerText &&"
    assert browser.run(f"{small} parseFloat(getComputedStyle(e).fontSize) < 11.5).map(e => e.tagName)") == []


def test_every_column_arrives_as_it_was_sent(opened, run):
    front, reference = run.read_front(), run.read_reference()
    sent = opened.run("return data.columns.filter(c => c.kind !== 'texts').map(c => c.name)")
    known = {f.name for f in FRONT_FIELDS if f.kind is not Plain.FLOAT64 or np.isfinite(front[f.name]).any()}
    assert set(sent) == known - {"id", "name", "reason", "reserved_memory_bytes"}
    for name in sent:
        values = [*front[name].tolist(), *reference[name].tolist()]
        found = opened.run(
            "const c = columns.get(arguments[0]); return data.ids.map((_, i) => c.at(i))", name
        )  # fmt: skip
        if isinstance(values[0], float):
            told = [np.nan if x is None else x for x in found]
            assert told == pytest.approx(values, rel=SEVEN_DIGITS, abs=1e-30, nan_ok=True), name
        else:
            assert found == values, name
    step = opened.run("return data.ids.map((_, i) => columns.get('step_time_s').at(i))")
    assert step == [*front["step_time_s"].tolist(), *reference["step_time_s"].tolist()]  # an objective: to the bit


def place_of(browser, row):
    return browser.run("const i = plot.rows.indexOf(arguments[0]); return [plot.x[i], plot.y[i]]", row)


def test_hovering_tells_the_whole_configuration_and_why_it_is_on_the_front(opened, run):
    front = run.read_front()
    for row in range(len(front)):
        opened.mouse("#over", *place_of(opened, row))
        told = opened.text("#tip")
        assert f"id {front['id'][row]}" in told
        for phrase in (arithmetic(front.row(row)), *settings(front.row(row))):
            assert phrase in told
    by_time = np.argsort(front["step_time_s"])
    opened.mouse("#over", *place_of(opened, int(by_time[0])))
    assert "best step_time_s" in opened.text("#tip")
    opened.mouse("#over", *place_of(opened, int(by_time[1])))
    faster = front.row(int(by_time[0]))
    more = (faster["peak_memory_bytes"] - front.row(int(by_time[1]))["peak_memory_bytes"]) / 2**30
    told = opened.text("#tip")
    assert f"the next better in step time, {faster['id']}, takes" in told
    assert float(re.search(r"takes ([\d.]+) GiB more peak memory", told)[1]) == pytest.approx(more, rel=1e-3)
    opened.mouse("#over", *place_of(opened, int(by_time[-1])))
    assert f"the next better in step time, {front['id'][by_time[-2]]}, takes" in opened.text("#tip")
    assert opened.complaints() == []


def test_two_clicks_compare_and_the_terms_sum_to_the_difference(opened, run):
    front = run.read_front()
    a, b = (int(i) for i in np.argsort(front["step_time_s"])[[0, -1]])
    opened.mouse("#over", *place_of(opened, a), click=True)
    opened.mouse("#over", *place_of(opened, b), click=True, shift=True)
    x, y = front["step_time_s"][[a, b]]
    assert f"B is {100 * (y - x) / x:.1f} % slower than A" in opened.text("#compare")
    cells = opened.run(
        "return [...document.querySelectorAll('#waterfall tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    )
    *terms, total = cells
    assert total[0] == "step time"
    assert seconds(total[3]) == pytest.approx(y - x, rel=1e-3)
    assert sum(seconds(row[3]) for row in terms) == pytest.approx(y - x, rel=2e-3)  # each told to four digits
    for row in terms:
        name = next(t for t in TIME_TERMS if t.removesuffix("_s").replace("_", " ") == row[0])
        assert seconds(row[1]) == pytest.approx(front[name][a], rel=1e-3, abs=1e-9)
    differing = opened.text("#compare table").splitlines()
    names = {"recompute", "zero_stage", "pp", "dp", "layout", "num_micro_batches"}
    for name in names:
        differs = front[name][a] != front[name][b]
        assert any(line.startswith(name.replace("_", " ")) for line in differing) == differs, name
    opened.mouse("#over", *place_of(opened, b), click=True)  # without Shift it is looked at alone
    assert opened.run("return [state.a, state.b]") == [b, -1]


def seconds(text):
    if text == "-":
        return 0.0
    number, unit = text.replace("\u2212", "-").split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


def test_the_keyboard_alone_chooses_and_compares(opened, run):
    from selenium.webdriver.common.keys import Keys

    front = run.read_front()
    in_order = [int(i) for i in np.argsort(front["step_time_s"])]
    opened.press("#over", Keys.HOME)
    shown = opened.run("return state.hover")
    opened.press("#over", Keys.ENTER)
    assert opened.run("return state.a") == shown
    opened.press("#over", Keys.END)
    opened.press("#over", Keys.SHIFT + Keys.ENTER)
    assert opened.run("return [state.a, state.b]") == [shown, opened.run("return state.hover")]
    assert opened.run("return state.b") in (in_order[-1], len(front))  # the reference may be slower
    opened.press("#over", Keys.ESCAPE)
    assert opened.run("return [state.a, state.b, state.hover]") == [-1, -1, -1]
    assert "no point is chosen" in opened.text("#chosen")
    unnamed = opened.run(
        "return [...document.querySelectorAll('input, select, button, canvas:not([aria-hidden]), svg')].filter(e =>"
        "!(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent).map(e => e.outerHTML)"
    )
    assert unnamed == []


def test_a_condition_leaves_the_rows_for_which_it_holds(opened, run):
    front = run.read_front()
    for text, holds in {
        "pp == 16": front["pp"] == 16,
        "zero_stage <= 2 and pp != 16": (front["zero_stage"] <= 2) & (front["pp"] != 16),
        "recompute == full or zero_stage == 1": (front["recompute"] == "full") | (front["zero_stage"] == 1),
        "sequence_parallel == true": front["sequence_parallel"],
    }.items():
        opened.run("const f = document.getElementById('filter'); f.value = arguments[0];"
                   "f.dispatchEvent(new Event('input'))", text)  # fmt: skip
        assert opened.text("#shown").startswith(f"{int(np.sum(holds))} of {len(front)} points"), text
    for text, complaint in {
        "tq == 1": "no column is called tq",
        "pp ~ 3": "is no comparison",
        "pp == x": "a number",
    }.items():
        opened.run("const f = document.getElementById('filter'); f.value = arguments[0];"
                   "f.dispatchEvent(new Event('input'))", text)  # fmt: skip
        assert complaint in opened.text("#shown")
        assert opened.run("return document.getElementById('filter').getAttribute('aria-invalid')") == "true"


def test_axes_size_and_colour_may_be_any_column(opened):
    for key in ("x", "y", "size", "colour"):
        names = opened.run("return [...document.getElementById(arguments[0]).options].map(o => o.value)", key)
        assert len(names) > 25
        for name in names:
            opened.run("const s = document.getElementById(arguments[0]); s.value = arguments[1];"
                       "s.dispatchEvent(new Event('change'))", key, name)  # fmt: skip
    assert opened.complaints() == []


def test_the_treemap_fills_its_box_in_proportion_to_bytes(opened, run):
    detail = opened.run("return detailOf(state.a)")
    held = [sum(stage["memory"].values()) for stage in detail["stages"]]
    row = run.read_front().row(detail["row"])
    assert max(held) == pytest.approx(row["peak_memory_bytes"], rel=1e-9)
    boxes = opened.run(
        "return squarified([6, 6, 4, 3, 2, 2, 1].map(size => ({size})), 0, 0, 600, 400)"
        ".map(b => [b.size, b.width * b.height, b.x, b.y, b.width, b.height])"
    )
    assert [area / size for size, area, *_ in boxes] == pytest.approx([10000.0] * 7)
    assert all(x + w <= 600 + 1e-6 and y + h <= 400 + 1e-6 for _, _, x, y, w, h in boxes)
    ratios = [max(w / h, h / w) for *_, w, h in boxes]
    assert max(ratios[:6]) < 3.0


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp"])
def test_rank_groups_are_those_of_the_numbering(opened, order):
    """The oracle: ranks laid out in a grid by numpy, a group is what shares all other coordinates."""
    tp, cp, dp, pp, ep, etp = 2, 2, 8, 4, 8, 2
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    outer_first = order.split("-")[::-1]
    grid = np.arange(tp * cp * dp * pp).reshape([sizes[name] for name in outer_first])
    opened.run(
        "for (const [name, value] of Object.entries(arguments[0]))"
        " columns.set(name, {at: () => value, number: () => value})",
        {**sizes, "ep": ep, "etp": etp, "rank_order": order},
    )
    world = np.moveaxis(grid, outer_first.index("pp"), 0).reshape(pp, -1)  # of each stage, from the outside in
    experts = world.reshape(pp, -1, ep, etp)
    for rank in (0, 5, 77, grid.size - 1):
        found = opened.run("return groupsOf(0, arguments[0])", rank)
        place = [int(i[0]) for i in np.nonzero(grid == rank)]
        for axis, name in enumerate(outer_first):
            index = list(place)
            index[axis] = slice(None)
            assert found[name] == grid[tuple(index)].tolist(), (name, rank)
        stage, outside, _, inside = (int(i[0]) for i in np.nonzero(experts == rank))
        assert sorted(found["ep"]) == sorted(experts[stage, outside, :, inside].tolist())
    opened.run("document.documentElement.dataset.ready = 'no'")


def test_hues_stay_apart_for_the_colour_blind(opened):
    """Viénot, Brettel and Mollon 1999: what a deuteranope sees of each hue; shapes differ as well."""
    hues, shapes = opened.run("return [HUES, SHAPES]")
    assert len(set(shapes)) == len(hues)
    linear = np.array([[int(hue[i : i + 2], 16) / 255 for i in (1, 3, 5)] for hue in hues]) ** 2.2
    seen = linear @ np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]]).T
    shown = np.clip(seen, 0, 1) ** (1 / 2.2)
    apart = [np.linalg.norm(shown[i] - shown[j]) for i, j in itertools.combinations(range(len(hues)), 2)]
    assert min(apart) > 0.2


@pytest.mark.slow
def test_a_front_of_fifty_thousand_points_is_small_and_quick(browser, tmp_path):
    num = 50_000
    rng = np.random.default_rng(1)
    columns = {}
    for field in FRONT_FIELDS:
        if field.kind is Plain.FLOAT64:
            columns[field.name] = 10.0 ** rng.uniform(-2, 2, num)
    space = load_space("deepseek_v3")
    plain = strategy_columns(space.references["published"], dp=128.0)
    choices = {"tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8, 16), "ep": (8, 16, 32, 64), "zero_stage": (0, 1, 2, 3),
               "micro_batch": (1, 2, 4), "recompute": ("none", "full", "mlp", "moe"), "vpp": (1, 2, 4)}  # fmt: skip
    columns |= {name: [value[0]] * num if len(value) == 1 else value for name, value in plain.items()}
    columns |= {name: rng.choice(values, num).tolist() for name, values in choices.items()}
    columns |= {"id": rng.integers(0, 2**60, num), "system": ["dgx_h800"] * num, "num_micro_batches": [120] * num}
    columns["step_time_s"] = np.sort(10.0 ** rng.uniform(0, 2, num))
    columns["peak_memory_bytes"] = np.sort(10.0 ** rng.uniform(9, 11, num))[::-1]
    front = conform(columns, FRONT_FIELDS)
    facts = RunFacts(title="many", run="runs/many", about=[], systems={}, counts="", rejections=[], closest=[],
                     closest_note="", provenance=[])  # fmt: skip
    text = page_html(facts, front, front.take([]), ["step_time_s", "peak_memory_bytes"], [])
    assert len(text.encode()) < 15e6
    path = tmp_path / "many.html"
    path.write_text(text, encoding="utf-8")
    browser.open(path)
    paint = browser.run("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
    print(f"{len(text.encode()) / 1e6:.1f} MB, first paint after {paint:.0f} ms")
    assert paint < 3000.0
    assert browser.text("#shown") == f"{num} of {num} points of the front"
    browser.mouse("#over", *place_of(browser, num // 2))
    assert f"id {front['id'][num // 2]}" in browser.text("#tip") or "id " in browser.text("#tip")
    assert browser.complaints() == []


def test_details_stand_for_the_front_marked_points_first(run):
    space, front, reference = load_space("deepseek_v3"), run.read_front(), run.read_reference()
    details = details_of(space, front, reference, ["step_time_s", "peak_memory_bytes"])
    assert details[0].row == int(np.argmin(front["step_time_s"]))
    assert {detail.row for detail in details} == {*range(len(front)), len(front)}
    for detail in details:
        assert {shift.what for shift in detail.shifts} >= {"link of nvlink", "HBM bandwidth", "peak FLOP/s"}
        row = front.row(detail.row) if detail.row < len(front) else reference.row(0)
        faster = [s for s in detail.shifts if s.factor > 1]
        assert all(shift.step_time_s <= row["step_time_s"] for shift in faster)
        own = [shift for shift in detail.shifts if not shift.what.startswith("link")]
        assert all((s.step_time_s < row["step_time_s"]) == (s.factor > 1) for s in own)
