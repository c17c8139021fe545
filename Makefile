# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
CORE := .venv/.core
DEV := .venv/.dev

.PHONY: demo test test-slow check lint types docs pictures clean

demo: $(CORE)  ## the quickstart: four real hospitals, 920 patients, different networks, offline
	$(BIN)/polyfed run

# What is imported is compiled once, not in each process that a test starts, whatever the caller's environment says.
test test-slow: export PYTHONDONTWRITEBYTECODE =

test: $(DEV)  ## the fast tests
	$(BIN)/python -m pytest -q -m "not slow and not thorough"

test-slow: $(DEV)  ## all tests: on large data, with killed processes, in a browser (apt-get install chromium chromium-driver)
	$(BIN)/python -m pytest -q

check: export PYTHONDONTWRITEBYTECODE =

check: $(DEV)  ## all that concerns one method: make check METHOD=fedavg
	$(BIN)/python tools/check_method.py $(METHOD)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

docs: $(DEV)  ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

pictures: $(DEV)  ## printed output and pictures of README, landing page and tutorial, from one run (apt-get install chromium chromium-driver)
	$(BIN)/python docs/make_story.py

# All cores compile, and no tests of other packages: half a minute less than if pip does it. Some packages hold files that
# this Python cannot read.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/tests?/' .venv/lib src || true

$(CORE): pyproject.toml constraints.txt  # what everyone needs; the extras are for the tests
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) .
	$(COMPILE)
	touch $@

$(DEV): $(CORE)
	$(INSTALL) ".[dev]"
	$(COMPILE)
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
