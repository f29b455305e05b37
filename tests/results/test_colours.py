"""Colours are told apart with any common colour vision, and stand in one table."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from estimator.part import Part
from estimator.schedule import Kind
from results.colours import MANY, PART_COLOURS, PASS_COLOURS, on

# Machado, Oliveira and Fernandes 2009, doi:10.1109/TVCG.2009.113, severity 1, on linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])
APART = 16.0  # CIE 1976: seven times what an eye tells apart side by side (2.3); Okabe and Ito's own come to 17


def linear(colour):
    levels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = TO_XYZ @ rgb / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISIONS)
def test_any_two_parts_are_told_apart(vision):
    seen = {p: lab(np.clip(np.array(VISIONS[vision]) @ linear(c), 0, 1)) for p, c in PART_COLOURS.items()}
    for a, b in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > APART, (a, b)


def test_every_part_and_every_pass_has_a_colour_of_its_own():
    assert set(PART_COLOURS) == set(Part)
    assert set(PASS_COLOURS) == set(Kind)
    assert len(set(PART_COLOURS.values())) == len(Part)
    assert len(set(MANY)) == len(MANY) == 16


@pytest.mark.parametrize("fill", PART_COLOURS.values())
def test_text_is_read_on_every_part(fill):
    luminances = [np.array([0.2126, 0.7152, 0.0722]) @ linear(colour) for colour in (fill, on(fill))]
    assert (max(luminances) + 0.05) / (min(luminances) + 0.05) > 4.5  # WCAG 2.2, level AA


def test_colours_stand_in_one_file(root):
    hues = re.compile(r"#(?![0-9A-Fa-f]*([0-9A-Fa-f])\1{5}\b)[0-9A-Fa-f]{6}\b")  # greys of frames and rules apart
    found = {
        path.relative_to(root).as_posix()
        for package in ("results", "search", "estimator", "capture")
        for path in (root / package).rglob("*.py")
        if hues.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"results/colours.py"}


def test_the_scripts_of_a_page_have_no_colours_of_their_own_but_a_ramp(root):
    """They take those of the table with their data (results/report/run_page.py)."""
    hues = re.compile(r"#(?![0-9A-Fa-f]*([0-9A-Fa-f])\1{5}\b)[0-9A-Fa-f]{6}\b")
    scripts = sorted((root / "results" / "report" / "page").glob("*.js"))
    lines = [line for path in scripts for line in path.read_text(encoding="utf-8").splitlines() if hues.search(line)]
    assert [line.partition(" = ")[0] for line in lines] == ["const RAMP"]
    page = (root / "results" / "report" / "run_page.py").read_text(encoding="utf-8")
    assert "list(STROKES)" in page
    assert "PASS_COLOURS.items()" in page
