# Every target does all of its own set-up: a virtual environment in .venv with pinned packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN := $(BIN)/python launchers/run_glm5_3_flash_lora.py
# One thread: the tiny model is too small to share between threads.
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart test test-slow test-gpu test-kernels lint format docs check-types check-imports sglang-env clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,docs]'
	touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/python benchmarks/quickstart.py --tour

test: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow and not gpu and not multi_gpu and not sglang'

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m 'slow and not gpu and not multi_gpu and not sglang'

# Triton lies outside of .venv: where it can be imported, torch takes other ways.
TRITON := 3.6.0
TRITON_SITE := build/triton-$(TRITON)

$(TRITON_SITE)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(TRITON_SITE) triton==$(TRITON)
	touch $@

test-kernels: $(TRITON_SITE)/.installed
	PYTHONPATH=$(TRITON_SITE) TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/model/test_*_interpreted.py
	PYTHONPATH=$(TRITON_SITE) $(BIN)/python -m pytest tests/model/test_*_compiled.py

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m 'gpu or multi_gpu'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in build/site; a dead link is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# SGLang pins other versions of torch and transformers, so it lives in an environment of its own.
sglang-env: .venv-sglang/.installed

.venv-sglang/.installed:
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --upgrade pip
	.venv-sglang/bin/python -m pip install --quiet sglang==0.5.23 pytest
	.venv-sglang/bin/python -m pip install --quiet --no-deps -e .
	touch $@

test-sglang: $(STAMP) .venv-sglang/.installed
	$(BIN)/python -m pytest -m sglang

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
