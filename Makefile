# `make` lists what there is to do.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Twice quiet: errors only.
PIP := $(BIN)/pip --quiet --quiet --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.h csrc/*.cpp)
PINS := tests/cpu/requirements.txt tests/cpu/requirements-dev.txt \
  tests/cpu/vllm-shim/pyproject.toml
export PATH := $(abspath $(BIN)):$(PATH)

.DEFAULT_GOAL := help
# Real engines share few cores: nothing runs beside anything else, `make -j` or not.
.NOTPARALLEL:
.PHONY: help setup demo test lint unit e2e test-vllm regimes study clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with all that is needed, on a machine without a GPU

$(STAMP): $(PINS) $(SOURCES)
	@command -v $(PYTHON) >/dev/null || \
	  { echo "$(PYTHON) is not here: install it, or say make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/pip || { echo "setup: making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: vLLM for CPU and what it needs (a minute or two)"
	@$(PIP) install --no-deps -r tests/cpu/requirements.txt
	@echo "setup: tools for tests and checks"
	@$(PIP) install --no-deps -r tests/cpu/requirements-dev.txt
	@$(PIP) install --no-deps --no-build-isolation tests/cpu/vllm-shim
	@rm -rf tests/cpu/vllm-shim/build tests/cpu/vllm-shim/*.egg-info
	@echo "setup: vllm-calrouter (builds the C++ core)"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup ## run prefill and decode on real CPU engines and show what happens
	@$(BIN)/python -m examples.demo

test: lint unit e2e ## run every check and test

lint: setup ## style and types
	ruff check .
	ruff format --check .
	mypy

unit: setup ## fast tests, the C++ core's own ones included
	csrc/tests/run.sh
	pytest -m "not e2e"

e2e: setup ## tests on real CPU engines
	pytest -m e2e

test-vllm: setup ## what needs no kernels, on another release: make test-vllm VERSION=0.33.0
	@test -n "$(VERSION)" || { echo "say which: make test-vllm VERSION=0.33.0"; exit 1; }
	bash tests/cpu/test-vllm.sh $(VERSION)

regimes: setup ## the router's setups in a grid of regimes, simulated: make regimes QUICK=1
	@$(BIN)/python -m benchmarks.regimes $(if $(QUICK),--quick)

study: setup ## the study's exhibits, simulated, to docs/study.md: make study QUICK=1
	@$(BIN)/python -m benchmarks.study $(if $(QUICK),--quick)

clean: ## remove .venv and everything made
	rm -rf $(VENV) .cache build dist *.egg-info vllm_calrouter/*.so
