# Every target sets up what it needs. VENV=PATH uses an environment that exists, and keeps its torch and Triton; VENV= or
# VENV=none uses $(PYTHON) as it is and installs nothing; without VENV, .venv is made. TORCH="…" chooses the torch of a new
# environment: any arguments of pip install.

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
ARGS ?=
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); [ $$n -gt 8 ] && echo 8 || echo $$n)

ifeq ($(filter-out none,$(VENV)),)
  PY := $(PYTHON)
  STAGES = $(PY) tools/stages.py --jobs $(JOBS) --allow-missing
else
  PY := $(abspath $(VENV))/bin/python
  STAGES = $(PY) tools/stages.py --jobs $(JOBS)
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint compile-matrix golden figures native gpu soak sanitize mutants clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | awk -F ':.*  ## ' '{printf "  make %-16s %s\n", $$1, $$2}'
	@echo '  VENV=PATH: your environment (its torch stays); VENV=none: PYTHON as it is; TORCH="…": which torch (docs/install.md)'

setup:  ## make or complete the environment
	@$(PYTHON) tools/setup_env.py --venv '$(VENV)' --python '$(PYTHON)' --torch '$(TORCH)'

demo: setup  ## train a small MoE model by reinforcement learning, on the GPU if there is one; ARGS='--help' says more
	$(PY) -m fusedce.cli train $(ARGS)

test: setup  ## lint, contracts, types, house rules, CPU suite, Triton interpreter
	@$(STAGES) test

lint: setup  ## the fast half of test: no op is run
	@$(STAGES) lint

compile-matrix: setup  ## every Triton kernel for NVIDIA and AMD GPUs that need not be there, with its budgets
	@$(STAGES) compile-matrix

golden: setup  ## measure the compile matrix anew and write tests/compile/golden.csv
	$(PY) -m tests.compile.golden

figures:  ## write the README's measured tables and the planner's rates from bench/results
	$(PYTHON) tools/figures.py

native: setup  ## build the C++ extension in place; fails without nvcc or hipcc
	FUSEDCE_BUILD_EXT=1 $(PY) -m pip install --no-build-isolation --no-deps --verbose --editable .

gpu: setup  ## the whole suite on a machine with a GPU
	@$(STAGES) gpu

soak: setup  ## the long tests on a machine with a GPU
	@$(STAGES) soak

sanitize: setup  ## linear cross-entropy's kernels under compute-sanitizer, on a machine with an NVIDIA GPU
	@$(STAGES) sanitizer

mutants: setup  ## seeded faults of the code, each of which a test must notice
	@$(STAGES) mutants

clean:  ## remove what was built and run here, and .venv
	rm -rf .venv build dist runs fusedce.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
	rm -f fusedce/*.so
