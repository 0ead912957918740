# Every target sets up what it needs: on a fresh machine only Python (3.11 or newer) and make are there.
PYTHON ?= python3
# More options for pip, such as an index that has a torch build without CUDA.
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

.PHONY: setup demo test test-fast check format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/dualpath demo

test: $(STAMP)
	$(BIN)/python -m pytest -q

# Without real processes and without the bundled model: seconds, for while you work.
test-fast: $(STAMP)
	$(BIN)/python -m pytest -q -m 'not cluster and not model'

check: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
