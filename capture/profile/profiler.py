"""Records what a torch training loop does: `with profile("folder"): ...` around it, or around a part of it.

An iteration ends when the optimizer that stepped first has stepped, or with `p.iteration()` where the loop says so
itself. Models are found when they are called and marked then (hooks.py); DistributedDataParallel's buckets are recorded
by a communication hook, unless another one is in use already: that is wrapped where it is registered inside of the
block. What is recorded stands in docs/traces.md. Refuses a folder that has this rank's recording already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.profile.buckets import observe
from capture.profile.hooks import Mark, Marks
from capture.profile.lifetimes import told_lives
from capture.profile.machine import machine_id
from capture.profile.memory import Watch
from capture.profile.probe import ping_pong
from capture.profile.recorder import WARM_UP, Recorder, running

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Profile", "profile"]

PROBE_TIMEOUT_S = 10.0


@contextlib.contextmanager
def profile(
    folder: str | Path, *, warm_up: int = WARM_UP, machine: str | None = None, topology: str = "unknown",
    memory: bool = True,
) -> Iterator[Profile]:  # fmt: skip
    """Records the loop inside of the block into `folder/rankN.jsonl`; all ranks enter and leave together.

    warm_up: iterations at the start that are not written. machine: what the clock belongs to, unless it is this host.
    topology: how gradients travel, where the loop knows ("ring", "parameter_server"). memory: the last iteration
    that is not written is watched for what it allocates.
    """
    found = Profile(Path(folder), warm_up=warm_up, machine=machine, topology=topology, memory=memory)
    found.start()
    try:
        yield found
    except BaseException:
        found.stop(together=False)
        raise
    found.stop()


class Profile:
    """A recording. recorder: its events. `start` and `stop` are what `profile` calls.

    times: of iterations only, to compare with. memory: one iteration is watched for what it allocates.
    """

    def __init__(
        self, folder: Path, *, warm_up: int = WARM_UP, machine: str | None = None, topology: str = "unknown",
        times: bool = False, memory: bool = True,
    ) -> None:  # fmt: skip
        import torch.distributed as dist

        self.times, self.memory = times, memory
        self.parallel = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if self.parallel else (0, 1)
        meta = {"rank": rank, "world": world, "machine": machine or machine_id(), "topology": topology,
                "job": folder.resolve().name, "recorder": "trainspace"}  # fmt: skip
        self.recorder = Recorder(folder / f"rank{rank}.jsonl", meta, warm_up=warm_up)
        self.loss, self.update = Mark(self.recorder, "FW.loss", "FW"), Mark(self.recorder, "UPD", "UPD")
        self.held: list[Mark] = []
        self.watch: Watch | None = None
        self.models: list[Marks] = []
        self.known: set[int] = set()  # modules of these
        self.explicit = False
        self.leader: int | None = None  # the optimizer that ends iterations
        self.undo: list[Callable[[], None]] = []
        self.group: Any = None
        self.looking: Any = None  # the hook that finds models

    def start(self) -> None:
        """Hooks in, and compares clocks."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        handles = [register_optimizer_step_post_hook(self._after_update)]
        if not self.times:
            self._probe("start")
            self.looking = torch.nn.modules.module.register_module_forward_pre_hook(self._called)
            handles += [self.looking, register_optimizer_step_pre_hook(self._before_update)]
            self._wrap_backward()
            running.append(self.recorder)
        self.undo += [handle.remove for handle in handles]
        self.recorder.begin()

    def stop(self, *, together: bool = True) -> None:
        """Takes all hooks off and closes the file. together: all ranks do, so clocks are compared once more."""
        for undo in (*self.undo, *(marks.remove for marks in self.models)):
            undo()
        self.undo.clear()
        if together and not self.times:
            self._probe("end")
        self.recorder.close()
        if self.recorder in running:
            running.remove(self.recorder)

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """An iteration of the loop, where the optimizer's step is not its end."""
        self.explicit = True
        self.recorder.begin()
        self._begun()
        yield
        self._ended()

    def _begun(self) -> None:
        """What lies there is told when an iteration begins."""
        for mark in self.held:
            mark.begins()

    def _watch_memory(self) -> None:
        """Of the last iteration for warming up, which is not the first: the optimizer has its state."""
        if self.recorder.iteration == self.recorder.warm_up - 1 > 0:
            self.watch = Watch(self.recorder)
            self.watch.start()
            self.recorder.begin()
        elif self.watch is not None:
            marks = [self.loss, *(mark for model in self.models for mark in model.marks)]
            self.held = told_lives(self.recorder, self.watch.stop(), marks, self.update)
            self.watch = None
            self.recorder.begin()

    def attach(self, model: nn.Module) -> None:
        """Marks a model, once. One that is called is found by itself."""
        import torch

        inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        if id(inner) in self.known:
            return
        marks = Marks(self.recorder, inner)
        self.models.append(marks)
        self.known.update(map(id, (model, *inner.modules())))
        if inner is not model:
            observe(model, self.recorder, marks.names)

    def _called(self, module: nn.Module, _: object) -> None:
        """The first module that is called is the model; what it calls is inside of it."""
        import torch

        if id(module) not in self.known and torch.is_grad_enabled():
            self.attach(module)

    def _before_update(self, *_: object) -> None:
        self.recorder.at = self.recorder.clock()

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self.times:
            self.update()
        if self.leader is None:
            self.leader = id(optimizer)
        if not self.explicit and self.leader == id(optimizer):
            self._ended()

    def _ended(self) -> None:
        self.recorder.end()
        if not self.times and self.memory:
            self._watch_memory()
        self._begun()
        if self.models:
            self.looking.remove()  # a hook of every module is dear; after an iteration all models are known

    def _wrap_backward(self) -> None:
        """Backward passes begin and end where autograd says so."""
        import torch

        before = torch.autograd.backward

        def backward(*args: Any, **options: Any) -> None:  # noqa: ANN401 - autograd's own
            self.loss()
            for one in self.models:
                one.backward = True
            try:
                before(*args, **options)
            finally:
                for one in self.models:
                    one.backward = False

        def undo() -> None:
            torch.autograd.backward = before

        torch.autograd.backward = backward
        self.undo.append(undo)

    def _probe(self, when: str) -> None:
        """Ping-pongs over gloo, on a group of its own that does not wait long for a rank that is gone.

        Where one is gone, clocks are not compared: a recording of what ran is worth more than its clock.
        """
        import datetime

        import torch.distributed as dist

        if not self.parallel:
            return
        held = len(self.recorder.events)
        try:
            if self.group is None:
                self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=PROBE_TIMEOUT_S))
            ping_pong(self.recorder, self.group, when)
        except RuntimeError:
            del self.recorder.events[held:]
