"""What the page of a run shows, as PNG files: one picture a part. Needs the `report` extra (matplotlib).

Draws what the page draws, from the same facts and details; works nothing out.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from estimator.memory import ITEMS
from hardware.units import GIB
from results.colours import BLACK, DISTINCT, LINE, MANY, PASS_COLOURS, RULE
from results.files import as_user_error, write_bytes
from results.report.breakdown import TIME_TERMS
from results.report.gantt import LETTERS, WORDS
from results.report.picture import save_front
from results.report.run_page import Detail, RunFacts
from results.report.text import clip
from results.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["save_pictures"]

PARALLEL = ("num_gpus", "tp", "cp", "pp", "dp", "ep", "vpp", "micro_batch", "zero_stage")


def save_pictures(
    folder: Path, facts: RunFacts, front: Table, reference: Table, objectives: Sequence[str], details: Sequence[Detail]
) -> list[Path]:
    """Writes the pictures into a folder, which is made where it is missing; gives the files.

    Point pictures are of the first of `details`, the pipeline of the first that has one.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ValueError(f"{folder}: pictures need matplotlib; pip install 'trainspace[report]'") from error
    with as_user_error(folder, "make the folder"):
        folder.mkdir(parents=True, exist_ok=True)
    rows = Table(columns={name: np.concatenate([front[name], reference[name]]) for name in front.names})
    first = details[0]
    x, y = [*objectives, "peak_memory_bytes"][:2]
    save_front(folder / "front.png", front, x=x, y=y, reference=reference, title=facts.title)
    drawn: dict[str, tuple[tuple[float, float], Callable[[Figure], None]]] = {
        "parallel": ((14, 6), lambda figure: _parallel(figure, front, objectives)),
        "waterfall": ((11, 6), lambda figure: _waterfall(figure, rows, first.row)),
        "memory": ((11, 6), lambda figure: _memory(figure, first)),
        "rejections": ((11, 5), lambda figure: _rejections(figure, facts)),
    }
    if any(detail.lane for detail in details):
        piped = next(detail for detail in details if detail.lane)
        drawn["pipeline"] = ((14, 7), lambda figure: _pipeline(figure, piped))
    if first.shifts:
        drawn["sensitivity"] = ((10, 5), lambda figure: _sensitivity(figure, first, rows))
    system = facts.systems.get(str(rows["system"][first.row]))
    if system is not None:
        drawn["ranks"] = ((12, 8), lambda figure: _ranks(figure, rows.row(first.row), int(system["chips_per_node"])))
    files = [folder / "front.png"]
    with mpl.rc_context({"font.size": 11}):
        for name, (size, draw) in drawn.items():
            files.append(_save(folder / f"{name}.png", size, draw))
    return files


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
    """Each column from its least to its most, log where it spans a factor of three."""
    names = [n for n in dict.fromkeys([*objectives, *PARALLEL]) if len(np.unique(front[n])) > 1]
    axes = figure.subplots()
    heights = []
    for name in names:
        values = front[name].astype(np.float64)
        values = np.log(values) if values.min() > 0 and values.max() > 3 * values.min() else values
        heights.append((values - values.min()) / (np.ptp(values) or 1.0))
    shade = heights[0] if heights else np.zeros(len(front))
    from matplotlib import colormaps

    for i, line in enumerate(np.stack(heights, axis=1) if heights else ()):
        axes.plot(line, color=colormaps["cividis"](float(shade[i])), alpha=max(0.1, min(0.8, 60 / len(front))))
    for place, name in enumerate(names):
        axes.axvline(place, color=LINE, linewidth=0.8)
        low, high = front[name].min(), front[name].max()
        scale = GIB if name.endswith("_bytes") else 1.0
        axes.annotate(f"{high / scale:.4g}", (place, 1.02), ha="center")
        axes.annotate(f"{low / scale:.4g}", (place, -0.06), ha="center")
    axes.set_xticks(range(len(names)), [_words(name) for name in names])
    axes.set_yticks([])
    axes.set_title("every point of the front over what differs; bytes in GiB")


def _waterfall(figure: Figure, rows: Table, place: int) -> None:
    axes = figure.subplots()
    step = float(rows["step_time_s"][place])
    start, line = 0.0, 0
    names = [name for name in TIME_TERMS if abs(rows[name][place]) > 1e-6 * step]
    for line, name in enumerate(names):
        seconds = float(rows[name][place])
        hue = DISTINCT[1] if name.startswith("exposed") or name == "optimizer_comm_s" else DISTINCT[0]
        axes.barh(line, seconds, left=start, color=DISTINCT[5] if name == "bubble_s" else hue)
        axes.annotate(f"{seconds:.4g} s", (start + max(seconds, 0.0), line), va="center", xytext=(4, 0),
                      textcoords="offset points")  # fmt: skip
        start += seconds
    axes.barh(line + 1, step, color=LINE)
    axes.set_yticks(range(len(names) + 1), [*map(_words, names), "step time"])
    axes.invert_yaxis()
    axes.set_xlim(0.0, step * 1.12)
    axes.set_xlabel("seconds of the rank that works most")


def _memory(figure: Figure, detail: Detail) -> None:
    axes = figure.subplots()
    below = np.zeros(len(detail.stages))
    for item, hue in zip(ITEMS, MANY, strict=False):
        held = np.array([stage["memory"].get(item, 0.0) for stage in detail.stages]) / GIB
        if held.any():
            axes.bar(range(len(held)), held, bottom=below, color=hue, label=_words(item), edgecolor="white")
            below += held
    axes.axhline(detail.usable_bytes / GIB, color="black", linestyle="--", label="what a plan may fill")
    axes.set_xticks(range(len(detail.stages)), [str(stage["rank"]) for stage in detail.stages])
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("allocated GiB")
    axes.legend(ncols=2, fontsize=9)


def _pipeline(figure: Figure, detail: Detail) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    lane = detail.lane
    assert lane is not None
    top, strip = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
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


def _ranks(figure: Figure, row: dict[str, object], chips_per_node: int) -> None:
    """Nodes as rows of chips; the groups of rank 0 in colour."""
    axes = figure.subplots()
    sizes = {name: int(str(row[name])) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
    total = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
    order = str(row["rank_order"]).split("-")
    hues = dict(zip(("dp", "pp", "cp", "tp"), (DISTINCT[4], DISTINCT[1], DISTINCT[3], DISTINCT[5]), strict=True))
    colour = np.full(total, RULE, dtype=object)
    for name, hue in hues.items():
        stride = int(np.prod([sizes[inner] for inner in order[: order.index(name)]], dtype=np.int64))
        if sizes[name] > 1:
            colour[stride * np.arange(sizes[name])] = hue
    colour[0] = BLACK
    nodes = -(-total // chips_per_node)
    across = max(1, int(np.ceil(np.sqrt(nodes * 2.0 / chips_per_node)))) if chips_per_node < nodes else 1
    rank = np.arange(total)
    node, chip = rank // chips_per_node, rank % chips_per_node
    x = (node % across) * (chips_per_node + 1) + chip
    axes.scatter(x, node // across, c=colour.tolist(), marker="s", s=max(2.0, 40_000.0 / max(total, 400)))
    for name, hue in hues.items():
        if sizes[name] > 1:
            axes.scatter([], [], c=hue, marker="s", label=f"{name} {sizes[name]}")
    axes.invert_yaxis()
    axes.set_axis_off()
    axes.legend(title="groups of rank 0 (black)", loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4)
    axes.set_title(f"{total} chips, nodes of {chips_per_node}")


def _rejections(figure: Figure, facts: RunFacts) -> None:
    axes = figure.subplots()
    rows = sorted(facts.rejections, key=lambda one: one["count"])
    axes.barh([clip(_words(one["rule"]), 40) for one in rows], [one["count"] for one in rows], color=LINE)
    if rows:
        axes.set_xscale("log")
    axes.set_xlabel("candidates that the rule rejected")
    axes.set_title(clip(facts.counts, 110), fontsize=10)


def _sensitivity(figure: Figure, detail: Detail, rows: Table) -> None:
    axes: Axes = figure.subplots()
    step = float(rows["step_time_s"][detail.row])
    names = list(dict.fromkeys(shift.what for shift in detail.shifts))
    for shift in detail.shifts:
        change = 100.0 * (shift.step_time_s - step) / step
        hue = DISTINCT[5] if change > 0 else DISTINCT[0]
        axes.barh(names.index(shift.what), change, color=hue, label=f"{100 * (shift.factor - 1):+.0f} %")
    axes.set_yticks(range(len(names)), names)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"step time against {step:.4g} s, %, with one thing 20 % up or down")
