# Needs python3 >= 3.11, make and a C compiler. Everything is installed into .venv.
#
# TORCH is what pip installs as torch. Without a GPU the default build of Linux is some gigabytes
# of CUDA you do not need; name a CPU build instead, for example
#   make demo TORCH="torch==2.13.0 --index-url <index with CPU wheels>"
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
BENCHES ?= engine kv-transfer relay

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --no-input --disable-pip-version-check
export PIP_ROOT_USER_ACTION := ignore
export PYTHONUNBUFFERED := 1

# A stamp is newer than pyproject.toml when that set of packages is installed, so a second `make`
# does not start pip. The lock keeps whatever torch is there: a resolution that would replace it fails.
TORCH_LOCK := $(VENV)/torch.lock
RUNTIME := $(VENV)/.runtime
DEV := $(VENV)/.dev
BENCH := $(VENV)/.bench

INSTALL_ENGINES := $(BIN)/python -m benchmarks.engines.install --torch '$(TORCH)'

.PHONY: help venv demo serve test check engines test-engines bench clean

help:
	@echo "make demo           install, start router, prefill and decode worker, ask one question"
	@echo "make serve          the same, and stay up"
	@echo "make test           every check and test that needs no foreign engine (same as make check)"
	@echo "make test-engines   tests against real vLLM and llama.cpp, installed first (make engines)"
	@echo "make bench          measure: $(BENCHES)"
	@echo "make clean          remove .venv, builds and caches"

venv: $(RUNTIME)

demo: $(RUNTIME)
	@$(BIN)/splitserve models pull smollm2-135m
	@$(BIN)/splitserve demo

serve: $(RUNTIME)
	@$(BIN)/splitserve models pull smollm2-135m
	@$(BIN)/splitserve up

test: check

check: $(DEV)
	@echo "== format"
	@$(BIN)/ruff format --check .
	@echo "== lint"
	@$(BIN)/ruff check .
	@echo "== types"
	@$(BIN)/mypy
	@echo "== imports"
	@$(BIN)/lint-imports --no-logo
	@echo "== tests"
	@$(BIN)/pytest --quiet --durations=10 --durations-min=1 --ignore=tests/engines

# Once for this machine, outside the repository: 4 GB and some minutes of compiling.
engines: $(RUNTIME)
	@$(INSTALL_ENGINES) > /dev/null

# The installer prints NAME=PATH for each engine; the tests find them by these names.
test-engines: $(DEV)
	@engines=$$($(INSTALL_ENGINES)); \
	  while IFS= read -r engine; do export "$$engine"; done <<< "$$engines"; \
	  $(BIN)/pytest --quiet --durations=20 --durations-min=1 tests/engines

bench: $(BENCH)
	@for bench in $(BENCHES); do echo "== bench $$bench"; $(BIN)/splitserve bench $$bench || exit 1; done

clean:
	@rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: $(PYTHON) is missing or older than 3.11; install Python 3.11 or newer and name it: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "error: $(PYTHON) cannot create $(VENV); install its venv module (Debian and Ubuntu: apt install python3-venv)" >&2; \
	  exit 1; }

$(TORCH_LOCK): | $(BIN)/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "installing $(TORCH) (once)"; $(PIP) $(TORCH); }
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(RUNTIME): pyproject.toml $(TORCH_LOCK)
	@echo "installing splitserve with its engine"
	@$(PIP) --constraint $(TORCH_LOCK) --editable '.[native]'
	@touch $@

$(DEV): pyproject.toml $(RUNTIME)
	@echo "installing the tools for checks and tests"
	@$(PIP) --constraint $(TORCH_LOCK) --editable '.[native,dev]'
	@touch $@

$(BENCH): pyproject.toml $(RUNTIME)
	@echo "installing what the comparisons run against"
	@$(PIP) --constraint $(TORCH_LOCK) --editable '.[native,bench]'
	@touch $@
