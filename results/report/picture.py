"""A front as a PNG: two columns against each other, a third as colour. Needs the `report` extra (matplotlib)."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from estimator.result import column
from hardware.units import GIB
from results.colours import DISTINCT, RULE
from results.files import write_bytes
from results.pareto import non_dominated
from results.report.text import clip
from results.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["save_front"]

_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")  # repeat what the colours say
_LOG_FROM = 8.0  # a log axis from this ratio of largest to smallest on; below, its ticks are unreadable


def save_front(
    path: Path,
    front: Table,
    *,
    x: str = "step_time_s",
    y: str = "device_memory_bytes",
    colour: str = "pp",
    reference: Table | None = None,
    title: str = "",
) -> None:
    """Writes a picture of 1200 x 750 pixels. Up to eight values of `colour` get a legend, more numbers a colour bar."""
    if not len(front):
        raise ValueError(f"{path}: a picture needs at least one point, but the front is empty")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"{path}: pictures need matplotlib; pip install 'trainspace[report]'") from error
    figure = Figure(figsize=(12, 7.5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_staircase(axes, front, x, y)
    _draw_points(figure, axes, front, x, y, colour)
    if reference is not None:
        _draw_reference(axes, reference, x, y)
    _label(axes, x, "x", front)
    _label(axes, y, "y", front)
    axes.set_title(clip(title or f"{len(front)} points of the front", 90), fontsize=15)
    axes.grid(visible=True, color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title=colour, fontsize=12, title_fontsize=12)
    sink = io.BytesIO()
    figure.savefig(sink, format="png")
    write_bytes(Path(path), sink.getvalue())


def _draw_staircase(axes: Axes, front: Table, x: str, y: str) -> None:
    """The line below which nothing was found, for these two columns alone."""
    higher = [column(name).better == "higher" for name in (x, y)]
    across, upward = _shown(x, front[x]), _shown(y, front[y])
    kept = non_dominated(np.stack([across, upward], axis=1), np.arange(len(front)), higher)
    kept = kept[np.argsort(across[kept], kind="stable")]
    axes.step(across[kept], upward[kept], where="pre" if higher[0] else "post", color="#999999", linewidth=1.2)


def _draw_points(figure: Figure, axes: Axes, front: Table, x: str, y: str, colour: str) -> None:
    across, upward, groups = _shown(x, front[x]), _shown(y, front[y]), front[colour]
    values = sorted(set(groups.tolist()))
    if len(values) > len(DISTINCT) and groups.dtype.kind in "iuf":
        points = axes.scatter(across, upward, c=groups.astype(np.float64), cmap="cividis", s=42)
        figure.colorbar(points, ax=axes, label=colour)
        return
    styles = itertools.cycle(zip(DISTINCT, _SHAPES, strict=True))
    for value, (shade, shape) in zip(values, styles, strict=False):
        mask = groups == value
        label = clip(str(value), 40)
        axes.scatter(
            across[mask], upward[mask], color=shade, marker=shape, s=46, label=label, edgecolors="white", linewidths=0.4
        )


def _draw_reference(axes: Axes, reference: Table, x: str, y: str) -> None:
    for row in reference.rows():
        if not (np.isfinite(row[x]) and np.isfinite(row[y])):
            continue
        spot = (float(_shown(x, np.asarray([row[x]]))[0]), float(_shown(y, np.asarray([row[y]]))[0]))
        axes.scatter(*spot, marker="*", s=330, color="black", edgecolors="white", zorder=5)
        axes.annotate(clip(row["name"], 40), spot, xytext=(10, 10), textcoords="offset points", fontsize=13, zorder=6)


def _label(axes: Axes, name: str, side: Literal["x", "y"], front: Table) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = front[name]
    axis = axes.xaxis if side == "x" else axes.yaxis
    if values.min() > 0 and values.max() >= _LOG_FROM * values.min():
        (axes.set_xscale if side == "x" else axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    unit = "GiB" if name.endswith("_bytes") else column(name).unit
    words = name.removesuffix("_bytes").removesuffix("_s").replace("_", " ")
    axis.set_label_text(words + (f" [{unit}]" if unit != "1" else ""), fontsize=14)
    axes.tick_params(axis=side, labelsize=12)


def _shown(name: str, values: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64) / (GIB if name.endswith("_bytes") else 1.0)
