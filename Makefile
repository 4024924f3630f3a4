# Everything runs inside .venv, which the first target that needs it makes from the lock. ARGS reach the command:
#   make test ARGS="--case A1"      make demo ARGS="--steps 200"

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LOCK   := requirements/test.lock
ARGS   ?=

# On a GPU the tests share one process; on a CPU two workers share the cores (tests/conftest.py decides).
PYTEST := -m pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint check aot bench docs lock test-matrix test-oldest test-newest clean

help:                   ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)          ## make .venv from the lock

$(STAMP): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"make: Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}. Name another: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the locked environment into $(VENV); the first time takes some minutes."
	$(BIN)/python -m pip install --quiet --requirement $(LOCK)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: $(STAMP)          ## train a small Mixtral with and without block-sparse experts
	$(BIN)/blocksparse-moe demo $(ARGS)

test: $(STAMP)          ## the whole suite
	$(BIN)/python $(PYTEST) $(ARGS)

lint: $(STAMP)          ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint             ## lint and the quick part of the suite, in under two minutes
	$(BIN)/python $(PYTEST) -m "not slow and not gpu and not aot_full" --hypothesis-profile quick $(ARGS)

aot: $(STAMP)           ## compile every configuration for every architecture, without a GPU
	$(BIN)/python $(PYTEST) -m aot_full $(ARGS)

bench: $(STAMP)         ## microbenchmarks, for example ARGS="sdd --shape mixtral-8x7b"
	$(BIN)/python -m bench $(ARGS)

docs: $(STAMP)          ## the documentation as a website, in site/
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/zensical build --strict

lock:                   ## write the lock anew; what it names already keeps its version
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --constraint $(LOCK) '.[test]'
	@{ sed -n '/^#/p' $(LOCK); .venv-lock/bin/python -m pip freeze --all --exclude blocksparse-moe \
	   | sed -E -e '/^(pip|wheel|cuda-.*|nvidia-.*)==/d' -e 's/\+[^ ]*$$//'; } > $(LOCK).new
	mv $(LOCK).new $(LOCK)
	rm -rf .venv-lock

# Both ends of what is supported, each in its own environment; run before an issue is closed.
test-matrix: test-oldest test-newest    ## the suite with the oldest and with the newest torch, Triton, transformers

test-oldest:            ## with the oldest
test-newest:            ## with the newest
test-oldest test-newest: test-%:
	test -x .venv-matrix/$*/bin/python || $(PYTHON) -m venv .venv-matrix/$*
	.venv-matrix/$*/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager \
		--requirement requirements/$*.txt --editable '.[test]'
	.venv-matrix/$*/bin/python $(PYTEST) $(ARGS)

clean:                  ## remove the environments and what the tools left behind
	rm -rf .venv .venv-lock .venv-matrix build dist site .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
