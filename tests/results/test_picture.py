"""Claims about the picture of a front: what it shows is read back from the figure's own pixels and labels."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from results.report import picture

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def figures(monkeypatch):
    """Figures that were drawn, kept when their PNG is written."""
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (drawn.append(self), save(self, *args, **kw)))
    return drawn


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_front_becomes_a_png_of_readable_size(make_front, tmp_path):
    path = tmp_path / "front.png"
    picture.save_front(path, make_front(5))
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1200, 750)


def test_axes_name_their_column_and_unit_and_the_reference_its_name(make_front, tmp_path, figures):
    reference = make_front(1, id=[-1], name=["published layout"])
    picture.save_front(tmp_path / "a.png", make_front(5), reference=reference, title="DeepSeek-V3")
    (axes,) = figures[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step time [s]", "device memory [GiB]")
    assert texts(axes) == ["published layout"]
    assert axes.get_title() == "DeepSeek-V3"


def test_memory_is_drawn_in_gib(make_front, tmp_path, figures):
    picture.save_front(tmp_path / "a.png", make_front(2, device_memory_bytes=[2.0**31, 2.0**30]))
    (axes,) = figures[0].axes
    assert axes.collections[0].get_offsets()[:, 1].tolist() == [2.0, 1.0]


def test_each_value_has_its_own_colour_and_shape(make_front, tmp_path, figures):
    front = make_front(8, pp=[1, 2, 4, 8, 16, 32, 64, 128])
    picture.save_front(tmp_path / "a.png", front)
    (axes,) = figures[0].axes
    assert len({tuple(c.get_facecolor()[0]) for c in axes.collections}) == 8
    assert len({c.get_paths()[0].vertices.tobytes() for c in axes.collections}) == 8
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["1", "2", "4", "8", "16", "32", "64", "128"]


def test_many_numbers_get_a_colour_bar_and_many_texts_a_legend(make_front, tmp_path, figures):
    picture.save_front(tmp_path / "a.png", make_front(9, dp=list(range(9))), colour="dp")
    picture.save_front(tmp_path / "b.png", make_front(9, recompute=[f"m{i}" for i in range(9)]), colour="recompute")
    assert len(figures[0].axes) == 2
    assert figures[0].axes[1].get_ylabel() == "dp"
    assert len(figures[1].axes[0].get_legend().get_texts()) == 9


def test_one_point_is_a_picture_and_no_point_is_an_error(make_front, tmp_path):
    picture.save_front(tmp_path / "one.png", make_front(1))
    with pytest.raises(ValueError, match="the front is empty"):
        picture.save_front(tmp_path / "none.png", make_front(0))
    assert [p.name for p in tmp_path.iterdir()] == ["one.png"]


def test_importing_the_picture_module_loads_no_matplotlib():
    code = "import sys, results.report.picture; print('matplotlib' in sys.modules, 'pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
