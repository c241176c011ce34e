# `make help` lists the targets. Everything runs from .venv, which `install` makes; a second call is quick.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Compiled modules are kept: without them every Ray worker compiles its imports anew.
unexport PYTHONDONTWRITEBYTECODE
# uv does not read pip's own variable for folders of wheels.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
endif
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.DEFAULT_GOAL := help
.PHONY: help install run run-airflow run-prefect up test test-fast test-engines lint format bench clean lock

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## Make the environment in .venv

# torch's CPU wheel where there is one at hand, else the registry's build.
$(STAMP): requirements/dev.txt pyproject.toml
	@command -v uv >/dev/null || $(PYTHON) -m uv --version >/dev/null 2>&1 || $(PYTHON) -m pip install --quiet uv \
		|| { $(PYTHON) -m venv $(VENV)/uv && $(VENV)/uv/bin/pip install --quiet uv; }
	@uv=$$(command -v uv || { test -x $(VENV)/uv/bin/uv && echo $(VENV)/uv/bin/uv; } || echo "$(PYTHON) -m uv"); \
	test -x $(BIN)/python || $$uv venv --quiet --allow-existing --python "$$(command -v $(PYTHON))" $(VENV); \
	export VIRTUAL_ENV=$(CURDIR)/$(VENV); \
	$$uv pip install --quiet -r requirements/dev.txt 'torch==2.13.0+cpu' 2>/dev/null \
		|| $$uv pip install --quiet -r requirements/dev.txt 'torch==2.13.0'; \
	$$uv pip install --quiet --no-deps -e .
	@touch $@

run: install  ## Retrain on a year of flights: pool 1 -> 3 -> 1, XGBoost, MLflow, champion and challenger
	@$(BIN)/python -m shoal.examples.flights

run-airflow: install  ## The same as an Airflow DAG, on an Airflow of its own
	@$(BIN)/python -m shoal.examples.airflow_run

up: install  ## Airflow with its UI, the DAGs and a pool, until Ctrl-C
	@$(BIN)/python -m shoal.examples.airflow_run --up

run-prefect: install  ## The same as a Prefect flow, against a server of its own
	@$(BIN)/python -m shoal.examples.prefect_run

test: install  ## Every test of the core, on a real local pool
	@$(BIN)/python -m pytest -m "not server"

# Apart until their issue is closed: they start a real Airflow and a real Prefect server, over and over.
test-engines: install  ## The tests that start Airflow and Prefect servers
	@$(BIN)/python -m pytest -m server

test-fast: install  ## The tests that need neither Ray nor a server
	@$(BIN)/python -m pytest -m "not ray and not server and not crash"

lint: install  ## ruff, mypy, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: install  ## Let ruff put everything into shape
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

bench: install  ## Measure against the peers, in one run
	@$(BIN)/python -m tests.benchmarks

lock:  ## Pin the development environment anew (no index address, no local path; torch is installed by itself)
	@uv pip compile --quiet --upgrade pyproject.toml --group dev --python-version 3.11 --no-emit-index-url \
		--no-emit-find-links --no-emit-package torch --no-annotate --no-header -o requirements/dev.txt

clean:  ## Remove the environment and every cache
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
