"""What the page of a run shows, as PNG files: one picture a part. Needs the `report` extra (matplotlib).

Draws what the page draws, from the same facts and details; works nothing out.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hardware.units import GIB, format_seconds
from results.colours import DISTINCT, ITEM_COLOURS, LINE, PASS_COLOURS, on
from results.files import as_user_error, write_bytes
from results.report.breakdown import TIME_TERMS
from results.report.gantt import LETTERS, WORDS
from results.report.picture import save_front
from results.report.rank_groups import draw_ranks
from results.report.run_page import Detail, RunFacts
from results.report.terminal import arithmetic
from results.report.text import clip
from results.report.treemap import squarified
from results.schema import STRATEGY_NAMES
from results.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["NAMES", "save_pictures"]

NAMES = ("front", "parallel", "waterfall", "memory", "treemap", "rejections", "pipeline", "sensitivity", "ranks")
FEW = 8  # values that an axis names one by one


def save_pictures(
    folder: Path, facts: RunFacts, front: Table, reference: Table, objectives: Sequence[str], details: Sequence[Detail]
) -> list[Path]:
    """Writes the pictures into a folder, which is made where it is missing; gives the files.

    Point pictures are of the first of `details`, its pipeline where it has one, else that of the first that has.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ValueError(f"{folder}: pictures need matplotlib; pip install 'trainspace[report]'") from error
    with as_user_error(folder, "make the folder"):
        folder.mkdir(parents=True, exist_ok=True)
    rows = Table(columns={name: np.concatenate([front[name], reference[name]]) for name in front.names})
    x, y = [*objectives, "peak_memory_bytes"][:2]
    save_front(folder / "front.png", front, x=x, y=y, reference=reference, title=facts.title)
    files = [folder / "front.png"]
    with mpl.rc_context({"font.size": 11}):
        for name, (size, draw) in _drawings(facts, front, rows, objectives, details).items():
            files.append(_save(folder / f"{name}.png", size, draw))
    return files


def _drawings(
    facts: RunFacts, front: Table, rows: Table, objectives: Sequence[str], details: Sequence[Detail]
) -> dict[str, tuple[tuple[float, float], Callable[[Figure], None]]]:
    """Each picture by its name: inches, and what draws it."""
    first = details[0]
    row = rows.row(first.row)
    head = _headed(row)
    drawn: dict[str, tuple[tuple[float, float], Callable[[Figure], None]]] = {
        "parallel": ((16, 6.5), lambda figure: _parallel(figure, front, objectives)),
        "waterfall": ((11, 6), lambda figure: _waterfall(figure, row, head)),
        "memory": ((12, 6), lambda figure: _memory(figure, first, head)),
        "treemap": ((11, 6), lambda figure: _treemap(figure, first, head)),
        "rejections": ((11, 5), lambda figure: _rejections(figure, facts)),
    }
    if (piped := next((detail for detail in details if detail.lane), None)) is not None:
        drawn["pipeline"] = ((14, 7), lambda figure: _pipeline(figure, piped, _headed(rows.row(piped.row))))
    if first.shifts:
        drawn["sensitivity"] = ((11, 5.5), lambda figure: _sensitivity(figure, first, row, head))
    if (system := facts.systems.get(str(row["system"]))) is not None:
        drawn["ranks"] = ((13, 8.5), lambda figure: _ranks(figure, row, system, head))
    return drawn


def _headed(row: Mapping[str, Any]) -> str:
    """A point's name and how its chips multiply out."""
    name = row["name"] or f"id {row['id']}"
    return clip(f"{name}: {arithmetic(row)}", 120)


def _save(path: Path, size: tuple[float, float], draw: Callable[[Figure], None]) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    sink = io.BytesIO()
    figure.savefig(sink, format="png")
    write_bytes(path, sink.getvalue())
    return path


def _words(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def _parallel(figure: Figure, front: Table, objectives: Sequence[str]) -> None:
    """Objectives and every choice that differs; numbers from least to most, log where they span a factor of three."""
    from matplotlib import colormaps

    asked = dict.fromkeys([*objectives, "num_gpus", "system", *STRATEGY_NAMES])
    names = [name for name in asked if len(np.unique(front[name])) > 1]
    axes = figure.subplots()
    spread = [_heights(front[name]) for name in names]
    shade = spread[0] if spread else np.zeros(len(front))
    faint = max(0.1, min(0.8, 60 / len(front)))
    for i, line in enumerate(np.stack(spread, axis=1) if spread else ()):
        axes.plot(line, color=colormaps["cividis"](float(shade[i])), alpha=faint)
    for place, name in enumerate(names):
        axes.axvline(place, color=LINE, linewidth=0.8)
        for height, text in _marks(name, front[name], spread[place]):
            axes.annotate(
                text, (place, height), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )  # fmt: skip
    axes.set_xticks(range(len(names)), [_words(name).replace(" ", "\n") for name in names], fontsize=9)
    axes.set_xlim(-0.3, len(names) - 0.2)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_title("every point of the front over what differs; bytes in GiB")


def _heights(values: NDArray[Any]) -> NDArray[np.float64]:
    """Where the values of a column lie on their axis, from 0 to 1; texts and switches in their order."""
    if values.dtype.kind not in "if":
        codes = np.unique(values.astype(str), return_inverse=True)[1].astype(np.float64)
        return np.asarray(codes / codes.max())
    numbers = values.astype(np.float64)
    numbers = np.log(numbers) if numbers.min() > 0 and numbers.max() > 3 * numbers.min() else numbers
    return np.asarray((numbers - numbers.min()) / np.ptp(numbers))


def _marks(name: str, values: NDArray[Any], heights: NDArray[np.float64]) -> list[tuple[float, str]]:
    """What an axis tells: each value where they are few, else the least and the most."""
    places = np.unique(heights, return_index=True)[1]
    if len(places) > FEW:
        places = places[[0, -1]]
    unit = GIB if name.endswith("_bytes") else 1.0
    return [
        (
            float(heights[i]),
            clip(f"{values[i] / unit:.4g}" if values.dtype.kind in "if" else str(values[i]).lower(), 16),
        )
        for i in places
    ]


def _waterfall(figure: Figure, row: Mapping[str, Any], head: str) -> None:
    axes = figure.subplots()
    axes.set_title(head, fontsize=10)
    step = float(row["step_time_s"])
    start, line = 0.0, 0
    names = [name for name in TIME_TERMS if abs(row[name]) > 1e-6 * step]
    for line, name in enumerate(names):
        seconds = float(row[name])
        hue = DISTINCT[1] if name.startswith("exposed") or name == "optimizer_comm_s" else DISTINCT[0]
        axes.barh(line, seconds, left=start, color=DISTINCT[5] if name == "bubble_s" else hue)
        axes.annotate(format_seconds(seconds), (start + max(seconds, 0.0), line), va="center", xytext=(4, 0),
                      textcoords="offset points")  # fmt: skip
        start += seconds
    axes.barh(line + 1, step, color=LINE)
    axes.set_yticks(range(len(names) + 1), [*map(_words, names), "step time"])
    axes.invert_yaxis()
    axes.set_xlim(0.0, step * 1.12)
    axes.set_xlabel("seconds of the rank that works most")


def _memory(figure: Figure, detail: Detail, head: str) -> None:
    axes = figure.subplots()
    axes.set_title(head, fontsize=10)
    below = np.zeros(len(detail.stages))
    for item, hue in ITEM_COLOURS.items():
        held = np.array([stage["memory"].get(item, 0.0) for stage in detail.stages]) / GIB
        if held.any():
            axes.bar(range(len(held)), held, bottom=below, color=hue, label=_words(item), edgecolor="white")
            below += held
    axes.axhline(detail.usable_bytes / GIB, color="black", linestyle="--", label="what a plan may fill")
    axes.set_xticks(range(len(detail.stages)), [str(stage["rank"]) for stage in detail.stages])
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("allocated GiB")
    figure.legend(loc="outside right upper", fontsize=9, reverse=True)


def _treemap(figure: Figure, detail: Detail, head: str) -> None:
    """What fills the fullest stage, areas in proportion to bytes."""
    from matplotlib.patches import Rectangle

    axes = figure.subplots()
    stage = max(detail.stages, key=lambda one: sum(one["memory"].values()))
    items = sorted(((n, x) for n, x in stage["memory"].items() if x > 0.0), key=lambda item: -item[1])
    whole = sum(nbytes for _, nbytes in items)
    width, height = 11.0, 5.2
    for (name, nbytes), box in zip(items, squarified([x for _, x in items], width, height), strict=True):
        hue = ITEM_COLOURS[name]
        axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, facecolor=hue, edgecolor="white", linewidth=2))
        told = f"{_words(name)}\n{nbytes / GIB:.4g} GiB, {nbytes / whole:.0%}"
        if box.width > 1.6 and box.height > 0.55:
            axes.text(box.x + 0.1, box.y + 0.1, told, va="top", fontsize=10, color=on(hue))
        else:
            axes.scatter([], [], c=hue, marker="s", label=told.replace("\n", " "))
    axes.set_xlim(0.0, width)
    axes.set_ylim(height, 0.0)
    axes.set_axis_off()
    axes.set_title(f"{head}\nstage {stage['rank']}, the fullest: {whole / GIB:.4g} GiB allocated", fontsize=10)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, fontsize=9)


def _pipeline(figure: Figure, detail: Detail, head: str) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    lane = detail.lane
    assert lane is not None
    top, strip = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    top.set_title(head, fontsize=10)
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    used = sorted({letter for row in lane.kinds for letter in row})
    for letter in used:
        boxes = [
            [(s, rank - 0.45), (e, rank - 0.45), (e, rank + 0.45), (s, rank + 0.45)]
            for rank, row in enumerate(lane.kinds)
            for kind, s, e in zip(row, lane.start[rank], lane.end[rank], strict=True) if kind == letter
        ]  # fmt: skip
        top.add_collection(PolyCollection(boxes, facecolors=PASS_COLOURS[kinds[letter]], edgecolors="white", lw=0.3))
    top.set_ylim(len(lane.kinds) - 0.5, -0.5)
    top.set_xlim(0.0, max(ends[-1] for ends in lane.end))
    top.set_yticks(range(0, len(lane.kinds), max(1, len(lane.kinds) // 16)))
    top.set_ylabel("rank")
    handles = [Patch(color=PASS_COLOURS[kinds[letter]], label=WORDS[kinds[letter]]) for letter in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(used))
    held = np.array(lane.held_bytes) / GIB
    strip.fill_between(lane.moments, held, step="post", color=LINE)
    strip.set_ylabel(f"GiB, rank {lane.worst}")
    strip.set_xlabel("seconds of a step's passes, without traffic; below: activations of the fullest rank")


def _ranks(figure: Figure, row: Mapping[str, Any], system: Mapping[str, Any], head: str) -> None:
    axes = figure.subplots()
    draw_ranks(axes, row, system)
    node, total = int(system["chips_per_node"]), math.prod(int(row[name]) for name in ("tp", "cp", "dp", "pp"))
    axes.set_title(f"{head}\n{total} chips of {row['system']}, {-(-total // node)} nodes of {node}", fontsize=10)


def _rejections(figure: Figure, facts: RunFacts) -> None:
    axes = figure.subplots()
    rows = sorted(facts.rejections, key=lambda one: one["count"])
    axes.barh([clip(_words(one["rule"]), 40) for one in rows], [one["count"] for one in rows], color=LINE)
    if rows:
        axes.set_xscale("log")
    axes.set_xlabel("candidates that the rule rejected")
    axes.set_title(clip(facts.counts, 110), fontsize=10)


def _sensitivity(figure: Figure, detail: Detail, row: Mapping[str, Any], head: str) -> None:
    """How much longer or shorter a step is with one number lower or higher, the widest span on top."""
    axes: Axes = figure.subplots()
    step = float(row["step_time_s"])
    change = {(one.what, one.factor): 100.0 * (one.step_time_s - step) / step for one in detail.shifts}
    widest: dict[str, float] = {}
    for (what, _), x in change.items():
        widest[what] = max(abs(x), widest.get(what, 0.0))
    names, reach = sorted(widest, key=widest.__getitem__), max(*widest.values(), 1e-6)
    for (what, factor), x in change.items():
        axes.barh(names.index(what), x, color=DISTINCT[5] if x > 0 else DISTINCT[0])
        axes.annotate(
            f"{100 * (factor - 1):+.0f} %: {x:+.1f} %", (x, names.index(what)), xytext=(4 if x >= 0 else -4, 0),
            textcoords="offset points", ha="left" if x >= 0 else "right", va="center", fontsize=9,
        )  # fmt: skip
    axes.set_xlim(-1.35 * reach, 1.35 * reach)
    axes.set_yticks(range(len(names)), names)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"step time against {step:.4g} s, %; beside each bar what was changed by how much")
    axes.set_title(head, fontsize=10)
