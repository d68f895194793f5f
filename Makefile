# Every target makes its own virtual environment, and again after pyproject.toml has changed.
#
#   make demo         examples/demo.py
#   make test         lint, types and the tests that take seconds
#   make test-all     the slow tests too
#   make test-lowest  the tests with the lowest transformers that is supported
#   make test-matrix  test and test-lowest
#   make bench        benchmarks
#   make bench-repair which cells to repair: hours; goes on where it was stopped
#   make bench-evidence  do edits and compositions decide right: hours; goes on where it was stopped
#   make sweep        every model type of transformers against the oracles; writes docs/architectures.md
#   make clean        remove environments and caches (not the downloaded models)

PYTHON ?= python3
# Any torch >= 2.6 will do. It is installed first and on its own, so that a CPU build can be chosen, which is all that
# the tests need and far smaller: for instance make test TORCH=torch==2.8.0 PIP_TORCH_ARGS="--index-url <a CPU index>"
TORCH ?= torch==2.13.0
PIP_TORCH_ARGS ?=
LOWEST ?= 5.20.0
# Two processes: the tests use one thread each.
PYTEST_ARGS ?= -n 2
BENCH_ARGS ?=

VENV := .venv
STAMP := $(VENV)/.installed
VENV_LOWEST := .venv-lowest
STAMP_LOWEST := $(VENV_LOWEST)/.installed-$(LOWEST)

PIP_INSTALL := -m pip install -qq --disable-pip-version-check
export PYTHONUTF8 := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo lint types test test-all test-lowest test-matrix bench bench-repair bench-evidence sweep format clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(STAMP)

$(STAMP): pyproject.toml
	@echo "== $(VENV): installing (some minutes the first time)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP_INSTALL) $(PIP_TORCH_ARGS) '$(TORCH)'
	@$(VENV)/bin/python $(PIP_INSTALL) -e '.[dev]'
	@touch $@

$(STAMP_LOWEST): pyproject.toml
	@echo "== $(VENV_LOWEST): installing with transformers $(LOWEST) (some minutes the first time)"
	@test -x $(VENV_LOWEST)/bin/python || $(PYTHON) -m venv $(VENV_LOWEST)
	@$(VENV_LOWEST)/bin/python $(PIP_INSTALL) $(PIP_TORCH_ARGS) '$(TORCH)'
	@$(VENV_LOWEST)/bin/python $(PIP_INSTALL) -e '.[dev]' 'transformers==$(LOWEST)'
	@rm -f $(VENV_LOWEST)/.installed-*
	@touch $@

demo: $(STAMP)
	@OMP_WAIT_POLICY=passive $(VENV)/bin/python examples/demo.py

lint: $(STAMP)
	@echo "== ruff"
	@$(VENV)/bin/ruff check --quiet
	@$(VENV)/bin/ruff format --check --quiet || { echo "not formatted: run make format"; exit 1; }

types: $(STAMP)
	@echo "== mypy"
	@$(VENV)/bin/mypy --no-error-summary

test: lint types
	@echo "== pytest"
	@$(VENV)/bin/python -m pytest -q -m "not slow" $(PYTEST_ARGS)

test-all: lint types
	@echo "== pytest, slow tests too"
	@$(VENV)/bin/python -m pytest -q $(PYTEST_ARGS)

test-lowest: $(STAMP_LOWEST)
	@echo "== pytest with transformers $(LOWEST)"
	@$(VENV_LOWEST)/bin/python -m pytest -q -m "not slow" $(PYTEST_ARGS)

test-matrix:
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-lowest

bench: $(STAMP)
	@$(VENV)/bin/python benchmarks/compose.py $(BENCH_ARGS)
	@$(VENV)/bin/python benchmarks/fidelity.py $(BENCH_ARGS)
	@$(VENV)/bin/python benchmarks/rotation.py $(BENCH_ARGS)
	@$(VENV)/bin/python benchmarks/mrope.py $(BENCH_ARGS)
	@$(VENV)/bin/python benchmarks/probe.py $(BENCH_ARGS)
	@$(VENV)/bin/python benchmarks/hybrids.py $(BENCH_ARGS)
	@$(VENV)/bin/python benchmarks/load.py $(BENCH_ARGS)
	@$(VENV)/bin/python benchmarks/storage.py $(BENCH_ARGS)

bench-repair: $(STAMP)
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -e '.[bench]'
	@cd benchmarks && for model in smollm2 gemma3_270m; do for part in grid deployable transfer oracle resumed masks; do \
		../$(VENV)/bin/python -m repair.$$part $$model || exit 1; done; done
	@cd benchmarks && for part in situations cost summary figures; do ../$(VENV)/bin/python -m repair.$$part || exit 1; done
	@cd benchmarks && ../$(VENV)/bin/python pages.py

bench-evidence: $(STAMP)
	@cd benchmarks && ../$(VENV)/bin/python -m evidence.everything $(BENCH_ARGS)

sweep: $(STAMP)
	@$(VENV)/bin/python -m editable_cache.testing.sweep --json benchmarks/results/architectures.json \
		--markdown docs/architectures.md

format: $(STAMP)
	@$(VENV)/bin/ruff check --quiet --fix
	@$(VENV)/bin/ruff format --quiet

clean:
	@rm -rf $(VENV) $(VENV_LOWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
