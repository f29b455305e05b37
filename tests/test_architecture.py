"""Holds the code to its architecture: import arrows, one home per idea, one door per dependency, named boundaries.

Each checker takes the sources as {path: text} and gives offences as sentences. Each is shown snippets that offend.
"""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

Sources = dict[str, str]

MAY_IMPORT = {
    "spaces": set(),
    "hardware": set(),
    "estimator": {"hardware"},
    "capture": {"hardware", "estimator"},
    "results": {"hardware", "estimator"},
    "search": {"hardware", "estimator", "capture", "results", "spaces"},
}

HOMES = {
    "DType": "hardware/dtype.py",
    "ChipSpec": "hardware/chip.py",
    "LinkSpec": "hardware/link.py",
    "SystemSpec": "hardware/system.py",
    "ModelSpec": "estimator/model.py",
    "Strategy": "estimator/strategy.py",
    "Workload": "estimator/workload.py",
    "StepResult": "estimator/result.py",
}

DOORS = {
    "torch": "capture/",
    "transformers": "capture/",
    "cvxpy": "capture/align.py",
    "ray": "search/pool.py",
    "optuna": "search/study.py",
    "pyarrow": "results/",
    "msgspec": "capture/traces/",
    "google": "capture/traces/chakra.py",
}

# Where a defect becomes an exit code, an error row, or an error that the driver raises: (file, function).
BOUNDARIES = {
    ("search/cli.py", "main"),
    ("search/blocks.py", "Bench.run"),
    ("search/pool.py", "_actor_class.SearchWorker.start"),
}

HEAVY = {"torch", "transformers", "ray", "numba", "cvxpy", "pyarrow", "optuna", "moocore", "scipy"}

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One module that one line of one file asks for. `name` is what is taken from it, if anything."""

    path: str
    line: int
    module: str
    name: str = ""

    @property
    def top(self) -> str:
        """The package at the top."""
        return self.module.partition(".")[0]


@pytest.fixture(scope="module")
def sources() -> Sources:
    paths = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def module_name(path: str) -> str:
    """Dotted name of a source path."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, text: str) -> Iterator[Import]:
    """Every import of a file, relative, lazy and by name alike."""
    package = module_name(path).split(".") if path.endswith("/__init__.py") else module_name(path).split(".")[:-1]
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path=path, line=node.lineno, module=alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(path=path, line=node.lineno, module=module, name=alias.name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(path=path, line=node.lineno, module=first.value)


def all_imports(sources: Sources) -> Iterator[Import]:
    """Every import of every file."""
    for path, text in sources.items():
        yield from imports(path, text)


def arrow_offences(sources: Sources) -> list[str]:
    """Imports of our packages against the arrows."""
    return [
        f"{i.path}:{i.line}: {i.path.partition('/')[0]} must not import {i.top}"
        for i in all_imports(sources)
        if i.top in (MAY_IMPORT.keys() | {"tests"}) - MAY_IMPORT[i.path.partition("/")[0]] - {i.path.partition("/")[0]}
    ]


def cycle_offences(sources: Sources) -> list[str]:
    """The first import cycle among our modules; lazy imports count."""
    ours = {module_name(path) for path in sources}
    edges: dict[str, set[str]] = {name: set() for name in ours}
    for i in all_imports(sources):
        target = f"{i.module}.{i.name}" if f"{i.module}.{i.name}" in ours else i.module
        if target in ours - {module_name(i.path)}:
            edges[module_name(i.path)].add(target)
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return [f"import cycle: {' <- '.join(error.args[1])}"]
    return []


def home_offences(sources: Sources) -> list[str]:
    """Ideas that are missing from their home or have a second one."""
    found: dict[str, list[str]] = {name: [] for name in HOMES}
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text, path)):
            if isinstance(node, ast.ClassDef) and node.name in HOMES:
                found[node.name].append(path)
    return [
        f"class {name} must stand in {home} and only there; it stands in {found[name]}"
        for name, home in HOMES.items()
        if found[name] != [home]
    ]


def door_offences(sources: Sources) -> list[str]:
    """Dependencies that come in by another door than their own."""
    return [
        f"{i.path}:{i.line}: {i.top} comes in through {DOORS[i.top]} only"
        for i in all_imports(sources)
        if i.top in DOORS
        and not (i.path == DOORS[i.top] or (DOORS[i.top][-1] == "/" and i.path.startswith(DOORS[i.top])))
    ]


UNSAFE_YAML = {
    "unsafe_load", "unsafe_load_all", "full_load", "full_load_all",
    "Loader", "CLoader", "FullLoader", "CFullLoader", "UnsafeLoader", "CUnsafeLoader",
}  # fmt: skip


def safe_loader_names(sources: Sources) -> set[str]:
    """Names that are bound to a safe loader or to a class derived from one, in any file."""
    bindings: list[tuple[str, str]] = [("SafeLoader", "SafeLoader"), ("CSafeLoader", "CSafeLoader")]
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text, path)):
            if isinstance(node, ast.ClassDef):
                bindings += [(node.name, ast.unparse(base)) for base in node.bases]
            elif isinstance(node, ast.Assign):
                bindings += [(ast.unparse(target), ast.unparse(node.value)) for target in node.targets]
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                bindings.append((ast.unparse(node.target), ast.unparse(node.value)))
    safe: set[str] = set()
    while more := {name for name, value in bindings if "SafeLoader" in value or value in safe} - safe:
        safe |= more
    return safe


def yaml_offences(sources: Sources) -> list[str]:
    """YAML read by anything but a safe loader."""
    safe, offences = safe_loader_names(sources), []
    for path, text in sources.items():
        tree = ast.parse(text, path)
        names = {
            a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names if a.name == "yaml"
        }
        loose = {i.name for i in imports(path, text) if i.module == "yaml"}
        offences += [
            f"{path}: {name} of yaml is unsafe" for name in sorted(loose & (UNSAFE_YAML | {"load", "load_all"}))
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names and node.attr in UNSAFE_YAML:
                offences.append(f"{path}:{node.lineno}: yaml.{node.attr} is unsafe")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                f"{n}.{f}" for n in names for f in ("load", "load_all")
            }:
                loaders = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "Loader")]
                if not loaders or ast.unparse(loaders[0]).split(".")[-1] not in safe:
                    offences.append(f"{path}:{node.lineno}: yaml.load must be given a safe loader")
    return offences


def raises_again(handler: ast.ExceptHandler) -> bool:
    """Whether every way through the handler ends in its closing bare `raise`."""
    last = handler.body[-1]
    leaves = any(isinstance(node, ast.Return | ast.Break | ast.Continue) for node in ast.walk(handler))
    return isinstance(last, ast.Raise) and last.exc is None and not leaves


def broad_handlers(node: ast.AST, function: str = "") -> Iterator[tuple[str, int]]:
    """(qualified function, line) of each handler that swallows everything: cleaning up and raising again is fine."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = f"{function}.{child.name}".lstrip(".") if named else function
        caught: list[ast.expr] = []
        if isinstance(child, ast.ExceptHandler) and not raises_again(child):
            caught = child.type.elts if isinstance(child.type, ast.Tuple) else [child.type or ast.Name("BaseException")]
        elif isinstance(child, ast.Call) and ast.unparse(child.func).split(".")[-1] == "suppress":
            caught = child.args
        if any(ast.unparse(kind).split(".")[-1] in {"Exception", "BaseException"} for kind in caught):
            yield inner, child.lineno
        yield from broad_handlers(child, inner)


def boundary_offences(sources: Sources) -> list[str]:
    """Handlers that catch everything outside the named boundaries."""
    return [
        f"{path}:{line}: {function or 'the module'} catches everything; name what can go wrong"
        for path, text in sources.items()
        for function, line in broad_handlers(ast.parse(text, path))
        if (path, function) not in BOUNDARIES
    ]


def docstring_offences(sources: Sources) -> list[str]:
    """Modules that do not say what they answer."""
    return [
        f"{path}: no module docstring" for path, text in sources.items() if not ast.get_docstring(ast.parse(text, path))
    ]


def purity_offences(sources: Sources) -> list[str]:
    """Effects in the two pure packages: printing, logging, the environment."""
    offences = []
    for path, text in sources.items():
        if not path.startswith(("hardware/", "estimator/")):
            continue
        offences += [f"{path}:{i.line}: logs" for i in imports(path, text) if i.top in {"logging", "warnings"}]
        for node in ast.walk(ast.parse(text, path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "input"}:
                offences.append(f"{path}:{node.lineno}: talks to the terminal")
            if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in {
                "os.environ",
                "os.getenv",
                "environ",
                "getenv",
            }:
                offences.append(f"{path}:{node.lineno}: reads the environment")
    return offences


def loaded_by(code: str, *extra_path: Path) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after running `code`."""
    report = f"\nimport sys\nprint('\\nloaded:', *(sys.modules.keys() & {HEAVY!r}))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*extra_path, ROOT]))}
    done = subprocess.run(
        [sys.executable, "-c", code + report], cwd=ROOT, env=env, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


HELP = """
import sys
from search.cli import main
sys.argv = ["search", "--help"]
try:
    code = main()
except SystemExit as stop:
    code = stop.code
assert not code, code
"""


CHECKERS = (
    arrow_offences, cycle_offences, home_offences, door_offences,
    yaml_offences, boundary_offences, docstring_offences, purity_offences,
)  # fmt: skip


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_code_keeps_to_its_architecture(checker, sources):
    assert len(sources) > len(MAY_IMPORT)
    assert checker(sources) == []


@pytest.mark.parametrize(
    "text",
    [
        "import search.pool",
        "from search import pool",
        "from ..search import pool",
        "def lazy():\n    from results.store import Store",
        "import importlib\nimportlib.import_module('capture')",
        "import tests.conftest",
    ],
)
def test_an_import_against_an_arrow_is_an_offence(text):
    assert len(arrow_offences({"estimator/cost/x.py" if ".." not in text else "estimator/x.py": text})) == 1


def test_an_import_along_an_arrow_is_none():
    assert arrow_offences({"search/x.py": "from estimator import step\nfrom . import cli\nimport numpy"}) == []


@pytest.mark.parametrize(
    "back",
    [
        "import hardware.a",
        "from hardware import a",
        "from . import a",
        "from .a import A",
        "def f():\n import hardware.a",
    ],
)
def test_an_import_cycle_is_an_offence(back):
    assert cycle_offences({"hardware/a.py": "from hardware.b import B", "hardware/b.py": back})
    assert not cycle_offences({"hardware/a.py": "from hardware.b import B", "hardware/b.py": "import math"})


def test_a_package_that_its_own_module_imports_is_a_cycle():
    assert cycle_offences({"hardware/__init__.py": "from hardware.a import A", "hardware/a.py": "import hardware"})


def test_a_second_home_and_a_missing_home_are_offences():
    at_home = {path: f"class {name}: ..." for name, path in HOMES.items()}
    assert home_offences(at_home) == []
    assert len(home_offences(at_home | {"search/x.py": "class DType: ..."})) == 1
    assert len(home_offences(at_home | {"hardware/dtype.py": ""})) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("estimator/x.py", "import torch.nn"),
        ("search/launch.py", "def f():\n    import ray"),
        ("search/pool.py", "from optuna import Study"),
        ("search/launch.py", "import pyarrow.parquet as pq"),
        ("capture/fake.py", "import cvxpy"),
        ("search/pool.py.d/x.py", "import ray"),
    ],
)
def test_a_dependency_by_another_door_is_an_offence(path, text):
    assert len(door_offences({path: text})) == 1


def test_a_dependency_by_its_own_door_is_none():
    assert door_offences({"search/pool.py": "import ray", "capture/fake.py": "import torch"}) == []


@pytest.mark.parametrize(
    "text",
    [
        "import yaml\nyaml.load(f)",
        "import yaml\nyaml.load(f, yaml.Loader)",
        "import yaml as y\ny.unsafe_load(f)",
        "import yaml\nyaml.load_all(f, Loader=Mine)\nclass Mine(yaml.BaseLoader): ...",
        "from yaml import load",
        "from yaml import FullLoader",
    ],
)
def test_an_unsafe_yaml_reader_is_an_offence(text):
    assert yaml_offences({"search/x.py": text})


@pytest.mark.parametrize(
    "text",
    [
        "import yaml\nyaml.safe_load(f)",
        "import yaml\nyaml.load(f, Loader=yaml.CSafeLoader)",
        "import yaml\nBase = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)\nclass Mine(Base): ...\nyaml.load(f, Mine)",
    ],
)
def test_a_safe_yaml_reader_is_none(text):
    assert yaml_offences({"search/x.py": text}) == []


@pytest.mark.parametrize("caught", ["", " Exception", " (OSError, BaseException)", " builtins.Exception as error"])
def test_a_handler_that_catches_everything_is_an_offence_outside_the_boundaries(caught):
    text = f"def main():\n    try: ...\n    except{caught}: ..."
    assert len(boundary_offences({"search/space.py": text})) == 1
    assert len(boundary_offences({"search/cli.py": text.replace("main", "other")})) == 1
    assert len(boundary_offences({"search/cli.py": "class C:\n  " + text.replace("\n", "\n  ")})) == 1
    assert boundary_offences({"search/cli.py": text}) == []


def test_a_handler_that_cleans_up_and_raises_again_is_none():
    text = "def f():\n    try: ...\n    except BaseException:\n        {}\n        raise"
    assert boundary_offences({"search/x.py": text.format("close()")}) == []
    assert len(boundary_offences({"search/x.py": text.format("if x: return")})) == 1


def test_suppressing_everything_is_an_offence():
    assert boundary_offences({"search/x.py": "import contextlib\nwith contextlib.suppress(Exception): ..."})


def test_a_module_without_docstring_is_an_offence():
    assert docstring_offences({"search/x.py": "import os"})


@pytest.mark.parametrize(
    "text", ["print(1)", "import os\nos.environ['A']", "import logging", "from os import environ\nenviron.get('A')"]
)
def test_an_effect_in_a_pure_package_is_an_offence(text):
    assert purity_offences({"estimator/x.py": text})
    assert not purity_offences({"search/x.py": text})


def test_help_loads_nothing_heavy():
    assert loaded_by(HELP) == set()


def test_a_heavy_import_is_seen(tmp_path):
    (tmp_path / "optuna.py").touch()
    assert loaded_by("import optuna", tmp_path) == {"optuna"}


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_prose_of_a_page_fits_120_columns(page):
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith(("|", "!"))] == []
