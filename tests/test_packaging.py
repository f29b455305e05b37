"""Holds the distribution to its promises: the wheel is whole, the README's commands exist, CI's scripts can fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pyarrow.parquet
import pytest

PACKAGES = ("hardware", "estimator", "capture", "results", "search", "spaces")
FIRST_BLOCK = ["pip install -e . && search launch spaces/deepseek_v3.yaml", "pip install -e '.[dev]' && pytest"]


@pytest.fixture(scope="module")
def pyproject(root):
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory) -> zipfile.Path:
    """The wheel of a copy of the sources: what earlier builds left in the checkout cannot help it."""
    copy = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        shutil.copytree(root / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(root / name, copy)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "dist",
        ".",
    ]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (copy / "dist").glob("*.whl")
    return zipfile.Path(file)


def first_block(readme: str) -> list[str]:
    """Lines of the first fenced block."""
    match = re.search(r"^```\w*\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    return match[1].splitlines() if match else []


def test_the_wheel_holds_every_module_every_yaml_and_every_type_marker(root, wheel):
    kinds = {".py", ".yaml", ".typed", ".js", ".css", ".html", ".tsv"}
    files = (path for package in PACKAGES for path in (root / package).rglob("*") if path.suffix in kinds)
    wanted = {path.relative_to(root).as_posix() for path in files}
    assert {f"{package}/py.typed" for package in PACKAGES} <= wanted
    assert any(name.startswith("hardware/catalog/") for name in wanted)
    assert any(name.startswith("spaces/models/") for name in wanted)
    with zipfile.ZipFile(wheel.root.filename) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == wanted


def test_the_wheel_brings_the_search_command(wheel):
    (info,) = (entry for entry in wheel.iterdir() if entry.name.endswith(".dist-info"))
    assert "search = search.cli:main" in (info / "entry_points.txt").read_text()


def test_every_folder_with_modules_is_a_listed_package(root, pyproject):
    folders = {path.parent.relative_to(root) for package in PACKAGES for path in (root / package).rglob("*.py")}
    found = {".".join(folder.parts) for folder in folders}
    assert found == set(pyproject["tool"]["setuptools"]["packages"])


def test_every_package_says_what_its_room_is_for(root, pyproject):
    for package in pyproject["tool"]["setuptools"]["packages"]:
        assert (root / package.replace(".", "/") / "__init__.py").is_file()


def test_every_dependency_has_a_lower_bound_and_every_runtime_one_an_upper_bound(pyproject):
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    runtime = project["dependencies"] + [need for name, needs in extras.items() if name != "dev" for need in needs]
    everything = runtime + [need for need in extras["dev"] if not need.startswith(project["name"])]
    assert [need for need in everything if ">=" not in need] == []
    assert [need for need in runtime if ",<" not in need] == []


def test_the_core_needs_no_torch(pyproject):
    names = {re.split(r"[\[<>=]", need)[0] for need in pyproject["project"]["dependencies"]}
    assert names.isdisjoint({"torch", "transformers", "cvxpy", "matplotlib"})


def test_the_version_heads_the_changelog(root, pyproject):
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest
    assert newest[1] == pyproject["project"]["version"]


def test_the_first_block_of_the_readme_is_the_two_commands(root):
    assert first_block((root / "README.md").read_text(encoding="utf-8")) == FIRST_BLOCK


def test_what_the_readme_names_exists(root, pyproject):
    readme = (root / "README.md").read_text(encoding="utf-8")
    for space in re.findall(r"spaces/[\w/]+\.yaml", readme):
        assert (root / space).is_file(), space
    for extra in re.findall(r"\.\[(\w+)\]", readme):
        assert extra in pyproject["project"]["optional-dependencies"]


def test_ci_runs_without_a_syntax_error_and_reads_its_commands_from_the_readme(root):
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], timeout=60).returncode == 0
    text = script.read_text(encoding="utf-8")
    assert not any(command in text for command in FIRST_BLOCK)
    function = re.search(r"^readme_command\(\) \{.*?^\}", text, re.DOTALL | re.MULTILINE)
    assert function
    call = f"{function[0]}\nreadme_command 1; readme_command 2; readme_command 3"
    done = subprocess.run(["bash", "-c", call], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == FIRST_BLOCK
    assert done.returncode != 0  # there is no third command


CASE = '<testcase classname="tests.test_x" name="test_y">{}</testcase>'


@pytest.mark.parametrize(
    ("cases", "code"),
    [
        ([""], 0),
        (["", '<skipped type="pytest.skip" message="no GPU"/>'], 0),
        (["", '<skipped type="pytest.skip" message="needs root"/>'], 0),
        (["", '<skipped type="pytest.skip" message="needs a quiet machine"/>'], 0),
        (["", '<skipped type="pytest.skip" message="../shared is absent"/>'], 0),
        (["", '<skipped type="pytest.skip" message="duckdb is not installed"/>'], 1),
        (["", '<skipped type="pytest.skip" message="rootless"/>'], 1),
        (["", '<skipped type="pytest.xfail" message="known defect"/>'], 1),
        (['<skipped type="pytest.skip" message="no GPU"/>'], 1),
        ([], 1),
    ],
)
def test_a_skip_without_an_excuse_and_a_run_without_a_test_fail_ci(root, tmp_path, cases, code):
    junit = tmp_path / "junit.xml"
    body = "".join(CASE.format(case) for case in cases)
    junit.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>", encoding="utf-8")
    command = [sys.executable, str(root / ".ci" / "check_skips.py"), str(junit)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == code


@pytest.mark.parametrize(("num_rows", "code"), [(2, 0), (0, 1)])
def test_an_empty_front_fails_ci(root, tmp_path, num_rows, code):
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(num_rows))}), tmp_path / "front.parquet")
    command = [sys.executable, str(root / ".ci" / "check_front.py"), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == code


def test_the_size_report_names_five_files_and_five_functions(root):
    command = [sys.executable, str(root / ".ci" / "sizes.py")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60)
    assert len(done.stdout.splitlines()) == 12
    for line in done.stdout.splitlines()[1:6]:
        num_lines, path = line.split()
        assert len(Path(root, path).read_text(encoding="utf-8").splitlines()) == int(num_lines)
