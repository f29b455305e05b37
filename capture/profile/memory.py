"""What tensors an iteration makes, how long they live, and what the allocator has meanwhile, from one iteration.

In the iteration before the first that is written every operation of torch is seen (a dispatch mode), and with it each
storage: between which marks it is born, and between which it dies. From then on a mark tells the bytes that live on
after it and, as dependencies, whose bytes end with it, so that a replay can count them. Beside that, and not from it:
samples of what the allocator has handed out, after every operation, added to what lay there when the iteration began.

On CPUs the allocator is that of the C library, where it has `mallinfo2`; otherwise there are no samples. Knows nothing
of what an operation needs only while it runs, but for the samples.
"""

from __future__ import annotations

import ctypes
import gc
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capture.profile.recorder import Event, Recorder, line

if TYPE_CHECKING:
    import torch

__all__ = ["Lives", "Watch", "allocated"]

SAMPLE = line("allocated", "MEM", tail=',"bytes":%d')
OUTSIDE = -1


@dataclass(frozen=True, slots=True)
class Lives:
    """What was seen. texts [K]: marks in order. curve [K]: most bytes before each, since the mark before.

    born: by the mark after which bytes live on and by the place of the mark with which they end, K where none does.
    held: what lay there at the beginning, by that place.
    """

    texts: list[str]
    curve: list[int]
    born: dict[str, dict[int, int]]
    held: dict[int, int]


@dataclass(slots=True)
class _Life:
    """A storage: after how many marks it was born."""

    weak: Any
    nbytes: int
    birth: int


class Watch:
    """Watches one iteration. Takes the place of the recorder's list of events, to be told of marks."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.allocated = recorder, allocated()
        self.texts: list[str] = []
        self.curve: list[int] = []
        self.living: dict[int, _Life] = {}
        self.ends: list[tuple[_Life, int]] = []
        self.alive = self.peak = self.base = self.most = self.most_at = 0
        self.mode: Any = None

    def start(self) -> None:
        """Finds what lies there, and sees every operation from here on."""
        gc.collect()
        for tensor in _tensors():
            self._found(tensor, OUTSIDE)
        self.base = self.alive - self.allocated() if self.allocated is not None else 0
        watched = _Watched(self)
        watched.extend(self.recorder.events)
        self.recorder.events = watched
        self.mode = _mode(self)
        self.mode.__enter__()

    def stop(self) -> Lives:
        """The lives that were seen."""
        self.mode.__exit__(None, None, None)
        self.recorder.events = list(self.recorder.events)
        born: dict[str, Counter[int]] = defaultdict(Counter)
        held = Counter[int]()
        for life, end in (*self.ends, *((life, len(self.texts)) for life in self.living.values())):
            if life.birth == OUTSIDE:
                held[end] += life.nbytes
            elif end > life.birth:
                born[self.texts[life.birth]][end] += life.nbytes
        self.living.clear()
        return Lives(self.texts, self.curve, {text: dict(ends) for text, ends in born.items()}, dict(held))

    def operation(self, tensors: list[torch.Tensor]) -> None:
        """An operation gave these."""
        self._bury()
        for tensor in tensors:
            self._found(tensor, len(self.texts))
        self._sample()

    def marked(self, text: str) -> None:
        """A mark of the thread that computes: what is gone by now ended with it."""
        self._bury()
        self.texts.append(text)
        self.curve.append(self.peak)
        self.peak = self.alive
        self._sample()
        if self.allocated is not None:
            list.append(self.recorder.events, (SAMPLE, self.most_at, self.most_at, OUTSIDE, self.most))
            self.most = 0

    def _bury(self) -> None:
        for key in [key for key, life in self.living.items() if life.weak.expired()]:
            life = self.living.pop(key)
            self.alive -= life.nbytes
            self.ends.append((life, len(self.texts)))

    def _sample(self) -> None:
        if self.allocated is not None and (now := self.base + self.allocated()) > self.most:
            self.most, self.most_at = now, self.recorder.clock()

    def _found(self, tensor: torch.Tensor, birth: int) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # of tensors that have none, such as sparse ones
            return
        if storage._cdata not in self.living and storage.device.type != "meta":
            self.living[storage._cdata] = _Life(StorageWeakRef(storage), storage.nbytes(), birth)
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)


class _Watched(list[Event]):
    """Events, whose watcher is told of computes."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def append(self, event: Event) -> None:
        """Adds it."""
        super().append(event)
        if any(kind in event[0] for kind in COMPUTES):
            self.watch.marked(event[0])


COMPUTES = ('"cat":"FW"', '"cat":"BW"', '"cat":"UPD"')


def _mode(watch: Watch) -> Any:  # noqa: ANN401 - of torch
    """A dispatch mode that lets every operation through and tells of what it gave."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            out = func(*args, **(kwargs or {}))
            watch.operation([leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)])
            return out

    made: Any = Mode
    return made()


def _tensors() -> list[torch.Tensor]:
    """All tensors that Python knows, and their gradients."""
    import torch

    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return [*found, *(t.grad for t in found if t.is_leaf and t.grad is not None)]


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                    "fsmblks", "uordblks", "fordblks", "keepcost")]  # fmt: skip


def allocated() -> Callable[[], int] | None:
    """Gives the bytes that the allocator of the device has handed out; None where it does not tell."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.memory_allocated
    try:
        call = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    call.restype = _Mallinfo

    def in_use() -> int:
        told = call()
        return int(told.uordblks + told.hblkhd)  # on the heap, and mapped

    return in_use
