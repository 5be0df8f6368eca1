# Everything a contributor or a first-time user types. `make` alone lists the targets.

.DEFAULT_GOAL := help
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV_VERSION := 0.13.9
# The newest interpreter on the PATH that the project supports; override with PYTHON=/path/to/python.
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
PROJECTS := pyproject.toml kernels/pyproject.toml platform/pyproject.toml

# What `make test-fast` runs: most of what a change of specs, data, documents or an operator would break.
FAST := tests/test_documents.py tests/images \
	$(filter-out %/test_client.py,$(wildcard tests/platform/test_*.py tests/platform/*/test_*.py)) \
	tests/charts/test_values.py tests/kernels/test_launch.py tests/kernels/test_rms_norm.py tests/kernels/test_readme.py \
	$(addprefix tests/runtime/,data report run_folder checkpoint/test_manifest.py metrics/test_mfu.py objectives/test_next_token.py \
	optim/test_optimizer.py process/test_error_explanations.py process/test_signals.py)

.PHONY: help setup finetune test test-fast test-gpu e2e lint format lock docs docs-serve clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv with the locked packages and the project itself

# Compiled at set-up on all cores, packages are not compiled again by every process where Python may not write bytecode.
$(READY): requirements.lock requirements-dev.lock $(PROJECTS)
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed; put it on the PATH or say make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(VENV) --compile-bytecode --require-hashes -r requirements.lock -r requirements-dev.lock
	$(BIN)/uv pip install --quiet --python $(VENV) --no-deps --no-build-isolation -e kernels -e platform -e .
	@touch $@

finetune: $(READY) ## Train, evaluate and export a small Llama on real text (no GPU needed)
	$(BIN)/pyflyte run workflows/finetune.py finetune

# One more than the cores that they are counted on: many wait, for processes that they have started and ended.
# Without a GPU, as in CI: what tests compare with is computed on the CPU in fp32.
test: $(READY) ## Run the tests
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(READY) ## Run the quick tests: specs, data, checkpoints, kernels, documents; under two minutes
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n 3 --dist loadfile $(FAST) $(ARGS)

test-gpu: $(READY) ## Run the tests of kernels, and those of the runtime that need a GPU, on one NVIDIA GPU
	$(BIN)/python -m pytest -n 4 tests/kernels $(ARGS)
	$(BIN)/python -m pytest -n 4 tests/runtime -m "gpu or any_device" $(ARGS)

e2e: $(READY) ## Run the tests that need a cluster; docs/cluster-tests.md
	@for name in KUBECONFIG FLYTECTL_CONFIG STRATA_E2E_IMAGE; do \
		test -n "$${!name}" || { echo "error: set $$name; docs/cluster-tests.md says to what" >&2; exit 2; }; done
	$(BIN)/python -m pytest tests/e2e $(ARGS)

lint: $(READY) ## Check style, types, layering, spelling, documents and the images
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python images/check.py
	$(BIN)/python tools/prose.py docs
	@site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && \
		NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir "$$site" && echo "the site builds"

format: $(READY) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## Regenerate the generated pages: run spec, support matrix, commands, chart values
	$(BIN)/python -m strata_platform.spec.reference_docs
	$(BIN)/python -m strata_platform.spec.support_matrix
	$(BIN)/python -m strata_platform.cli_docs
	$(BIN)/python -m strata_platform.chart.values_docs

docs-serve: $(READY) ## Show the documents as a site on http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lock: $(READY) ## Resolve the dependencies anew
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --upgrade \
		--no-emit-package strata-kernels --no-emit-package strata-platform pyproject.toml -o requirements.lock
	@# From the image's own versions; an extra may take an earlier one.
	cp requirements.lock images/extras.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --all-extras \
		--no-emit-package strata-kernels --no-emit-package strata-platform pyproject.toml -o images/extras.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --upgrade \
		--group pyproject.toml:dev -c requirements.lock -o requirements-dev.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
		platform/pyproject.toml -c requirements.lock -o images/platform.lock

clean: ## Remove the environment, caches and everything that runs wrote
	rm -rf $(VENV) out site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
