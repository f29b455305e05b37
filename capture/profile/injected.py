"""Records a script that nobody edited, from inside of its Python: what `search trace record` puts into it.

Loaded at start by a `sitecustomize` on PYTHONPATH, waits until the script imports torch, and profiles it then: from
`init_process_group` on, or, where one process trains alone, from its first backward pass. A process that never trains
writes nothing. With `times` only the seconds of iterations are recorded, to compare with. How a rank ended stands
beside its recording, so that the one that died can be told from those that it took along.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "STATE", "TIMES", "install"]

FOLDER, TIMES = "TRAINSPACE_RECORD", "TRAINSPACE_RECORD_TIMES"
STATE = ".state.json"
TORCH = "torch"


def install() -> None:
    """Waits for torch, where the environment names a folder."""
    if os.environ.get(FOLDER):
        sys.meta_path.insert(0, _AfterTorch())


class _AfterTorch(MetaPathFinder):
    """Finds torch as everybody does, and hooks in once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of torch itself only."""
        if fullname != TORCH:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, _Session().hook_in)
        return spec


def _call_after(loader: Loader, then: Callable[[], None]) -> None:
    load: Callable[[types.ModuleType], None] = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        load(module)
        then()

    loader.exec_module = exec_module  # type: ignore[method-assign]


class _Session:
    """The recording of this process, once there is one."""

    def __init__(self) -> None:
        self.folder = Path(os.environ[FOLDER])
        self.times = bool(os.environ.get(TIMES))
        self.profile: Any = None
        self.state: Path | None = None
        self.error = ""

    def hook_in(self) -> None:
        """Starts with the process group, or with the first backward pass."""
        import torch
        import torch.distributed as dist

        backward = torch.autograd.backward

        def first(*args: Any, **options: Any) -> None:  # noqa: ANN401 - autograd's own
            torch.autograd.backward = backward
            self.start()
            torch.autograd.backward(*args, **options)

        torch.autograd.backward = first
        if not dist.is_available():
            return
        begin, end = dist.init_process_group, dist.destroy_process_group

        def init_process_group(*args: Any, **options: Any) -> None:  # noqa: ANN401 - torch's own
            begin(*args, **options)
            torch.autograd.backward = backward
            self.start()

        def destroy_process_group(*args: Any, **options: Any) -> None:  # noqa: ANN401 - torch's own
            self.stop(together=True)
            end(*args, **options)

        dist.init_process_group, dist.destroy_process_group = init_process_group, destroy_process_group

    def start(self) -> None:
        """Once."""
        if self.profile is not None:
            return
        from capture.profile.profiler import Profile
        from capture.profile.recorder import WARM_UP

        self.profile = Profile(self.folder, warm_up=WARM_UP, times=self.times)
        self.state = self.profile.recorder.path.with_suffix(STATE)
        self._tell("running")
        before = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
            self.error = f"{kind.__name__}: {' '.join(str(error).split())}"
            before(kind, error, trace)

        sys.excepthook = excepthook
        atexit.register(self.stop)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
        self.profile.start()

    def _terminated(self, number: int, _: types.FrameType | None) -> None:
        """A launcher ends the ranks that are left when one died: what was recorded is written, and then it ends."""
        self.error = "terminated"
        self.stop()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def stop(self, *, together: bool = False) -> None:
        """At the end of the process group, or of the process; a forked child has nothing to end."""
        if self.profile is None or self.state is None or os.getpid() != self.profile.recorder.pid:
            return
        if self.profile.recorder.file is not None:
            self.profile.stop(together=together)
        self._tell(self.error if self.error == "terminated" else "failed" if self.error else "ended")

    def _tell(self, how: str) -> None:
        assert self.state is not None
        now = {"how": how, "error": self.error, "pid": os.getpid(), "ns": time.time_ns()}
        self.state.write_text(json.dumps(now), encoding="utf-8")
