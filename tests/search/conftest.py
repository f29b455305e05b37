"""A command line to drive, a finished run to ask about, and a Ray cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from estimator.strategy import Recompute, Strategy
from results.schema import FRONT_FIELDS, conform
from results.store import RunFolder
from results.table import Table
from search.cli import main
from search.commands.point import Point
from search.space import Space, load_space


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of this process: a head with two CPUs, to which a test may add nodes."""
    before = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 200 * 1024**2})
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    os.environ.pop("RAY_AUTH_MODE")
    if before is not None:
        os.environ["RAY_AUTH_MODE"] = before


class Said(NamedTuple):
    """What a command line left behind."""

    code: int
    out: str
    err: str


Search = Callable[..., Said]


@pytest.fixture
def search(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Search:
    """Runs a command line in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEARCH_TRACEBACK", raising=False)

    def run(*words: str | Path) -> Said:
        capsys.readouterr()
        code = main([str(word) for word in words])
        said = Said(code, *capsys.readouterr())
        assert not said_twice(said.err), said.err
        return said

    return run


DETOUR = re.compile(r"(?:^|/)[^./\s][^/\s]*/\.\./")


def said_twice(text: str) -> list[str]:
    """Places that an error names again, `FILE: FILE: ...`, and paths that go in and out of a folder (`in/../out`)."""
    found = []
    for line in text.splitlines():
        heads = [head.partition(":")[0].strip() for head in line.removeprefix("search: ").split(": ")[:-1]]
        found += [head for i, head in enumerate(heads) if {"/", "."} & set(head) and head in heads[:i]]
        found += [word for word in line.split() if DETOUR.search(word)]
    return found


SMALL = "llama3_8b_small"


def price(space: Space, named: Iterable[tuple[int, str, Strategy]]) -> Table:
    """Strategies as rows of a front: (id, name, strategy)."""
    rows = []
    for number, name, strategy in named:
        point = Point(name=name, model=space.model, system=space.system, workload=space.workload, strategy=strategy)
        rows.append(point.row(point.evaluate()) | {"id": number})
    return conform({field.name: [row[field.name] for row in rows] for field in FRONT_FIELDS}, FRONT_FIELDS)


@pytest.fixture
def small_run(tmp_path: Path) -> RunFolder:
    """A finished run of the small space in runs/small: a front of three, one reference, two rules that rejected."""
    space = load_space(SMALL)
    base = Strategy(zero_stage=3)
    points = [
        base,
        replace(base, recompute=Recompute.parse("selective")),
        replace(base, recompute=Recompute.parse("full")),
    ]
    front = price(space, [(i * 7, "", point) for i, point in enumerate(points)])
    manifest: dict[str, Any] = {
        "state": "done",
        "counts": {"raw": space.raw_size, "legal": 1000, "fits": 900, "priced": 900, "front": 3},
        "seconds": {"sweep": 0.5, "total": 1.5},
    }
    folder = RunFolder.create(tmp_path / "runs" / "small", space.name, space.resolved_yaml(), manifest)
    folder.write_front(front.columns)
    folder.write_reference(price(space, [(-1, name, s) for name, s in space.references.items()]).columns)
    folder.write_rejections(
        [
            {"rule": "constraint", "count": 192, "example": "tp * pp <= 16"},
            {"rule": "memory", "count": 100, "example": "90 GiB of 76 GiB"},
        ]
    )
    folder.close()
    assert np.all(front["feasible"])
    return folder
