# Few targets; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help run test check format test-compose bench bench-routing bench-routers lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

run: $(STAMP) ## set up and run: a real Envoy on 127.0.0.1:8080, the router, four stand-in engines
	@$(BIN)/extproc up

test: $(STAMP) ## set up and run the tests, real Envoy included
	$(BIN)/python -m pytest

test-compose: $(STAMP) ## run the compose stack for real; needs docker and docker-compose, or root and dockerd
	EXTPROC_COMPOSE=1 $(BIN)/python -m pytest tests/compose

check: $(STAMP) ## the gate: format, lint, types, import layers, core coverage
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/core --cov --cov-fail-under=100

format: $(STAMP) ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## measure decisions, latency and throughput through Envoy, other routers beside, and memory
	$(BIN)/python -m bench

bench-routing: $(STAMP) ## simulate the routing rule and its peers; renews docs/routing.md
	$(BIN)/python -m bench.routing --write

bench-routers: $(STAMP) ## several routers with and without the decision log, real Envoy and Valkey, faults
	$(BIN)/python -m bench.routers --write

COMPILE = $(BIN)/pip-compile --quiet --generate-hashes --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
	--allow-unsafe --no-strip-extras --no-header

lock: ## recompute requirements.lock and the image's from pyproject.toml
	$(COMPILE) --extra=dev --extra=envoy --extra=log --extra=plot --output-file=requirements.lock pyproject.toml
	cp requirements.lock compose/requirements.lock
	$(COMPILE) --extra=log --output-file=compose/requirements.lock pyproject.toml

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist *.egg-info
