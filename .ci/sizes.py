"""Prints the largest five files and the longest five functions: places to look at, not limits."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGES = ("hardware", "estimator", "capture", "results", "search")


def main() -> None:
    """Walks the packages below the working directory."""
    files, functions = [], []
    for path in sorted(path for package in PACKAGES for path in Path(package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        files.append((text.count("\n"), str(path)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(((node.end_lineno or 0) - node.lineno + 1, f"{path}:{node.lineno} {node.name}"))
    for title, rows in (("files", files), ("functions", functions)):
        print(f"largest {title}, in lines")
        for num_lines, where in sorted(rows, reverse=True)[:5]:
            print(f"{num_lines:6} {where}")


if __name__ == "__main__":
    main()
