"""The source of a model's modules: what their code says that could be one kernel. Reads text; runs nothing of it.

Two things are looked for in the `forward` of each class, by its syntax alone: arithmetic on tensors without a product,
which goes through memory once a kernel does it, and products of one input, which could be one.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.installed import require_installed

__all__ = ["Found", "ModuleSource", "module_sources", "scan"]

PRODUCTS = frozenset("matmul bmm mm einsum linear addmm baddbmm conv1d scaled_dot_product_attention".split())
STREAMED = frozenset(
    "pow mean sum rsqrt sqrt exp sigmoid tanh silu gelu relu softmax log add mul sub div neg square var std clamp to "
    "float type_as softplus abs cos sin cat stack dropout layer_norm rms_norm sigmoid_ mul_ add_ topk".split()
)
CASTS = frozenset("to float type_as".split())
HELPERS = ("act", "act_fn", "activation", "activation_fn", "dropout", "norm", "silu", "gelu")
"""How submodules that go over memory end their names."""
LINEAR = ("proj", "fc1", "fc2", "linear", "dense", "wq", "wk", "wv", "gate", "router")
"""How submodules that are products end their names."""
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSource:
    """A class of a model's module: its bases, where it stands, its text, and the paths at which the model has it."""

    name: str
    bases: tuple[str, ...]
    place: str
    text: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a class does in forward.

    `streamed`: steps that go over memory, where it has no product; `products`: submodules that read one input, by that.
    """

    source: ModuleSource
    streamed: tuple[str, ...]
    products: tuple[tuple[str, ...], ...]


def module_sources(path: str | Path, *, trust_remote_code: bool = False) -> tuple[ModuleSource, ...]:
    """The classes of the modules of a Hugging Face config's model, but for PyTorch's own. ValueError as in capture."""
    require_installed("capture", "torch", "transformers")
    from capture.architecture import read_architecture
    from capture.fake import made_modules

    found: dict[type, list[str]] = {}
    for name, kind in made_modules(read_architecture(Path(path), trust_remote_code=trust_remote_code)):
        if not kind.__module__.startswith("torch."):
            found.setdefault(kind, []).append(name)
    return tuple(_source(kind, paths) for kind, paths in found.items())


def _source(kind: type, paths: list[str]) -> ModuleSource:
    try:
        lines, number = inspect.getsourcelines(kind)
        place = f"{Path(inspect.getsourcefile(kind) or '').name}:{number}"
        text = textwrap.dedent("".join(lines))
    except (OSError, TypeError):  # a class that was made at run time
        place, text = "", ""
    bases = tuple(base.__name__ for base in kind.__mro__[1:] if not base.__module__.startswith(("torch.", "builtins")))
    return ModuleSource(name=kind.__name__, bases=bases, place=place, text=text, paths=tuple(paths))


def scan(sources: Iterable[ModuleSource]) -> Iterator[Found]:
    """Classes whose forward has something to fuse."""
    for source in sources:
        forward = _forward(source.text)
        if forward is None:
            continue
        seen = _Seen()
        seen.visit(forward)
        products = tuple(tuple(dict.fromkeys(names)) for names in seen.linear.values() if len(set(names)) > 1)
        streamed = () if seen.has_product else tuple(seen.steps)
        if len(streamed) > 1 or products:
            yield Found(source=source, streamed=streamed, products=products)


def _forward(text: str) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    kinds = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    functions = (node for kind in kinds for node in kind.body if isinstance(node, ast.FunctionDef))
    return next((node for node in functions if node.name == "forward"), None)


class _Seen(ast.NodeVisitor):
    """Collects steps over memory in the order of the text, and which submodules read which variable."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.linear: dict[str, list[str]] = {}
        self.has_product = False

    def visit_Call(self, node: ast.Call) -> None:
        name = _called(node.func)
        if isinstance(node.func, ast.Attribute) and _is_self(node.func.value):
            self.submodule(node.func.attr, node.args)
        elif name in PRODUCTS:
            self.has_product = True
        self.generic_visit(node)
        if name in STREAMED:
            self.steps.append(name)

    def submodule(self, name: str, args: list[ast.expr]) -> None:
        """self.NAME(x): a product or a module with one where it is called so, else arithmetic of its own."""
        if name.endswith(LINEAR) and args and isinstance(args[0], ast.Name):
            self.linear.setdefault(args[0].id, []).append(name)
        if name.endswith(HELPERS):
            self.steps.append(name)
        else:
            self.has_product = True

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.MatMult):
            self.has_product = True
        elif isinstance(node.op, ARITHMETIC) and not _is_plain(node):
            self.steps.append(type(node.op).__name__.lower())


def _called(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_plain(node: Any) -> bool:  # noqa: ANN401 - any node
    """Arithmetic on numbers and sizes alone."""
    return all(
        isinstance(side, ast.Constant) or (isinstance(side, ast.Attribute) and _is_self(side.value))
        for side in (node.left, node.right)
    )
