"""Fixtures and markers of all tests: where the shared material lies, and when a test may skip."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# No deadline: the first example of a jitted function compiles it. In CI, the same examples every time.
settings.register_profile("trainspace", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("trainspace")


TOGETHER = {
    "ray": ("test_pool.py", "test_launch.py", "test_resume.py", "test_study_resume.py", "test_launch_many.py"),
    "sweeps": ("test_shipped_spaces.py", "test_readme.py", "test_sweep.py", "test_structures.py"),
}
"""Files that one process of pytest-xdist takes: Ray wants both cores, and sweeps are made once a process."""
GROUP_OF = {name: group for group, names in TOGETHER.items() for name in names}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps a file together, for its fixtures, where several processes share the tests (`-n 2 --dist loadgroup`)."""
    if config.getoption("dist", "no") != "no":
        for item in items:
            item.add_marker(pytest.mark.xdist_group(GROUP_OF.get(item.path.name, item.path.stem)))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared material beside the checkout."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("../shared is absent")
    return folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips by marker what this machine cannot run."""
    if item.get_closest_marker("gpu") and shutil.which("nvidia-smi") is None:
        pytest.skip("no GPU")
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")
