"""Runs a command whose Python processes record themselves, and tells what each rank left. Loads no torch.

The command runs as it is, with a folder on its PYTHONPATH that holds a `sitecustomize` (injected.py); one that the
command has already is run as well. A rank that died is told by what it left: one that was killed left no word, one that
failed left its error, and of several the first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from capture.profile.injected import FOLDER, STATE, TIMES

__all__ = ["Launched", "RankFile", "check_folder", "launch"]

SITE = '''"""Records this process (search trace record), and then does what another sitecustomize of the path does."""

import importlib.machinery
import importlib.util
import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
try:
    import capture.profile.injected as injected
except ImportError:
    sys.path.append({root!r})
    import capture.profile.injected as injected
injected.install()
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if spec is not None and spec.loader is not None:
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """What a rank left. iteration_s: seconds of each. events: by category. ns: when it last told how it stands.

    how: "ended", "failed", "terminated", "running" (where it was killed).
    """

    rank: int
    world: int
    path: Path
    iteration_s: tuple[float, ...]
    events: dict[str, int]
    how: str
    error: str
    ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """How a command ended, and its ranks' files in order."""

    code: int
    ranks: tuple[RankFile, ...]

    @property
    def dead(self) -> RankFile | None:
        """The rank that died first: one that was killed, else the first that failed; its launcher ended the others."""
        dead = [one for one in self.ranks if one.how != "ended"]
        return min(dead, key=lambda one: (("running", "failed", "terminated").index(one.how), one.ns), default=None)


def check_folder(folder: Path) -> None:
    """ValueError where recordings cannot be put there, or something lies there already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{folder}: must be a new or empty folder, for no recording replaces another; give one with -o"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{folder}: cannot write there: {error.strerror}; give another folder with -o") from error


def launch(command: Sequence[str], folder: Path, *, times: bool = False, output: int | None = None) -> Launched:
    """Runs the command to its end. times: record seconds of iterations only. output: the file that it prints to."""
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as site:
        Path(site, "sitecustomize.py").write_text(SITE.format(root=str(root)), encoding="utf-8")
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, FOLDER: str(folder.resolve())} | ({TIMES: "1"} if times else {})
        try:
            process = subprocess.Popen(list(command), env=environment, stdout=output)
        except OSError as error:
            raise ValueError(f"{command[0]}: cannot run: {error.strerror}; give a command after --") from error
        code = _to_its_end(process)
    sys.stdout.flush()
    return Launched(code=code, ranks=tuple(_rank_files(folder)))


def _to_its_end(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. What asks this process to end asks the command instead, so that its ranks are told of."""
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _rank_files(folder: Path) -> list[RankFile]:
    found = []
    for state in sorted(folder.glob(f"rank*{STATE}"), key=lambda path: int(path.name[4:].partition(".")[0])):
        told = json.loads(state.read_text(encoding="utf-8"))
        state.unlink()
        path = state.with_name(state.name.removesuffix(STATE) + ".jsonl")
        meta, seconds, events = _read(path)
        found.append(RankFile(
            rank=int(state.name[4:].partition(".")[0]), world=meta.get("world", 0), path=path, iteration_s=seconds,
            events=events, how=told["how"], error=told["error"], ns=told["ns"],
        ))  # fmt: skip
        if path.exists() and not path.stat().st_size:
            path.unlink()  # it died before it had anything to tell
    return found


def _read(path: Path) -> tuple[dict[str, int], tuple[float, ...], dict[str, int]]:
    """World, seconds of iterations, events by category; of a file that is cut short its whole lines."""
    if not path.exists():
        return {}, (), {}
    meta: dict[str, int] = {}
    seconds, events = [], Counter[str]()
    with path.open(encoding="utf-8") as lines:
        for text in lines:
            if not text.endswith("\n"):
                break
            line = json.loads(text)
            if "meta" in line:
                meta = line["meta"]
                continue
            if line["it"] >= 0:
                events[line["cat"]] += 1
            if line["cat"] == "ITER":
                seconds.append((line["end"] - line["ts"]) / 1e9)
    return meta, tuple(seconds), dict(events)
