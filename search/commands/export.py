"""`search export`: a configuration as a launch file of a training framework."""

from __future__ import annotations

import argparse

from results.launchers import Job, write_launch_file
from search.commands.answer import answer, check_writable, tell
from search.commands.point import Point, read_point
from search.idle import launchable
from search.launch_files import job_of, refusal

__all__ = ["job_of_point", "run"]


def run(args: argparse.Namespace) -> int:
    """Writes the file; ValueError for what is illegal, or what the framework cannot say and no note excuses."""
    if args.output is not None:
        check_writable(args, args.output)
    point = read_point(args.config, args.reference, args.overrides)
    try:
        point = point.settled()
        if illegal := refusal(point.model, point.strategy, point.system, point.workload):
            raise ValueError(illegal)
    except ValueError as error:
        raise ValueError(f"{args.config}: {error}") from error
    text = write_launch_file(job_of_point(point), args.to)
    notes = [line.partition("note: ")[2] for line in text.splitlines() if line.startswith("# note: ")]
    tell(*point.notices)
    answer(args, text=text, data={"framework": args.to, "name": point.name, "notes": notes, "file": text})
    if not args.json:
        tell(*(f"note: {note}" for note in notes))
    return 0


def job_of_point(point: Point) -> Job:
    """The point as a job, without options that mean nothing where they stand."""
    strategy = launchable(point.model, point.strategy, point.system)
    return job_of(point.name, point.model, strategy, point.system, point.workload)
