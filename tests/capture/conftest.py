"""Where configs of small models lie while tests run."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where small configs lie; one for all tests, so that a model is captured once."""
    return tmp_path_factory.mktemp("configs")
