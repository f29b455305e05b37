"""Compiled code never outlives its sources."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from estimator.jit import cache_folder

PRINTS_A_COST = """
from estimator.chunk import beside
print(beside(2.0, 1.0))
"""


def test_the_cache_follows_every_compiled_module(tmp_path, root):
    for room in ("estimator", "search"):
        shutil.copytree(root / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    before = cache_folder(tmp_path)
    assert cache_folder(tmp_path) == before
    callee = tmp_path / "search" / "staircase.py"
    callee.write_text(callee.read_text() + "\n# another version\n")
    assert cache_folder(tmp_path) != before
    aside = tmp_path / "search" / "launch.py"  # nothing compiled imports it
    now = cache_folder(tmp_path)
    aside.write_text(aside.read_text() + "\n# another version\n")
    assert cache_folder(tmp_path) == now


def test_a_folder_of_ones_own_is_used_and_an_unwritable_install_falls_back_to_the_users_cache(tmp_path, monkeypatch):
    (tmp_path / "estimator").mkdir()
    assert cache_folder(tmp_path, str(tmp_path / "mine")).parent == tmp_path / "mine"
    assert cache_folder(tmp_path).parent == tmp_path / "estimator" / "__pycache__"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache_folder(tmp_path).parent == tmp_path / "home" / ".cache" / "trainspace"


def test_a_constant_of_another_file_reaches_cached_code(tmp_path, root):
    """`beside` lives in chunk.py and uses SLOWDOWN of cost/overlap.py: numba itself would not notice the change."""
    for room in ("estimator", "hardware"):
        shutil.copytree(root / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))

    def cost() -> float:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        environment.pop("NUMBA_CACHE_DIR", None)
        run = [sys.executable, "-P", "-c", PRINTS_A_COST]
        return float(
            subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        )

    overlap = tmp_path / "estimator" / "cost" / "overlap.py"
    first = cost()
    overlap.write_text(overlap.read_text().replace("SLOWDOWN = 0.15", "SLOWDOWN = 0.25"))
    assert (first, cost()) == (2.15, 2.25)
