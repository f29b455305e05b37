"""Which branches of a shell script run, as far as its own words decide it: `if` with `[ ... ]`, `&&` and `||`.

Bodies of loops and of `case` stay undecided, but for a `while` that is never entered; so does a condition that asks
for the environment or for files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from results.launchers.open_words import open_names

__all__ = ["BRANCHING", "Branches", "Truth"]

BRANCHING = frozenset({
    "if", "then", "else", "elif", "fi", "for", "while", "until", "case", "select", "do", "done", "esac",
})  # fmt: skip
_COMPARED: dict[str, Callable[[str, str], bool]] = {
    "=": str.__eq__, "==": str.__eq__, "!=": str.__ne__,
    "-eq": lambda a, b: int(a) == int(b), "-ne": lambda a, b: int(a) != int(b), "-gt": lambda a, b: int(a) > int(b),
    "-ge": lambda a, b: int(a) >= int(b), "-lt": lambda a, b: int(a) < int(b), "-le": lambda a, b: int(a) <= int(b),
}  # fmt: skip


class Truth(Enum):
    """What is known of a condition, or of whether a statement runs."""

    YES = "yes"
    NO = "no"
    OPEN = "open"


class Branches:
    """The branches around a statement, innermost last: what is known of each, and of what is left for the next."""

    __slots__ = ("_asked", "_stack", "asks")

    def __init__(self) -> None:
        self._stack: list[tuple[Truth, Truth]] = []
        self._asked: list[tuple[Truth, str]] = []
        self.asks = False  # whether the statements at hand are a condition

    @property
    def state(self) -> Truth:
        """Whether a statement here runs."""
        found = Truth.YES
        for state, _ in self._stack:
            found = _both(found, state)
        return found

    def enter(self, word: str) -> None:
        """What a word of the shell's grammar changes; others change nothing."""
        if word == "if":
            self._stack.append((Truth.YES, Truth.YES))
        if word in {"if", "elif"}:
            self._asked, self.asks = [], True
        elif word == "then" and self._stack:
            _, left = self._stack[-1]
            answer = self._answer()
            self._stack[-1] = (_both(left, answer), _both(left, _NOT[answer]))
            self.asks = False
        elif word == "else" and self._stack:
            _, left = self._stack[-1]
            self._stack[-1] = (left, Truth.NO)
        elif word in {"while", "until"}:
            self._stack.append((Truth.YES, Truth.OPEN))
            self._asked, self.asks = [], True
        elif word == "do" and self._stack and self.asks:
            never = self._answer() is Truth.NO  # a loop that runs may run again
            self._stack[-1] = (Truth.NO if never else Truth.OPEN, Truth.OPEN)
            self.asks = False
        elif word in {"for", "case", "select"}:
            self._stack.append((Truth.OPEN, Truth.OPEN))
        elif word in {"fi", "done", "esac"} and self._stack:
            self._stack.pop()

    def ask(self, words: Sequence[str], joined: str) -> None:
        """One test of a condition, and how the next is joined to it."""
        self._asked.append((_tested(words), joined))

    def _answer(self) -> Truth:
        found, how = Truth.OPEN, ""
        for truth, joined in self._asked:
            if how == "||":
                truth = _NOT[_both(_NOT[found], _NOT[truth])]
            elif how == "&&":
                truth = _both(found, truth)
            found, how = truth, joined
        return found


_NOT = {Truth.YES: Truth.NO, Truth.NO: Truth.YES, Truth.OPEN: Truth.OPEN}


def _both(one: Truth, other: Truth) -> Truth:
    return Truth.NO if Truth.NO in (one, other) else Truth.OPEN if Truth.OPEN in (one, other) else Truth.YES


def _tested(words: Sequence[str]) -> Truth:
    """What `[ ... ]` or `[[ ... ]]` comes to; open where a word is, or where it asks for files.

    >>> _tested(["[", "8", "-gt", "1", "]"]), _tested(["[[", "!", "-z", "x", "]]"])
    (<Truth.YES: 'yes'>, <Truth.YES: 'yes'>)
    """
    if len(words) < 3 or words[0] not in {"[", "[["} or any(map(open_names, words)):
        return Truth.OPEN
    inner = [*words[1:-1]]
    turned = inner[:1] == ["!"]
    inner = inner[turned:]
    try:
        if len(inner) == 3 and inner[1] in _COMPARED and not set(inner[2]) & set("*?["):
            holds = _COMPARED[inner[1]](inner[0], inner[2])
        elif len(inner) == 2 and inner[0] in {"-n", "-z"}:
            holds = (inner[1] != "") == (inner[0] == "-n")
        elif len(inner) == 1:
            holds = inner[0] != ""
        else:
            return Truth.OPEN
    except ValueError:  # a comparison of numbers that are none
        return Truth.OPEN
    return Truth.YES if holds != turned else Truth.NO
