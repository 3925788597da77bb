# `make demo` and `make test` do all their own set-up in .venv; a second call starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1
export MPLCONFIGDIR := $(CURDIR)/$(VENV)/matplotlib

.PHONY: demo test test-deploy fast lint types clean

demo: $(VENV)/.installed
	$(BIN)/semifed sweep quickstart method=server-only,fedfixmatch --seeds 0,1,2 --out demo
	@echo "report of one run: demo/fedfixmatch-seed0/report.html"

test: $(VENV)/.installed-dev lint types
	$(BIN)/pytest -n 2 --dist worksteal

# A real federation on the loopback address, eight to thirteen minutes; the proxy is nginx.
test-deploy: $(VENV)/.installed-dev
	@command -v nginx > /dev/null || { echo "nginx is missing: apt install nginx-light"; exit 1; }
	$(BIN)/pytest drills -s --timeout 900

fast: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Debian and Ubuntu keep venv in a package of its own; say so instead of failing with a riddle.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "semifed needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt install python3-venv"; rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) demo runs .mypy_cache .ruff_cache .pytest_cache
