"""Words that a script does not determine: a mark with the name of the variable that would."""

from __future__ import annotations

__all__ = ["mark", "open_names"]

_MARK = "\0"  # no text file holds it


def mark(name: str) -> str:
    """The word that stands for what is not determined."""
    return f"{_MARK}{name}{_MARK}"


def open_names(word: str) -> list[str]:
    """Variables that a word needs and the script does not determine.

    >>> open_names(mark("TP") + "0")
    ['TP']
    """
    return word.split(_MARK)[1::2]
