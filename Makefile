# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types imports pytest wheel dashboard clean

demo: $(STAMP)
	$(BIN)/runhealth demo

test: lint types imports pytest wheel

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (torch, duckdb, streamlit and the test tools; a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $$($(PYTHON) --version) was found; try: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

pytest: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

wheel: $(STAMP)
	$(BIN)/python tests/wheel_check.py

dashboard: $(STAMP)
	$(BIN)/runhealth dashboard

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
