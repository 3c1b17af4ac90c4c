# make demo      the main job: a launched cluster of real processes trains a network
# make demo-faults  the same digits twice: undisturbed, and while the scheduler, servers and workers are killed at random and come back
# make test      lint, strict types, the documentation, and the tests but for the slow ones
# make test-machines  jobs on several machines: namespaces with real ssh daemons, Slurm, Open MPI; as root it installs those
# make test-tensorflow  the tests of kvdist.tensorflow, in an environment of its own
# make test-all  the slow tests too, those of kvdist.tensorflow, and those of kvdist.mxnet and the bridge to MXNet, in an environment of their own; numba's kernels compiled for GPUs
# make scenarios  three times in a row, slow ones too: the tests by which docs/decisions/proof.md shows what becomes of each fault; half an hour; as root
# make soak      100000 runs of the simulated cluster, spread over its scenarios, on all cores: 0.4 CPU seconds each, so 6 hours on
#                two cores; SOAK_FLAGS="--minutes 30" for as many as are done by then, SOAK_FLAGS="--first 400" for others
# make fuzz      the tests of properties with examples that no run has seen; then the decoders, led by coverage (atheris): a minute, FUZZ_SECONDS=3600 for more
# make lint      ruff
# make types     mypy, strict
# make docs      the documentation as a site, in build/site; a broken link or a public name without a docstring fails
# make bench     the headline numbers beside MXNet, Horovod, gloo and DDP, within 20 minutes; BENCH_FLAGS="--only mlp"
# make bench-full  what those leave out: sizes, numbers of keys and workers, models, modes; an hour or two
# make bench-other start-up, memory of servers, how soon a killed process is noticed, tables of rows, thin lines, encryption
# make gpu       on a machine with a CUDA device: the tests that need one, and the benchmark of the GPU kernels. Installs nothing: it takes
#                the machine's python3, or PYTHON=..., with torch, CuPy, numba-cuda and pytest
# make release   builds sdist and wheel into dist/; then each Python from 3.10 to 3.13 that is here installs the wheel into an empty
#                environment and runs the quickstart in another folder, and no link of the README may be relative
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
GPU_PYTHON = PYTHONPATH="$(CURDIR):$(CURDIR)/launcher:$$PYTHONPATH" $(or $(PYTHON),python3)
GPU_FLAGS ?=
SOAK_FLAGS ?=
FUZZ_SECONDS ?= 60

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo demo-faults test test-machines test-tensorflow test-all scenarios soak fuzz lint types docs bench bench-full bench-other gpu release clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# Without activating the environment: the workers' `python` must be the one that has kvdist.
demo: $(VENV)/.installed-examples
	PATH="$(CURDIR)/$(BIN):$$PATH" kvdist-launch -n 2 -s 2 python examples/digits.py

demo-faults: $(VENV)/.installed-examples
	$(BIN)/python examples/faults.py

# Twice as many as two cores: many of these tests wait for a time-out or the end of a process.
test: TEST_PROCESSES = 4
test: lint types docs
	$(PYTEST) -m "not slow and not machines"

test-machines: $(VENV)/.installed-dev
	@tests/machines/packages.sh
	$(PYTEST) --dist loadfile -m "machines and not slow"

scenarios: TEST_PROCESSES = 4
scenarios: $(VENV)/.installed-dev
	@tests/machines/packages.sh
	set -e; for turn in 1 2 3; do $(PYTEST) --dist loadfile --scenarios; done

test-all: lint types docs
	@tests/machines/packages.sh
	@# Not in the environment from the start: numba-cuda has every Python that starts there begin with code of its own.
	@$(PIP_INSTALL) numba-cuda nvidia-nvvm nvidia-cuda-nvrtc || echo "make: numba-cuda cannot be installed here: ITS KERNELS ARE NOT COMPILED" >&2
	@$(PIP_INSTALL) lightning transformers accelerate || \
	  echo "make: Lightning and transformers cannot be installed here: THEIR PROGRAMS ARE NOT TESTED" >&2
	@examples/mxnet_bridge/environment.sh >/dev/null && examples/mxnet_bridge/environment.sh 2.0.0b1 >/dev/null || \
	  echo "make: MXNet cannot be installed here: THE TESTS OF examples/mxnet_bridge AND kvdist.mxnet ARE SKIPPED" >&2
	SIMULATION_SEEDS=10 $(PYTEST)
	@$(MAKE) --no-print-directory test-tensorflow

test-tensorflow:
	@python=$$(tests/tensorflow/environment.sh) || { \
	  echo "make: TensorFlow cannot be installed here: THE TESTS OF kvdist.tensorflow ARE SKIPPED" >&2; exit 0; }; \
	"$$python" -m pytest -n $(TEST_PROCESSES) --dist loadfile tests/tensorflow

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.simulation --total 100000 $(SOAK_FLAGS)

fuzz: $(VENV)/.installed-dev
	$(PYTEST) -m "hypothesis and not machines" --hypothesis-profile=elsewhere
	@if $(PIP_INSTALL) atheris 2>/dev/null; then \
	  mkdir -p build/fuzz && $(BIN)/python -m tests.fuzz.decoders -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 build/fuzz tests/fuzz/corpus; \
	else echo "make: atheris is not to be had for $$($(BIN)/python --version): DECODERS ARE NOT FUZZED BY COVERAGE" >&2; fi

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/python -m mypy

# Its notices about later major versions of mkdocs are not warnings of this site.
docs: $(VENV)/.installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

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
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/sparse.py
	$(BIN)/python benchmarks/compression.py
	$(BIN)/python benchmarks/p3.py
	$(BIN)/python benchmarks/encryption.py

# The device is looked for first, so that nobody takes skipped tests for passed ones. The benchmark checks its results
# itself, so a test that fails does not keep it from running on a machine that may be there only for an hour.
gpu:
	@$(GPU_PYTHON) benchmarks/gpu.py --check
	failed=0; \
	$(GPU_PYTHON) -m pytest -m gpu || failed=1; \
	$(GPU_PYTHON) benchmarks/gpu.py $(GPU_FLAGS) || failed=1; \
	exit $$failed

# Both from a copy of what git has: files that lie about here must not be in a release.
release: $(VENV)/.installed-release
	rm -rf dist build/release && mkdir -p build/release
	git archive HEAD | tar -x -C build/release
	$(BIN)/python -m build --quiet --outdir dist build/release
	$(BIN)/python -m tests.release dist

clean:
	rm -rf $(VENV) .venv-mxnet .venv-bridge .venv-bridge-2 .venv-horovod .venv-tensorflow build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
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
