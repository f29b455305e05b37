"""Ranks of one machine on links of their own: a network namespace each, joined by a bridge, with a limit of rate.

Every link is limited both ways (a token bucket at each end), as a full-duplex port of a switch is. The namespaces have
no names: each lives as long as a process that reads from this one, so that the kernel takes all of it back when this
process ends, however it ends. What runs inside is killed with this process. Needs root, and says so; delays no packet
and loses none (neither netem nor fq is everywhere).

A rank has one core, with all its threads, and goes ahead of whatever else the machine does (niceness, of its session
as well): without, one that shares a core with somebody's compiler takes ten times as long. What is left of others shows
in the load. More ranks than cores share them, and what they do is bound by that, not by links.

TCP is set as clusters set it: Reno, whose window does not fall while a link idles between iterations (the machine's own
choice may be one that probes and paces), and jumbo frames.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

__all__ = ["INTERFACE", "Network", "no_network", "require_network"]

INTERFACE = "eth0"
MTU = 9000
BURST = "64kb"  # one segment as the kernel hands it down (64 KiB at most): less would be cut up, more runs ahead
QUEUE = "4mb"  # more than any window grows to, so that nothing is dropped
SUBNET = "10.97.0"
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "taskset")
MOST_RANKS = 64
SETTINGS = {
    "/proc/sys/net/ipv4/tcp_congestion_control": "reno",
    "/proc/sys/net/ipv4/tcp_slow_start_after_idle": "0",
    "/proc/sys/net/ipv6/conf/all/disable_ipv6": "1",
}
FIRST = "-20"  # of two that want a core, one that is nice by -20 has it for 99 % of the time (sched(7))
GRACE_S = 10.0  # in which a process that was told to end ends


def no_network() -> str | None:
    """Why this machine can have no such network; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root, but this is user " + str(os.geteuid()) + "; run it as root"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"network namespaces need {', '.join(TOOLS)}, but {lacking[0]} is missing; install iproute2, util-linux"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return (
            f"network namespaces need root that may make them, but {tried.stderr.strip()}; run it outside of a sandbox"
        )
    return None


def require_network() -> None:
    """ValueError with the reason where this machine can have no such network."""
    if (reason := no_network()) is not None:
        raise ValueError(reason)


class Network:
    """A context: `ranks` namespaces whose links carry `bits_per_s` each way."""

    def __init__(self, ranks: int, bits_per_s: float) -> None:
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"ranks must be 1 to {MOST_RANKS}, but are {ranks}; give such as 2")
        if not 1e6 <= bits_per_s <= 1e11:
            raise ValueError(f"a link must carry 1e6 to 1e11 bits a second, but is to carry {bits_per_s:g}; give 1e9")
        self.ranks, self.bits_per_s = ranks, bits_per_s
        self.holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        require_network()
        try:
            for _ in range(self.ranks + 1):
                self.holders.append(_held())
            self._join()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the namespaces: the kernel removes each with its links once nothing runs in it."""
        for holder in self.holders:
            holder.communicate(timeout=GRACE_S)
        self.holders = []

    def address(self, rank: int) -> str:
        """Of a rank, on the bridge."""
        return f"{SUBNET}.{rank + 1}"

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in a rank's namespace, and is killed with this process."""
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={self._place(rank)}", *command]

    def start(
        self, rank: int, command: Sequence[str], *, env: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] = subprocess.DEVNULL, stderr: int | IO[bytes] = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """A process of a rank, ahead of all others of this machine; its output goes nowhere unless told."""
        core = str(rank % (os.cpu_count() or 1))
        first = ["taskset", "--cpu-list", core, "nice", "-n", FIRST, *command]
        process = subprocess.Popen(
            self.command(rank, first), env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
        with suppress(OSError):  # no such file where the kernel does not group by session: then `nice` is enough
            Path(f"/proc/{process.pid}/autogroup").write_text(FIRST, encoding="ascii")
        return process

    def limit(self, bits_per_s: float) -> None:
        """Gives all links another rate, at once."""
        self.bits_per_s = bits_per_s
        for rank in range(self.ranks):
            self._tc(rank, INTERFACE, "change")
            self._tc(self.ranks, f"rank{rank}", "change")

    def measured_bits_per_s(self, source: int, target: int, nbytes: int = 40_000_000) -> float:
        """Of payload from one rank to another over one connection, once its window has grown."""
        port = "5201"
        gauge = [sys.executable, str(Path(__file__).with_name("gauge.py"))]
        receiver = self.start(target, [*gauge, "receive", self.address(target), port], stdout=subprocess.PIPE)
        sender = self.start(source, [*gauge, "send", self.address(target), port, str(nbytes)])
        out, _ = receiver.communicate(timeout=60.0 + 16.0 * nbytes / self.bits_per_s)
        sender.wait(timeout=GRACE_S)
        return float(out)

    def _place(self, node: int) -> str:
        return f"/proc/{self.holders[node].pid}/ns/net"

    def _inside(self, node: int, command: Sequence[str], text: str = "") -> None:
        done = subprocess.run(
            ["nsenter", f"--net={self._place(node)}", *command], input=text, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(f"a test bed needs `{' '.join(command)}`, but {done.stderr.strip()}; see that root may")

    def _join(self) -> None:
        """The last namespace holds the bridge; one end of each pair of devices lies there, the other with its rank."""
        bridge = self.ranks
        lines = [f"link add bridge0 mtu {MTU} type bridge", "link set bridge0 up"]
        for rank in range(self.ranks):
            peer = f"peer name {INTERFACE} mtu {MTU} netns {self.holders[rank].pid}"
            lines += [f"link add rank{rank} mtu {MTU} type veth {peer}", f"link set rank{rank} master bridge0 up"]
        self._inside(bridge, ["ip", "-batch", "-"], "\n".join(lines) + "\n")
        written = "; ".join(f"[ ! -e {path} ] || echo {value} > {path}" for path, value in SETTINGS.items())
        for rank in range(self.ranks):
            self._inside(rank, ["sh", "-c", written])
            lines = ["link set lo up", f"addr add {self.address(rank)}/24 dev {INTERFACE}", f"link set {INTERFACE} up"]
            self._inside(rank, ["ip", "-batch", "-"], "\n".join(lines) + "\n")
            self._tc(rank, INTERFACE, "add")
            self._tc(bridge, f"rank{rank}", "add")

    def _tc(self, node: int, device: str, verb: str) -> None:
        rate = f"{self.bits_per_s:.0f}bit"
        self._inside(node, ["tc", "qdisc", verb, "dev", device, "root", "tbf", "rate", rate, "burst", BURST, "limit",
                            QUEUE])  # fmt: skip


def _held() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own, which ends when this one closes its input, or ends."""
    holder = subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    holder.stdin.write(b".")
    if holder.stdout.read(1) != b".":  # cat answers from within
        raise ValueError(
            f"a test bed needs network namespaces, but {holder.stderr.read().decode().strip()}; run as root"
        )
    return holder
