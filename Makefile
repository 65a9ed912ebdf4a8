# Two commands on a fresh machine: `make demo` and `make test`. Everything goes into .venv.
PYTHON ?= python3
VENV ?= .venv
# The torch that is tested. On Linux without a GPU, TORCH_INDEX names PyTorch's CPU wheel index (see README).
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-full lint clean

demo: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m medha.generate

test: $(VENV)/installed-dev lint
	$(BIN)/python -m pytest -q -m "not gpu and not slow"

# Also what takes minutes: the needle at 128K tokens.
test-full: $(VENV)/installed-dev lint
	$(BIN)/python -m pytest -q -m "not gpu"

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
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
