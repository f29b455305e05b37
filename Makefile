# `make check` does to a checkout what .ci/run does to a fresh clone. Runs the tools of the active environment.

PATHS := hardware estimator capture results search spaces tests .ci

.PHONY: check lint format test bench

check: lint test

lint:
	ruff format --check $(PATHS)
	ruff check $(PATHS)
	mypy

format:
	ruff format $(PATHS)
	ruff check --fix $(PATHS)

test:
	pytest

bench:
	search bench
