"""How many GPUs a launch command starts: torchrun, srun, sbatch, the deepspeed launcher. Guesses nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from results.launchers.open_words import open_names

__all__ = ["World", "read_world"]

_NODES = frozenset({"--nnodes", "--nodes", "-N", "--num_nodes", "--num-nodes"})
_EACH = frozenset({
    "--nproc_per_node", "--nproc-per-node", "--ntasks-per-node", "--gpus-per-node", "--num_gpus", "--num-gpus",
    "--gpus-per-task", "--gres",
})  # fmt: skip
_ALL = frozenset({"-n", "--ntasks", "-G", "--gpus", "-np"})
_TORCHRUN = re.compile(r"(torchrun|torch\.distributed\.(run|launch)|deepspeed)$")
_DIRECTIVE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)


class World:
    """GPUs as far as a command says; `why` says what it leaves open."""

    __slots__ = ("assumed", "num_chips", "why")

    def __init__(self, num_chips: int | None, why: str = "", assumed: tuple[str, ...] = ()) -> None:
        self.num_chips, self.why, self.assumed = num_chips, why, assumed


def read_world(words: Sequence[str], script: str) -> World:
    """From the words before the program's own arguments, and the #SBATCH lines of the script.

    >>> read_world(["torchrun", "--nproc_per_node", "8", "--nnodes=4", "x.py"], "").num_chips
    32
    """
    found: dict[str, str] = {}
    directives = [w for line in _DIRECTIVE.findall(script) for w in line.split("#")[0].split()]
    for given in (directives, words):  # the command goes before the directives
        for name, value in _options(given):
            kind = "nodes" if name in _NODES else "each" if name in _EACH else "all" if name in _ALL else ""
            if kind:
                found[kind] = value.rpartition(":")[2]  # --nnodes 4:8 is elastic: the most; --gres gpu:8
    open_ones = [name for value in found.values() for name in open_names(value)]
    if open_ones:
        return World(None, f"the launcher needs ${open_ones[0]}, which the script does not set")
    numbers = {kind: int(value) for kind, value in found.items() if value.isdecimal() and int(value) > 0}
    if "each" in numbers:
        nodes = numbers.get("nodes")
        if nodes is None and "all" in numbers and "each" in numbers:
            return World(numbers["all"])
        if nodes is None:
            is_single = any(_TORCHRUN.search(word) for word in words)
            if not is_single:
                return World(None, "the file says how many GPUs a node has, but not how many nodes there are")
            return World(numbers["each"], assumed=("nodes=1: the launcher's default",))
        return World(nodes * numbers["each"])
    if "all" in numbers:
        return World(numbers["all"])
    return World(None, "the file does not say how many GPUs it runs on")


def _options(words: Sequence[str]) -> list[tuple[str, str]]:
    """Options with their values, written `--a b`, `--a=b` or `-Nb`."""
    found = []
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals:
            found.append((name, value))
        elif re.fullmatch(r"-[NnG]\d+", word):
            found.append((word[:2], word[2:]))
        elif word.startswith("-") and i + 1 < len(words):
            found.append((word, words[i + 1]))
    return found
