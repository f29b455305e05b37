"""A measured job with other modules computed again in the backward pass than were when it was recorded.

What runs again of a module are its forward operations but for the last, right before its first backward operation: the
backward pass needs what went into the last one, not what came out (torch stops there too). Each takes what it took in
the forward pass. Names are those of our own recorder: FW.module, BW.module.parameter, BW.again.module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from capture.traces.synthesise import Bucket, Job
from estimator.tasks import Category

__all__ = ["recomputed"]

FORWARD, BACKWARD, AGAIN = "FW.", "BW.", "BW.again."


def recomputed(job: Job, cut: Sequence[Bucket], modules: Sequence[str]) -> tuple[Job, list[Bucket]]:
    """The job and its buckets with just these modules computed again. ValueError where it has no such module."""
    before: dict[int, list[int]] = {}
    for module in modules:
        forward = [k for k, name in enumerate(job.names) if _within(name, FORWARD, module)]
        backward = [k for k, name in enumerate(job.names) if _within(name, BACKWARD, module)]
        if not forward or not backward:
            have = dict.fromkeys(name[len(FORWARD) :].partition(".")[0] for name in job.names if name[:3] == FORWARD)
            raise ValueError(
                f"a module that is computed again must have forward and backward operations, but {module!r} has not; "
                f"have {', '.join(have)}"
            )
        before.setdefault(backward[0], []).extend(forward[:-1])
    rows, again = list[int](), list[bool]()
    for k, name in enumerate(job.names):
        runs = [*before.get(k, []), *([] if name.startswith(AGAIN) else [k])]
        rows += runs
        again += [one != k for one in runs]
    place = {k: at for at, (k, repeats) in enumerate(zip(rows, again, strict=True)) if not repeats}
    chosen = np.array(rows)
    made = replace(
        job, seconds=job.seconds[:, chosen], lag_s=job.lag_s[:, chosen], waits=place.get(job.waits, len(rows)),
        names=tuple(f"{AGAIN}{job.names[k][len(FORWARD):]}" if a else job.names[k]
                    for k, a in zip(rows, again, strict=True)),
        category=tuple(Category.RECOMPUTE if a else job.category[k] for k, a in zip(rows, again, strict=True)),
        gradients=tuple(replace(gradient, op=place[gradient.op]) for gradient in job.gradients),
        keeps=None, frees=None, saves_s=None,
    )  # fmt: skip
    return made, [replace(bucket, op=place[bucket.op]) for bucket in cut]


def _within(name: str, kind: str, module: str) -> bool:
    if not name.startswith(kind) or name.startswith(AGAIN):
        return False
    bare = name[len(kind) :]
    return bare == module or bare.startswith(f"{module}.")
