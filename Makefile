# `make demo` and `make test` set everything up themselves, in .venv beside this file. All they need is make and
# Python 3.11 or newer with its venv module.
#
#   TORCH_INDEX   one more package index for torch, such as PyTorch's own for the small CPU builds, where the default
#                 would be the CUDA build of several gigabytes
#   PYTHON        the interpreter .venv is made with; the first one found that is new enough if not given
#   ARGS          more arguments for demo, bench, test and parity: make bench ARGS="--help"

VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
ARGS ?=
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# .venv has run-time packages, or those and the tools of `make test`. Where the latter are there, the former are.
READY := $(VENV)/ready
TEST_READY := $(VENV)/ready-for-tests
RUN_READY := $(if $(wildcard $(TEST_READY)),$(TEST_READY),$(READY))

# Modules from elsewhere would shadow what .venv holds.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check parity bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(RUN_READY)  ## the same text written with and without speculation, side by side
	$(BIN)/forerun demo $(ARGS)

test: check  ## check, then all tests except the long comparison
	$(BIN)/python -m pytest $(ARGS)

check: $(TEST_READY)  ## lint, formatting, types, import order
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

parity: $(TEST_READY)  ## the long comparison of every drafter with plain decoding
	$(BIN)/python -m pytest -m parity $(ARGS)

bench: $(RUN_READY)  ## plain decoding against each drafter, on this machine
	$(BIN)/forerun bench latency $(ARGS)

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): EXTRA :=
$(TEST_READY): EXTRA := [test]
$(READY) $(TEST_READY): pyproject.toml constraints.txt Makefile | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.$(EXTRA)'
	@touch $@

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "forerun needs Python 3.11 or newer and found none:" \
		"install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "forerun needs Python 3.11 or newer," \
		"and $(PYTHON) is $$("$(PYTHON)" --version 2>&1): name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) could not create $(VENV)." \
		"On Debian and Ubuntu this helps: apt-get install python3-venv" >&2; exit 1; }
