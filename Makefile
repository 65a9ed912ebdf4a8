# Two commands on a fresh machine: `make demo` and `make test`. Everything goes into .venv.
PYTHON ?= python3
VENV ?= .venv
# The torch that is tested. On Linux without a GPU, TORCH_INDEX names PyTorch's CPU wheel index (see README).
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# FlashInfer's Python wrappers, which tests/cuda runs over an emulated device (65 MB; what else it declares is for GPUs).
FLASHINFER ?= flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2
# Hundreds of processes start in the tests; each would compile medha again.
export PYTHONDONTWRITEBYTECODE :=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Of `make fuzz`: how many seeds from which on, and over how many ranks (a number, or 2-8 for each in turn).
RUNS ?= 100
FIRST ?= 0
RANKS ?= 1

.PHONY: demo test test-fast test-full fuzz lint clean

demo: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m medha.generate

# Three workers keep two cores busy: tests that start several processes wait for them for half of their time.
test: $(VENV)/installed-dev lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not gpu and not slow"

# What needs no model and no ranks: within 90 seconds.
test-fast: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not gpu and not slow" tests/test_imports.py tests/test_config.py \
	    tests/test_params.py tests/test_batch.py tests/sched tests/cost tests/sim tests/text tests/workload

# Also what takes minutes: more layouts, faults and interleavings.
test-full: $(VENV)/installed-dev lint
	$(BIN)/python -m pytest -q -m "not gpu"

# Random cases against transformers; Ctrl-C stops it and says with which FIRST to go on.
fuzz: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --runs $(RUNS) --first $(FIRST) --ranks $(RANKS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PIP) install --quiet -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install --quiet -e ".[dev]"
	$(PIP) install --quiet --no-deps --no-compile $(FLASHINFER)
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
