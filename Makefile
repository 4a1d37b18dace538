# Everything here needs only Python 3.11+ and make; each target installs what it needs first.
#
#   make demo                      train the demo, leave runs/demo/report.html
#   make demo DRAFT=dflash         the same with another draft: eagle3 dflash dspark mtp suffix ngram self_int8
#   make test                      the test suite
#   make test PYTHON=python3.12    the same suite on the newer pinned set, in a virtual environment of its own

PYTHON ?= python3
VENV ?= $(if $(filter python3,$(notdir $(PYTHON))),.venv,.venv-$(notdir $(PYTHON)))
ARGS ?=
DRAFT ?= eagle3

BIN := $(VENV)/bin
# An environment that is already there decides by its own version, not by that of PYTHON.
VERSIONED := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
VERSION := $(shell $(VERSIONED) -c 'import sys; v = sys.version_info[:2]; print("3.12" if v >= (3, 12) else "3.11" if v == (3, 11) else "old")')
CONSTRAINTS := .ci/constraints-python$(VERSION).txt
STAMP := $(VENV)/.installed
# The compiler for GPUs, for machines without one; on the path only of those who ask for it (docs/deviceless.md).
DEVICELESS := $(VENV)/deviceless
DEVICELESS_STAMP := $(VENV)/.deviceless-installed
PYTEST := $(BIN)/python -m pytest
# Compiling is what tests wait for, on one core each. A file stays with one worker, whose compiled programs it shares.
JOBS ?= 2
PARALLEL := -n $(JOBS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-fast test test-all test-fast test-newer test-aot lint warm-start clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,6p'
	@echo 'other targets: setup demo-fast test-fast test-newer test-aot test-all lint warm-start clean'

setup: $(STAMP) $(DEVICELESS_STAMP)

$(STAMP): pyproject.toml $(wildcard .ci/constraints-python*.txt)
	@case '$(VERSION)' in 3.*) ;; \
	  *) echo "PYTHON=$(PYTHON) must be Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2;; esac
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,notebooks]' -c $(CONSTRAINTS)
	@touch $@

$(DEVICELESS_STAMP): $(wildcard .ci/deviceless-python*.txt) | $(STAMP)
	rm -rf $(DEVICELESS)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --retries 2 --target $(DEVICELESS) \
	  -r .ci/deviceless-python$(VERSION).txt && touch $@ || { rm -rf $(DEVICELESS); \
	  echo 'NO COMPILER FOR GPUS: its wheels could not be had (above); everything else works, tests/aot is skipped' >&2; }

# --resume: a second `make demo` continues a run that was stopped and leaves a finished one as it is.
demo: $(STAMP)
	@test -f configs/grpo_arithmetic3_$(DRAFT)_cpu.py || { echo "DRAFT=$(DRAFT) must be one of:" \
	  $(patsubst configs/grpo_arithmetic3_%_cpu.py,%,$(wildcard configs/grpo_arithmetic3_*_cpu.py)) >&2; exit 2; }
	$(BIN)/draftco train --config configs/grpo_arithmetic3_$(DRAFT)_cpu.py \
	  --run-dir runs/demo$(addprefix -,$(filter-out eagle3,$(DRAFT))) --resume $(ARGS)

demo-fast: $(STAMP)
	$(BIN)/draftco train --config configs/grpo_arithmetic2_eagle3_cpu.py --run-dir runs/demo-fast --resume $(ARGS)

# tests/multidevice and tests/aot are processes of their own: JAX fixes the number of devices and its plugins when it
# starts. tests/multiprocess starts several, which would crowd out other workers.
test: $(STAMP) $(DEVICELESS_STAMP)
	$(PYTEST) tests $(PARALLEL) $(ARGS)
	$(PYTEST) tests/multidevice $(PARALLEL) $(ARGS)
	$(PYTEST) tests/multiprocess $(ARGS)
	$(PYTEST) tests/aot $(ARGS)

test-all: $(STAMP) $(DEVICELESS_STAMP)
	DRAFTCO_TEST_COMPILE=full $(PYTEST) tests -m '' $(PARALLEL) $(ARGS)
	DRAFTCO_TEST_COMPILE=full $(PYTEST) tests/multidevice -m '' $(PARALLEL) $(ARGS)
	DRAFTCO_TEST_COMPILE=full $(PYTEST) tests/multiprocess -m '' $(ARGS)
	$(PYTEST) tests/aot -m '' $(ARGS)

test-fast: $(STAMP)
	$(PYTEST) tests/architecture tests/unit $(PARALLEL) $(ARGS)

# What shows soonest that another JAX behaves otherwise: every room but the families' own arithmetic, of which one file
# generates with each, and the long half of training.
test-newer: $(STAMP)
	$(PYTEST) tests/architecture tests/unit/drafts/test_families.py tests/unit $(PARALLEL) --ignore-glob='tests/unit/drafts/*/*' \
	  --ignore-glob='tests/unit/drafts/test_[!f]*' $(foreach name,dtypes experts warm_up,--ignore=tests/unit/training/test_$(name).py) $(ARGS)

test-aot: $(STAMP) $(DEVICELESS_STAMP)
	$(PYTEST) tests/aot $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Trains the shipped policies and drafts anew and replaces them, with their cards.
warm-start: $(STAMP)
	$(BIN)/python -m draftco_jax.warm_start --digits 2 --out draftco_jax/assets/arithmetic2
	$(BIN)/python -m draftco_jax.warm_start --digits 3 --out draftco_jax/assets/arithmetic3

# Runs and virtual environments stay.
clean:
	rm -rf .cache .pytest_cache .ruff_cache build dist *.egg-info
	find draftco_jax pallas_kernels tests configs -name __pycache__ -type d -prune -exec rm -rf {} +
