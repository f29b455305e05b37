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

__all__ = ["Mark", "Marks", "names_of", "parts_of"]


class _Nothing:
    """What a copy of a marked model has instead of a mark."""

    def __call__(self, *_: object) -> None:
        """Does nothing."""


class Mark:
    """Called by torch; says what the time since the last mark went to, and what memory lives on after it.

    number: of its last event, where it makes what others end. frees: marks whose bytes end with it. scratch: the line
    of bytes that are there while it runs, and no longer.
    """

    __slots__ = ("again", "cat", "fields", "frees", "full", "name", "number", "recorder", "scratch", "text", "within")

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        cat: str,
        *,
        again: str = "",
        within: Marks | None = None,
        **fields: Any,  # noqa: ANN401 - values of JSON
    ) -> None:
        self.recorder, self.name, self.cat, self.fields = recorder, name, cat, fields
        self.text = line(name, cat, **fields)
        self.again, self.within = again, within
        self.number, self.full, self.scratch = -1, "", ""
        self.frees: list[Mark] = []

    def __call__(self, *_: object) -> None:
        """Marks. A forward inside of the backward pass recomputes."""
        recorder = self.recorder
        now = recorder.clock()
        if self.again and self.within is not None and self.within.backward:
            recorder.events.append((self.again, recorder.at, now, recorder.iteration))
        elif self.full:
            self._tell(recorder.at, now)
        else:
            recorder.events.append((self.text, recorder.at, now, recorder.iteration))
        recorder.at = now

    def keeps(self, nbytes: int | None = None) -> None:
        """Its bytes live on until a mark that frees it. nbytes: where they are not told already."""
        fields: dict[str, Any] = self.fields if nbytes is None else {**self.fields, "bytes": nbytes}
        self.full = line(self.name, self.cat, tail=',"id":%d,"deps":[%s]', **fields)

    def ends(self, other: Mark) -> None:
        """The bytes of another mark end with this one."""
        self.frees.append(other)
        if not self.full:
            self.keeps()

    def begins(self) -> None:
        """What it tells of lies there when the iteration begins."""
        began = self.recorder.began
        self._tell(began, began)

    def _tell(self, start: int, end: int) -> None:
        recorder = self.recorder
        if self.scratch:
            recorder.events.append((self.scratch, start, start, recorder.iteration))
        self.number = next(recorder.ids)
        deps = ",".join([str(mark.number) for mark in self.frees if mark.number >= 0])
        recorder.events.append((self.full, start, end, recorder.iteration, self.number, deps))

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
        self.marks: list[Mark] = []
        for name, module in parts_of(model):
            mark = Mark(recorder, f"FW.{name}", "FW", again=line(f"BW.again.{name}", "BW"), within=self)
            self.marks.append(mark)
            self.handles.append(module.register_forward_hook(mark))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                nbytes = parameter.numel() * parameter.element_size()
                self.marks.append(Mark(recorder, f"BW.{name}", "BW", tensor=name, bytes=nbytes))
                self.handles.append(_first_hook(parameter, self.marks[-1]))

    def remove(self) -> None:
        """Takes the marks off."""
        for handle in self.handles:
            handle.remove()


def _first_hook(parameter: torch.Tensor, mark: Mark) -> Any:  # noqa: ANN401 - a handle of torch
    """Registers a mark before what sends the gradient off. Torch calls hooks in the order in which they were put in."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    others = [*hooks.items()] if hooks else []
    for key, _ in others:
        del hooks[key]
    handle = parameter.register_post_accumulate_grad_hook(mark)
    if others:
        hooks.update(others)
    return handle


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
