"""Claims about pictures of a run: treemaps, groups of ranks, and what each figure's own labels and patches say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from estimator.memory import ITEMS
from hardware.units import GIB
from results.colours import BLACK, ITEM_COLOURS, RULE
from results.report.rank_groups import GROUP_COLOURS, draw_ranks, groups_of, reach
from results.report.run_page import Detail, RunFacts, Shift
from results.report.run_pictures import NAMES, save_pictures
from results.report.treemap import squarified

TIERS = [{"name": "nvlink", "span": 8}, {"name": "ib", "span": 0}]
SYSTEM = {"chips_per_node": 8, "tiers": TIERS}


@pytest.fixture
def figures(monkeypatch):
    """Figures that were drawn, by the name of their file."""
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (drawn.append(self), save(self, *args, **kw)))
    return drawn


def test_a_treemap_is_that_of_its_paper():
    """Bruls, Huizing and van Wijk 2000, figure 4: 6, 6, 4, 3, 2, 2, 1 in a rectangle of 6 by 4."""
    boxes = squarified([6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0], 6.0, 4.0)
    assert boxes[:2] == [(0.0, 0.0, 3.0, 2.0), (0.0, 2.0, 3.0, 2.0)]
    assert boxes[2] == pytest.approx((3.0, 0.0, 12 / 7, 7 / 3))
    assert boxes[3] == pytest.approx((3.0 + 12 / 7, 0.0, 9 / 7, 7 / 3))
    assert boxes[4] == pytest.approx((3.0, 7 / 3, 1.2, 5 / 3))
    assert boxes[6] == pytest.approx((5.4, 7 / 3, 0.6, 5 / 3))


@pytest.mark.parametrize("seed", range(5))
def test_rectangles_of_a_treemap_fill_the_whole_and_do_not_overlap(seed):
    rng = np.random.default_rng(seed)
    sizes = sorted(rng.exponential(size=12).tolist(), reverse=True)
    boxes = squarified(sizes, 11.0, 5.0)
    assert [b.width * b.height for b in boxes] == pytest.approx([55.0 * size / sum(sizes) for size in sizes])
    for a, b in itertools.combinations(boxes, 2):
        across = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
        along = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
        assert min(across, along) < 1e-9
    assert all(b.x + b.width < 11.0 + 1e-9 and b.y + b.height < 5.0 + 1e-9 for b in boxes)
    for bad in ([1.0, 2.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="positive, largest first"):
            squarified(bad, 1.0, 1.0)


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp"])
def test_rank_groups_are_those_of_the_numbering(order):
    """The oracle: ranks laid out in a grid by numpy, a group is what shares all other coordinates."""
    row = {"tp": 2, "cp": 2, "dp": 8, "pp": 4, "ep": 8, "etp": 2, "rank_order": order}
    outer_first = order.split("-")[::-1]
    grid = np.arange(2 * 2 * 8 * 4).reshape([row[name] for name in outer_first])
    experts = np.moveaxis(grid, outer_first.index("pp"), 0).reshape(4, -1, 8, 2)
    for rank in range(grid.size):
        found = groups_of(row, rank)
        place = [int(i[0]) for i in np.nonzero(grid == rank)]
        for axis, name in enumerate(outer_first):
            index = [*place]
            index[axis] = slice(None)
            assert found[name].tolist() == grid[tuple(index)].tolist(), (name, rank)
        stage, outside, _, inside = (int(i[0]) for i in np.nonzero(experts == rank))
        assert sorted(found["ep"].tolist()) == sorted(experts[stage, outside, :, inside].tolist())


def test_a_group_reaches_the_innermost_links_that_hold_it():
    assert [reach(np.array(ranks), TIERS) for ranks in ([3], [0, 7], [7, 8], [8, 15])] == ["", "nvlink", "ib", "nvlink"]


def test_ranks_are_drawn_on_their_nodes():
    from matplotlib.colors import to_rgba
    from matplotlib.figure import Figure

    row = {"tp": 2, "cp": 1, "dp": 4, "pp": 4, "ep": 4, "etp": 1, "rank_order": "tp-cp-dp-pp"}
    axes = Figure().subplots()
    draw_ranks(axes, row, SYSTEM)
    chips, nodes = axes.collections[:2]
    assert (len(chips.get_paths()), len(nodes.get_paths())) == (32, 4)
    hues = [BLACK, GROUP_COLOURS["tp"], GROUP_COLOURS["ep"], GROUP_COLOURS["ep"], GROUP_COLOURS["dp"], RULE]
    hues += [GROUP_COLOURS["dp"], RULE, GROUP_COLOURS["pp"]]
    assert [tuple(hue) for hue in chips.get_facecolor()[:9]] == [to_rgba(hue) for hue in hues]
    for rank, chip in enumerate(chips.get_paths()):  # each inside the box of its own node alone
        centre = chip.vertices[:4].mean(axis=0)
        assert [box.contains_point(centre) for box in nodes.get_paths()] == [n == rank // 8 for n in range(4)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "tp 2, over nvlink", "ep 4, over nvlink", "pp 4, over ib, 4 nodes", "dp 4, over nvlink",
    ]  # fmt: skip


def test_every_item_of_memory_has_a_colour_of_its_own():
    assert set(ITEM_COLOURS) == set(ITEMS)
    assert len(set(ITEM_COLOURS.values())) == len(ITEMS)


def test_pictures_are_of_the_first_detail_and_say_of_which_point(make_front, tmp_path, figures):
    front = make_front(3, tp=[1, 2, 4], schedule=["1f1b", "gpipe", "1f1b"], sequence_parallel=[True, False, True])
    memory = {"weights": 10.0 * GIB, "activations": 4.0 * GIB, "logits": 2.0 * GIB, "buckets": 0.0}
    stages = [{"rank": i, "layers": [4], "forward_s": 1.0, "backward_s": 2.0, "memory": memory} for i in range(2)]
    step = float(front["step_time_s"][1])
    shifts = [
        Shift(what=what, factor=factor, step_time_s=step / factor**power, peak_memory_bytes=1e9, feasible=True)
        for what, power in (("HBM bandwidth", 0.1), ("peak FLOP/s", 0.6))
        for factor in (0.8, 1.2)
    ]
    detail = Detail(row=1, finishing_rank=0, usable_bytes=60.0 * GIB, stages=stages, shifts=shifts)
    facts = RunFacts(
        title="mine", run="runs/mine", about=[], systems={str(front["system"][1]): SYSTEM}, counts="", closest=[],
        rejections=[{"rule": "memory", "count": 5, "example": ""}], closest_note="", provenance=[],
    )  # fmt: skip
    files = save_pictures(tmp_path, facts, front, front.take([]), ["step_time_s", "peak_memory_bytes"], [detail])
    by_name = dict(zip((file.stem for file in files), figures, strict=True))
    assert set(by_name) == set(NAMES) - {"pipeline"}
    for name in ("waterfall", "memory", "treemap", "sensitivity", "ranks"):
        assert f"id {front['id'][1]}: " in by_name[name].axes[0].get_title(), name
    treemap = by_name["treemap"].axes[0]
    areas = [patch.get_width() * patch.get_height() for patch in treemap.patches]
    assert [area / sum(areas) for area in areas] == pytest.approx([10 / 16, 4 / 16, 2 / 16])
    assert treemap.texts[0].get_text() == "weights\n10 GiB, 62%"
    told = [text.get_text() for text in by_name["sensitivity"].axes[0].texts]
    assert "-20 %: +14.3 %" in told  # 0.8 ** -0.6
    assert by_name["sensitivity"].axes[0].get_yticklabels()[-1].get_text() == "peak FLOP/s"
    parallel = by_name["parallel"].axes[0]
    names = [label.get_text().replace("\n", " ") for label in parallel.get_xticklabels()]
    assert {"tp", "schedule", "sequence parallel"} <= set(names)
    assert {"1f1b", "gpipe", "true", "false"} <= {text.get_text() for text in parallel.texts}
