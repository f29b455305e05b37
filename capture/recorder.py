"""Writes down every operation that PyTorch dispatches, with the module and the source line it came from.

Tensors carry no data ("meta"), so a model of any size runs in a moment. Backward operations are placed in the module of
the forward operation whose gradient they are. Knows no model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from capture.records import Record, Recording, Ref, Value
from estimator.op import Phase

__all__ = ["Recorder", "one_record", "paused"]

TORCH_FOLDER = str(Path(torch.__file__).parent)
OWN_FOLDER = str(Path(__file__).parent)
_active: list[Recorder] = []


class Recorder(TorchDispatchMode):
    """Records operations while it is entered. `recording` gets them; `names` knows parameters by their identity."""

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        super().__init__()
        self.recording = recording
        self.names = {id(p): (name, True) for name, p in model.named_parameters(remove_duplicate=True)}
        self.names |= {id(b): (name, False) for name, b in model.named_buffers()}
        self.paths = {id(module): name for name, module in model.named_modules()}
        self.scopes: list[tuple[str, str]] = [("", type(model).__name__)]
        self.pauses = 0
        self.phase = Phase.FORWARD
        self._numbers: dict[int, int] = {}  # of tensors by identity; `_kept` keeps identities from being reused
        self._kept: list[Tensor] = []
        self._shared: dict[int, list[Tensor]] = {}  # tensors by storage
        self._origins: dict[int, tuple[str, str, str]] = {}  # autograd sequence number -> scope, module, line
        self._hooks: list[Any] = []

    def __enter__(self) -> Recorder:
        _active.append(self)
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=False),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        _active.remove(self)

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        self.scopes.append((self.paths.get(id(module), self.scopes[-1][0]), type(module).__name__))

    def _leave_module(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        self.scopes.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.pauses:
            return func(*args, **kwargs)
        before = [self.number(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        arguments = tree_map(self._plain, (*args, *kwargs.values()))
        result = func(*args, **kwargs)
        changed = _written(func, args, kwargs)
        for tensor in changed:
            self._renew(tensor)
        outputs = tuple(self.number(t) for t in tree_flatten(result)[0] if isinstance(t, Tensor))
        self._write(str(func), tuple(before), outputs, tuple(arguments), bool(changed))
        for tensor in changed:
            self._write_through(tensor)
        return result

    def note(
        self, op: str, inputs: Mapping[str, Tensor], outputs: tuple[Tensor, ...], options: Mapping[str, Any]
    ) -> None:  # fmt: skip
        """One record of what ran in one piece."""
        named = tuple((name, Ref(self.number(tensor))) for name, tensor in inputs.items())
        self._write(op, tuple(ref.value for _, ref in named), tuple(self.number(t) for t in outputs),
                    (*named, *options.items()), False)  # fmt: skip

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor's present value."""
        found = self._numbers.get(id(tensor))
        return self._new(tensor) if found is None else found

    def _new(self, tensor: Tensor) -> int:
        name, trained = self.names.get(id(tensor), ("", False))
        values = self.recording.values
        values.append(Value(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), name, trained))
        if id(tensor) not in self._numbers:
            self._kept.append(tensor)
            self._shared.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        self._numbers[id(tensor)] = len(values) - 1
        return len(values) - 1

    def _renew(self, tensor: Tensor) -> None:
        """A new value for it; `_written_through` tells those that share its storage afterwards."""
        self.number(tensor)
        self._new(tensor)

    def _write_through(self, tensor: Tensor) -> None:
        """New values for all that share the storage: made of what was written and of what they were."""
        written = self._numbers[id(tensor)]
        for other in self._shared[tensor.untyped_storage()._cdata]:
            if other is not tensor:
                before = self._numbers[id(other)]
                self._write("capture.alias_of", (written, before), (self._new(other),), (), False)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Ref(self.number(value))
        return value if isinstance(value, int | float | str | bool | None) else str(value)

    def _write(self, op: str, inputs: tuple[int, ...], outputs: tuple[int, ...], arguments: tuple[Any, ...],
               in_place: bool) -> None:  # fmt: skip
        node = torch._C._current_autograd_node()
        if self.phase is Phase.FORWARD:
            scope, module = self.scopes[-1]
            origin = (scope, module, _source_line())
            self._origins[torch._C._autograd._get_sequence_nr() - 1] = origin
        else:
            origin = self._origins.get(-1 if node is None else node._sequence_nr(), ("", "", ""))
        self.recording.records.append(Record(op, inputs, outputs, arguments, *origin, self.phase, in_place))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Arguments that the operation writes to."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor):
                written.append(value)
    return written


def _source_line() -> str:
    """`modeling_llama.py:123`: the innermost line outside of PyTorch and of this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH_FOLDER, OWN_FOLDER)) and "<" not in file:
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextmanager
def paused() -> Iterator[None]:
    """Nothing is recorded inside."""
    for recorder in _active:
        recorder.pauses += 1
    try:
        yield
    finally:
        for recorder in _active:
            recorder.pauses -= 1


class _OnePiece(torch.autograd.Function):
    """Runs in one piece, and so does its gradient."""

    @staticmethod
    def forward(ctx: Any, op: str, names: tuple[str, ...], make: Any, options: Any, *tensors: Tensor) -> Any:
        with paused():
            outputs = make()
        for recorder in _active:
            recorder.note(f"capture.{op}", dict(zip(names, tensors, strict=True)), outputs, options)
        ctx.op, ctx.options = op, options
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = ctx.saved_tensors
        with paused():
            made = tuple(torch.empty_like(t) if t.is_floating_point() else None for t in inputs)
        named = {f"grad{i}": g for i, g in enumerate(gradients) if g is not None}
        for recorder in _active:
            recorder.note(f"capture.{ctx.op}_backward", named, tuple(t for t in made if t is not None), ctx.options)
        return None, None, None, None, *made


def one_record(
    op: str, inputs: Mapping[str, Tensor], make: Callable[[], tuple[Tensor, ...]],
    options: Mapping[str, Any] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The outputs that `make` gives, recorded as one operation of these inputs."""
    return _OnePiece.apply(op, tuple(inputs), make, dict(options or {}), *inputs.values())
