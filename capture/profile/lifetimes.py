"""Puts what a watched iteration showed of memory onto the marks of those that follow.

A mark keeps the bytes that live on after it until the mark with which most of them end. Gradients, whose bytes are told
anyway, and what lies there when an iteration begins end with its update, or with the mark that was seen to end it. What
is there beside all that where memory is fullest, such as what one backward operation needs at once, is scratch of its
mark. So every iteration tells the same three operations more: two of what is held, one of scratch.
"""

from __future__ import annotations

from collections.abc import Sequence

from capture.profile.hooks import Mark
from capture.profile.memory import Lives
from capture.profile.recorder import Recorder, line

__all__ = ["told_lives"]


def told_lives(recorder: Recorder, lives: Lives, marks: Sequence[Mark], update: Mark) -> list[Mark]:
    """Changes the marks; gives those of what is held, which are to be told when an iteration begins."""
    by_text = {mark.text: mark for mark in (*marks, update)}
    places = {text: k for k, text in reversed([*enumerate(lives.texts)])}
    last = len(lives.texts)
    modelled = [0] * (last + 1)

    def alive(nbytes: int, begin: int, end: int) -> None:
        for k in range(begin, min(end, last) + 1):
            modelled[k] += nbytes

    for text, ends in lives.born.items():
        mark = by_text.get(text)
        if mark is None or "tensor" in mark.fields or mark is update:
            continue
        end = max(ends, key=lambda k: (ends[k], k))
        mark.keeps(sum(ends.values()))
        _ending(lives, by_text, end, update).ends(mark)
        alive(sum(ends.values()), places[text], end)
    for mark in marks:
        if "tensor" in mark.fields and mark.text in places:
            mark.keeps()
            update.ends(mark)
            alive(int(str(mark.fields["bytes"])), places[mark.text], last)
    held = [Mark(recorder, f"HELD.{name}", "COMP") for name in ("kept", "freed")]
    freed_at = max((k for k in lives.held if k < last), key=lives.held.__getitem__, default=last)
    freed = lives.held.get(freed_at, 0) if freed_at < last else 0
    kept = sum(lives.held.values()) - freed
    for mark, nbytes, end in zip(held, (kept, freed), (last, freed_at), strict=True):
        mark.keeps(nbytes)
        _ending(lives, by_text, end, update).ends(mark)
        alive(nbytes, 0, end)
    top = max(range(last), key=lives.curve.__getitem__)
    fullest = _ending(lives, by_text, top, update)
    if not fullest.full:
        fullest.keeps()
    beside = lives.curve[top] - modelled[places.get(fullest.text, top)]
    fullest.scratch = line("SCRATCH", "COMP", bytes=max(0, beside))
    return held


def _ending(lives: Lives, by_text: dict[str, Mark], end: int, update: Mark) -> Mark:
    """The mark at a place, or the first marked one after it; the update where none is."""
    return next((by_text[text] for text in lives.texts[end:] if text in by_text), update)
