"""Ranks have namespaces of their own with limited links, and nothing of them is left, however a run ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from capture.testbed.network import INTERFACE, Network

HELD = """
import sys
from capture.testbed.network import Network

with Network(2, 1e9) as network:
    inside = network.start(0, ["sleep", "1000"])
    print(*(holder.pid for holder in network.holders), inside.pid, flush=True)
    sys.stdin.read()
"""


def namespace(pid):
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def namespaces_in_use():
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            found.add(namespace(pid))
        except OSError:  # it has ended meanwhile
            continue
    return found


def inside(network, rank, *command):
    done = subprocess.run(network.command(rank, command), capture_output=True, text=True, check=True)
    return done.stdout


def test_ranks_have_namespaces_of_their_own_and_the_host_sees_no_device(pair):
    spaces = {namespace(holder.pid) for holder in pair.holders}
    assert len(spaces) == 3  # two ranks and the bridge
    assert namespace(os.getpid()) not in spaces
    assert INTERFACE in inside(pair, 0, "ip", "-brief", "link")
    assert pair.address(0) in inside(pair, 0, "ip", "-brief", "address")
    assert pair.address(0) not in subprocess.run(["ip", "-brief", "address"], capture_output=True, text=True).stdout


def test_nothing_is_left_behind_the_context(may_network):
    with Network(3, 4e8) as network:
        spaces = {namespace(holder.pid) for holder in network.holders}
        assert spaces <= namespaces_in_use()
    assert not spaces & namespaces_in_use()


def test_nothing_is_left_when_the_body_fails(may_network):
    spaces = set()

    def broken():
        with Network(2, 1e9) as network:
            spaces.update(namespace(holder.pid) for holder in network.holders)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        broken()
    assert spaces
    assert not spaces & namespaces_in_use()


def test_a_killed_run_leaves_neither_processes_nor_namespaces(may_network, root):
    run = subprocess.Popen([sys.executable, "-c", HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                           cwd=root)  # fmt: skip
    pids = [int(word) for word in run.stdout.readline().split()]
    ends = [os.pidfd_open(pid) for pid in pids]
    spaces = {namespace(pid) for pid in pids[:3]}
    run.send_signal(signal.SIGKILL)
    run.communicate()
    for end in ends:
        assert select.select([end], [], [], 10.0)[0], "a process of the killed run goes on"
        os.close(end)
    assert len(spaces) == 3
    assert not spaces & namespaces_in_use()


@pytest.mark.parametrize("bits_per_s", [1e9, 4e8])
def test_a_link_never_carries_more_than_its_limit(pair, bits_per_s):
    pair.limit(bits_per_s)
    assert pair.measured_bits_per_s(0, 1, 20_000_000) < 1.02 * bits_per_s


@pytest.mark.parametrize("bits_per_s", [1e9, 4e8])
def test_a_link_carries_what_it_is_said_to(pair, quiet, bits_per_s):
    pair.limit(bits_per_s)
    found = [pair.measured_bits_per_s(*ends) for ends in ((0, 1), (1, 0), (0, 1))]
    assert sorted(found)[1] == pytest.approx(bits_per_s, rel=0.05)  # headers take 0.7 %


@pytest.mark.parametrize(
    ("ranks", "bits_per_s", "words"),
    [(0, 1e9, "ranks must be 1 to 64, but are 0"), (65, 1e9, "but are 65"), (2, 0.0, "1e6 to 1e11 bits a second")],
)
def test_a_network_that_cannot_be_is_refused(ranks, bits_per_s, words):
    with pytest.raises(ValueError, match=words):
        Network(ranks, bits_per_s)
