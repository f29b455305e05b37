"""What the tests of the test bed share: namespaces where root may make them, and whether the machine is quiet."""

from __future__ import annotations

import os

import pytest

from capture.testbed.network import Network, no_network

QUIET = 1.0  # processes that run or wait, per core: above, what is measured is the machine's other work


@pytest.fixture(scope="session")
def may_network():
    """Skips where this machine can have no namespaces."""
    if (reason := no_network()) is not None:
        pytest.skip(f"needs root: {reason}")


@pytest.fixture
def pair(may_network):
    """Two ranks at 1 Gbit/s."""
    with Network(2, 1e9) as network:
        yield network


@pytest.fixture
def quiet():
    """Skips where others work on this machine."""
    if os.getloadavg()[0] > QUIET * (os.cpu_count() or 1):
        pytest.skip("not a quiet machine")
