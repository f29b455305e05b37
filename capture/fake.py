"""A Hugging Face model without weights, run once: what it does, as records (capture/records.py).

The whole model is made of tensors without data and every layer is called in its order, but only the first of each
distinct kind runs: a layer whose modules, sizes and settings equal an earlier one's hands its input on. So parameters
are counted over the whole model, and depth costs nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.initialization import no_init_weights

from capture.architecture import Architecture, quiet
from capture.patches import ATTENTION, patched
from capture.recorder import Recorder
from capture.records import LayerPlace, Recording
from estimator.op import Phase

__all__ = ["made_modules", "record"]

BATCH = 3  # a size that no model has along another dimension; the sequence's is chosen likewise
PRIVATE = ("layer_idx", "layer_number", "training")  # settings that differ between layers alike
DTYPE = torch.bfloat16


def record(architecture: Architecture, phase: str, num_layers: int | None = None) -> Recording:
    """Runs the model: `train` (forward, loss, backward), `prefill`, or `decode` (one token behind a cache).

    ValueError names the module and the operation where the model cannot run without data.
    """
    model = _made(architecture)
    layers = _layers_of(model, architecture.config.num_hidden_layers)
    depth = len(layers) if num_layers is None else num_layers
    if not 1 <= depth <= len(layers):
        raise ValueError(f"--layers must be from 1 to {len(layers)}, which the model has, but got {num_layers}")
    places = _places(model, layers, architecture.config)[:depth]
    seq = _distinctive(model)
    left_out = tuple(f"{name}." for name, module in model.named_modules() if any(module is m for m in layers[depth:]))
    parameters = [(name, p) for name, p in model.named_parameters() if not name.startswith(left_out or ("\0",))]
    recording = Recording(
        architecture=type(model).__name__, phase=phase, batch=BATCH, seq=1 if phase == "decode" else seq,
        context=seq if phase == "decode" else 0, num_parameters=sum(p.numel() for _, p in parameters),
        tied=_is_tied(model), layers=tuple(places),
    )  # fmt: skip
    recording.modules = {name: type(module).__name__ for name, module in model.named_modules()}
    recording.bases = {type(module).__name__: _bases(type(module)) for module in model.modules()}
    recorder = Recorder(recording, model)
    with quiet(), patched({type(module) for module in model.modules()}), _folded(layers, places, recorder):
        try:
            _run(model, recorder, phase, seq)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            scope, module = recorder.scopes[-1]
            reason = " ".join(str(error).split())[:300]
            last = recording.records[-1].op if recording.records else "nothing"
            where = f"{scope or 'the model'} ({module})"
            raise ValueError(f"{where} cannot run without data, after {last}: {reason}") from error
    return recording


def made_modules(architecture: Architecture) -> Iterator[tuple[str, type[nn.Module]]]:
    """Paths and classes of the modules of its model, which is made without data."""
    for name, module in _made(architecture).named_modules():
        yield name, type(module)


def _bases(kind: type[nn.Module]) -> tuple[str, ...]:
    """What a class extends, down to what every module is."""
    return tuple(base.__name__ for base in kind.__mro__[1:] if base not in {nn.Module, object})


def _is_tied(model: nn.Module) -> bool:
    """Whether the head multiplies with the table of words."""
    named: Any = model  # transformers' own methods
    head, table = named.get_output_embeddings(), named.get_input_embeddings()
    return head is not None and head.weight is table.weight


def _made(architecture: Architecture) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device("meta"), no_init_weights(), quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = architecture.make(ATTENTION)
            model.tie_weights()
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, LookupError, ImportError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        law = "transformers cannot make a model of it"
        raise ValueError(f"{law}: {reason}; a key of the config has what its code does not know") from error
    finally:
        torch.set_default_dtype(before)
    made: nn.Module = model.train()
    return made


def _layers_of(model: nn.Module, depth: int) -> nn.ModuleList:
    """The list of layers: the outermost of that length."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(f"{type(model).__name__} has no list of its {depth} layers, which a capture folds")


def _places(model: nn.Module, layers: nn.ModuleList, config: Any) -> list[LayerPlace]:
    """The kind of every layer, kinds numbered in order of first use."""
    paths = {id(module): name for name, module in model.named_modules()}
    listed = {key: value for key, value in vars(config).items()
              if isinstance(value, list | tuple) and len(value) == len(layers)}  # fmt: skip
    kinds: dict[Any, int] = {}
    places = []
    for i, layer in enumerate(layers):
        settings = tuple((key, repr(value[i])) for key, value in sorted(listed.items()))
        kind = kinds.setdefault((_signature(layer), settings), len(kinds))
        places.append(LayerPlace(kind, paths[id(layer)]))
    return places


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """Modules of a layer, their parameters' shapes and their plain settings."""
    rows = []
    for name, module in layer.named_modules():
        shapes = tuple((key, tuple(t.shape), str(t.dtype)) for key, t in
                       (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))  # fmt: skip
        plain = tuple((key, value) for key, value in sorted(vars(module).items())
                      if key not in PRIVATE and isinstance(value, int | float | str | bool | None))  # fmt: skip
        rows.append((name, type(module), shapes, plain))
    return tuple(rows)


def _distinctive(model: nn.Module) -> int:
    """A sequence length that is no size of any parameter: longer than windows in use, whole in chunks of 128."""
    sizes = {size for p in model.parameters() for size in p.shape}
    seq = 8320
    while seq in sizes or seq * BATCH in sizes:
        seq += 128
    return seq


@contextmanager
def _folded(layers: nn.ModuleList, places: list[LayerPlace], recorder: Recorder) -> Iterator[None]:
    """Only the first layer of each kind runs; layers beyond `places` hand on as well."""
    recording = recorder.recording
    shapes: dict[int, Any] = {}
    seen: set[int] = set()

    def passing(kind: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = _hidden(args, kwargs)
            return (hidden, *shapes[kind][1:]) if isinstance(shapes.get(kind), tuple) else hidden

        return forward

    def first(kind: int, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            entry = recorder.number(_hidden(args, kwargs))
            result = original(*args, **kwargs)
            shapes[kind] = result
            recording.entry[kind] = entry
            recording.result[kind] = recorder.number(result[0] if isinstance(result, tuple) else result)
            return result

        return forward

    every = list(layers)
    for layer, place in zip(every, places, strict=False):
        layer.forward = passing(place.kind) if place.kind in seen else first(place.kind, layer.forward)
        seen.add(place.kind)
    for layer in every[len(places) :]:
        layer.forward = passing(places[-1].kind)
    try:
        yield
    finally:
        for layer in every:
            del layer.__dict__["forward"]


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden = args[0] if args else kwargs["hidden_states"]
    assert isinstance(hidden, Tensor)
    return hidden


def _run(model: nn.Module, recorder: Recorder, phase: str, seq: int) -> None:
    recording = recorder.recording
    with torch.device("meta"):
        ids = torch.zeros((BATCH, seq), dtype=torch.int64)
        if phase == "train":
            _train(model, recorder, ids)
            return
        with torch.no_grad():
            model.eval()
            cache = DynamicCache(config=model.config)
            if phase == "decode":
                model(input_ids=ids, use_cache=True, **{_cache_name(model): cache})
                ids = torch.zeros((BATCH, 1), dtype=torch.int64)
                recording.entry.clear()
                recording.result.clear()
            with recorder:
                recording.ids = recorder.number(ids)
                output = model(input_ids=ids, use_cache=True, **{_cache_name(model): cache})
                recording.output = recorder.number(output.logits)


def _cache_name(model: nn.Module) -> str:
    import inspect

    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return "cache" if "cache" in names else "past_key_values"


def _train(model: nn.Module, recorder: Recorder, ids: Tensor) -> None:
    recording = recorder.recording
    with recorder:
        recording.ids = recorder.number(ids)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        recording.output = recorder.number(loss)
        recorder.phase = Phase.BACKWARD
        loss.backward()
