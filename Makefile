# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. Every target makes the environment that it needs; a second run reinstalls nothing.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The interpreter and PyTorch's CPU wheel index, for scripts/make_venv.sh; both may be overridden.
PYTHON ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Added to every pytest call: make test PYTEST_ARGS='-k reload'
PYTEST_ARGS ?=
# Added to the benchmarks: make bench BENCH_ARGS=--write
BENCH_ARGS ?=

export PYTHON TORCH_INDEX
# GiB of key-value cache: vLLM's default on a CPU takes more than a small machine has.
export VLLM_CPU_KVCACHE_SPACE = 1
# Nothing here needs a hub, and nobody's tests should report usage.
export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1
export DO_NOT_TRACK = 1
# OpenMP threads that spin while they wait starve each other where two engines share two cores (ten times slower).
export OMP_WAIT_POLICY = PASSIVE

# Engines that tests run side by side.
WORKERS ?= 2

BIN := .venv/bin
HOST_TESTS := not full and not gpu and not plain and not browser
PYTEST := $(BIN)/python -m pytest

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup: ## make .venv: vLLM for CPUs, this package (editable) and the tools
	@scripts/make_venv.sh host

.PHONY: setup-plain
setup-plain: ## make .venv-plain: this package and pytest, no vLLM
	@scripts/make_venv.sh plain

.PHONY: setup-floor
setup-floor: ## make .venv-floor: as .venv-plain, with the oldest dependencies admitted
	@scripts/make_venv.sh floor

.PHONY: setup-lowest
setup-lowest: setup-plain ## make .venv-lowest: .venv-plain, with the oldest dependencies admitted but for torch
	@scripts/make_venv.sh lowest

.PHONY: demo
demo: setup ## hot-swap a real engine A -> B -> A, survive a failing update, compare with stock
	$(BIN)/python examples/demo.py

.PHONY: check
check: setup ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: docs
docs: setup ## build the documentation site in build/site, warnings being errors (fetches nothing)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

.PHONY: test-fast
test-fast: setup ## unit tests, and four families on the real engine (under 3 minutes)
	$(PYTEST) -x -m "not slow and not full and not gpu" tests/unit $(PYTEST_ARGS)
	$(PYTEST) -x -m "not slow and not full and not gpu" tests/integration/test_reload_matrix.py \
		-k "qwen2tied-a or mixtral-a or w8a8dyn-a or awq-a" $(PYTEST_ARGS)

.PHONY: test
test: test-unit test-kernels test-plain test-lowest test-engine ## everything but `full` (under 30 minutes on two cores)

# What measures time runs alone; engines, which are single processes mostly, run $(WORKERS) at a time.
TIMED := tests/integration/test_otel.py

.PHONY: test-unit
test-unit: setup ## the part of `make test` in one process: unit tests, and engines whose time is measured
	$(PYTEST) -m "$(HOST_TESTS)" tests/unit $(TIMED) $(PYTEST_ARGS)

.PHONY: test-engine
test-engine: setup ## the part of `make test` on real engines, WORKERS=2 of them at a time (3 GiB each)
	$(PYTEST) -m "$(HOST_TESTS)" -n $(WORKERS) --dist loadgroup tests/integration $(TIMED:%=--ignore=%) $(PYTEST_ARGS)

.PHONY: test-kernels
test-kernels: setup ## Triton's kernels, interpreted on the CPU and compiled for sm_90 (a minute, no GPU)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels $(PYTEST_ARGS)

# Unit tests of where the host and wrapt meet: they run with vLLM (test-unit), without it, and with the oldest wrapt.
PLAIN := tests/plain tests/unit/test_patching.py tests/unit/test_unproven.py tests/unit/test_reloadable.py

.PHONY: test-plain
test-plain: setup-plain ## the part of `make test` without vLLM
	.venv-plain/bin/python -m pytest $(PLAIN) $(PYTEST_ARGS)

.PHONY: test-lowest
test-lowest: setup-lowest ## test-plain with the oldest dependencies admitted, but for torch
	.venv-lowest/bin/python -m pytest $(PLAIN) $(PYTEST_ARGS)

.PHONY: test-floor
test-floor: setup-floor ## test-plain with the oldest dependencies admitted, torch too (gigabytes)
	.venv-floor/bin/python -m pytest $(PLAIN) $(PYTEST_ARGS)

.PHONY: test-browser
test-browser: setup ## the HTML report in a headless Chromium (needs one: apt-get install chromium)
	$(BIN)/python -c 'import playwright' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check 'playwright>=1.45'
	$(PYTEST) -m browser tests/browser $(PYTEST_ARGS)

.PHONY: test-ray
test-ray: setup ## two workers that are actors of a real Ray (makes .venv-ray)
	@scripts/make_venv.sh ray
	.venv-ray/bin/python -m pytest -m ray tests/ray $(PYTEST_ARGS)

.PHONY: test-phoenix
test-phoenix: setup ## traces of a real engine on the web page of Phoenix (makes .venv-phoenix; needs a Chromium)
	@scripts/make_venv.sh phoenix
	$(PYTEST) -m phoenix tests/phoenix $(PYTEST_ARGS)

.PHONY: test-full
test-full: setup ## the whole product of families, ways and modes (hours; goes on where it was stopped)
	$(PYTEST) tests/integration/test_reload_matrix.py tests/integration/test_modes.py tests/integration/test_readme.py \
		--record .artifacts/full.jsonl $(PYTEST_ARGS) || failed=1; \
	$(BIN)/python -m tests.integration._record .artifacts/full.jsonl > docs/full-results.md; \
	exit $${failed:-0}

.PHONY: bench
bench: setup ## measure against stock vLLM, paired in one run
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/verify_cost.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/ledger_cost.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/telemetry_cost.py $(BENCH_ARGS)

.PHONY: clean
clean: ## remove caches and build outputs; environments stay
	rm -rf build dist *.egg-info .coverage .coverage.* htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache .artifacts
	find weightlife kernels otel tests examples benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.PHONY: distclean
distclean: clean ## remove the environments too
	rm -rf .venv .venv-plain .venv-floor .venv-lowest .venv-ray .venv-phoenix
