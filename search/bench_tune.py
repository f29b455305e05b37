"""Cases of `search bench` about tuning: a job of BERT-Base's size on 16 workers, and what each speed-up is worth."""

from __future__ import annotations

import time
from dataclasses import replace

from capture.traces.what_if import Change
from search.tuner.judge import SpeedUps
from search.tuner.subject import sized_subject
from search.tuner.tune import Options, tune

__all__ = ["tune_s"]

MODEL, WORKERS, BANDWIDTH = "bert_base", 16, 0.25  # of 100 Gbit/s: communication bounds


def tune_s(off: str = "") -> float:
    """A whole tuning, defaults and final replays included, loops compiled; without one speed-up, or with all."""
    subject = sized_subject(MODEL, Change(workers=WORKERS, bandwidth=BANDWIDTH))
    ups = replace(SpeedUps(), **{off: False}) if off else SpeedUps()
    tune(sized_subject("vgg16", Change(workers=2)), Options(ups=ups))
    start = time.perf_counter()
    tune(subject, Options(ups=ups))
    return time.perf_counter() - start
