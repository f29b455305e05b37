"""docs/schedules.md tells what the orders do."""

import pytest

from estimator.strategy import Schedule
from tests.schedules import STATED, rewritten, simulated


def test_the_page_has_every_schedule_as_it_is_simulated(root):
    """Where this fails, `python -m tests.schedules` rewrites the table."""
    text = (root / "docs" / "schedules.md").read_text(encoding="utf-8")
    assert rewritten(text) == text
    assert set(STATED) == set(Schedule)


@pytest.mark.parametrize("schedule", Schedule)
def test_papers_state_what_is_simulated(schedule):
    said, (span, own, held) = STATED[schedule], simulated(schedule)
    assert held <= said.held_at
    if said.bubble_at is not None:  # "about" leaves half a pass open
        assert own == pytest.approx(said.bubble_at, abs=0.5)
        assert span >= own
