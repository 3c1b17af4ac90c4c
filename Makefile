# make demo      the main job: a launched cluster of real processes trains a network
# make test      lint, strict types, and the tests but for the slow ones
# make test-all  the slow tests too
# make soak      thousands of seeds of the simulated cluster; SOAK_SEEDS=20000 for more
# make lint      ruff
# make types     mypy, strict
# make bench     the headline numbers beside MXNet, Horovod, gloo and DDP, within 20 minutes; BENCH_FLAGS="--only mlp"
# make bench-full  what those leave out: sizes, numbers of keys and workers, models, modes; an hour or two
# make bench-other start-up, memory of servers, and how soon a killed process is noticed
# make clean     back to a fresh checkout
#
# Everything is installed into .venv with the versions of constraints.txt; a stamp there remembers what for, so a
# second call starts at once and a changed pyproject.toml or constraints.txt installs again.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal
TEST_PROCESSES ?= 2
BENCH_FLAGS ?=
SOAK_SEEDS ?= 2000

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-all soak lint types bench bench-full bench-other clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# Without activating the environment: the workers' `python` must be the one that has kvdist.
demo: $(VENV)/.installed-examples
	PATH="$(CURDIR)/$(BIN):$$PATH" kvdist-launch -n 2 -s 2 python examples/digits.py

test: lint types
	$(PYTEST) -m "not slow"

test-all: lint types
	$(PYTEST)

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.simulation --seeds $(SOAK_SEEDS)

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/python -m mypy

# The two that need root for their namespaces skip that part aloud without it.
bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/bench.py $(BENCH_FLAGS)

bench-full: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/bench.py --full $(BENCH_FLAGS)

bench-other: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/failure.py

clean:
	rm -rf $(VENV) .venv-mxnet .venv-horovod build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing kvdist[$*] into $(VENV)"
	@$(PIP_INSTALL) --editable '.[$*]'
	@touch $@

# The first Python that is new enough, or a sentence saying what is missing.
$(BIN)/python:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "make: kvdist needs Python 3.10 or newer, and $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1);" \
	       "install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv --clear $(VENV) || { rm -rf $(VENV); \
	  echo "make: $$found cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
