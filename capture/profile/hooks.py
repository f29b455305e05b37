"""Marks of one model: after each module's forward, and when each gradient is there.

One mark a module and one a gradient: what passed since the mark before is the module's forward, or the backward of the
gradient. So nothing that computes is left out, and a module costs one call. Modules are those that have parameters of
their own or no modules inside; one that torch.compile made is one operation. Marks survive neither pickling nor
copying: a copy of the model is not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from capture.profile.recorder import Recorder, line

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Marks", "names_of", "parts_of"]


class _Nothing:
    """What a copy of a marked model has instead of a mark."""

    def __call__(self, *_: object) -> None:
        """Does nothing."""


class _Mark:
    """Called by torch; says what the time since the last mark went to."""

    __slots__ = ("again", "recorder", "text", "within")

    def __init__(self, recorder: Recorder, text: str, again: str, within: Marks) -> None:
        self.recorder, self.text, self.again, self.within = recorder, text, again, within

    def __call__(self, *_: object) -> None:
        """Marks. A forward inside of the backward pass recomputes."""
        recorder = self.recorder
        now = recorder.clock()
        recorder.events.append((self.again if self.within.backward else self.text, recorder.at, now,
                                recorder.iteration))  # fmt: skip
        recorder.at = now

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()


class _Start:
    """Called before the whole model's forward: what passed since is the loop's own."""

    __slots__ = ("recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, *_: object) -> None:
        """Nothing is timed from before."""
        self.recorder.at = self.recorder.clock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()


class Marks:
    """The marks of one model. backward: a backward pass runs."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self.recorder, self.model, self.backward = recorder, model, False
        self.names = names_of(model)
        self.handles: list[Any] = [model.register_forward_pre_hook(_Start(recorder))]
        for name, module in parts_of(model):
            mark = _Mark(recorder, line(f"FW.{name}", "FW"), line(f"BW.again.{name}", "BW"), self)
            self.handles.append(module.register_forward_hook(mark))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                text = gradient_line(name, parameter)
                self.handles.append(_first_hook(parameter, _Mark(recorder, text, text, self)))

    def remove(self) -> None:
        """Takes the marks off."""
        for handle in self.handles:
            handle.remove()


def _first_hook(parameter: torch.Tensor, mark: _Mark) -> Any:  # noqa: ANN401 - a handle of torch
    """Registers a mark before what sends the gradient off. Torch calls hooks in the order in which they were put in."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    others = [*hooks.items()] if hooks else []
    for key, _ in others:
        del hooks[key]
    handle = parameter.register_post_accumulate_grad_hook(mark)
    if others:
        hooks.update(others)
    return handle


def gradient_line(name: str, parameter: torch.Tensor) -> str:
    """Of the backward operation that makes a gradient."""
    nbytes = parameter.numel() * parameter.element_size()
    return line(f"BW.{name}", "BW", tensor=name, bytes=nbytes)


def names_of(model: nn.Module) -> dict[int, str]:
    """Name of each parameter by identity."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def parts_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules that are marked, with their names."""
    children = [] if _compiled(model) else list(model.named_children())
    for name, child in children:
        yield from parts_of(child, f"{prefix}.{name}" if prefix else name)
    own = next(iter(model.parameters(recurse=False)), None) is not None
    if not children or own:
        yield prefix or "model", model


def _compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
