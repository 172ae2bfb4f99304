# make help lists the targets. VENV is the virtual environment; PIP_ARGS goes to each pip install.
VENV ?= .venv
PYTHON ?= python3.11
PIP_ARGS ?= $(NIGHTSHIFT_PIP_ARGS)
PYTEST_ARGS ?=
# Processes that share the unit and contract tests, file by file: auto is one a core, 0 is pytest's own alone.
WORKERS ?= auto

BIN := $(VENV)/bin
LOCKS := requirements/cpu.txt requirements/cpu-hashed.txt pyproject.toml scripts/setup.sh
RUN_STAMP := $(VENV)/.nightshift-cpu
DEV_STAMP := $(VENV)/.nightshift-dev
DEMO := examples/first_run
# The contract tests first, in their order: they hold the long files, and the many short ones fill the gaps at the end.
UNIT := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder tests/contract tests/unit
SETUP := PYTHON="$(PYTHON)" NIGHTSHIFT_PIP_ARGS="$(PIP_ARGS)" bash scripts/setup.sh "$(VENV)"

export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv venv-dev data demo harder test test-unit test-integration test-deploy lint format bench chaos docs dashboards proto lock clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(RUN_STAMP) ## make the virtual environment from the locks (Python 3.11, CPU)

venv-dev: $(DEV_STAMP) ## the same with the developers' tools

$(RUN_STAMP): $(LOCKS)
	$(SETUP) cpu
	touch $@

$(DEV_STAMP): $(LOCKS) requirements/dev.txt
	$(SETUP) dev
	touch $(RUN_STAMP) $@

data: $(RUN_STAMP) ## make the prompts of the first run
	$(BIN)/python $(DEMO)/make_data.py

demo: data ## the first run: a model learns a task in minutes
	$(BIN)/nightshift run $(DEMO)/job.yaml

harder: data ## the second task, unfinished after as many steps
	$(BIN)/nightshift run $(DEMO)/harder.yaml

test: $(DEV_STAMP) ## all tests: unit and contract, then the real parts
	$(UNIT) $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/integration $(PYTEST_ARGS)

test-unit: $(DEV_STAMP) ## the tests that need no real parts: minutes
	$(UNIT) $(PYTEST_ARGS)

test-integration: $(DEV_STAMP) ## the tests on the real vLLM, Ray Serve and DeepSpeed
	$(BIN)/python -m pytest tests/integration $(PYTEST_ARGS)

test-deploy: $(DEV_STAMP) ## the tests of images, chart, rules and dashboards (docs/deployment.md says what they need)
	$(BIN)/python -m pytest -m deploy tests/deploy $(PYTEST_ARGS)

lint: $(DEV_STAMP) ## style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python scripts/import_rules.py

format: $(DEV_STAMP) ## put the sources into shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(DEV_STAMP) ## measure; never part of a test run
	$(BIN)/python -m pytest -m bench tests/bench $(PYTEST_ARGS)

chaos: $(DEV_STAMP) ## kill everything at random moments: 500 with simulated services, 60 with the real parts
	$(BIN)/python -m pytest -m chaos tests/chaos -s $(PYTEST_ARGS)

docs: $(DEV_STAMP) ## write docs/configuration.md and the tables of docs/observability.md
	$(BIN)/python scripts/configuration_reference.py
	$(BIN)/python scripts/metrics_reference.py

dashboards: $(DEV_STAMP) ## write Grafana's dashboards from deploy/grafana
	$(BIN)/python -m deploy.grafana.build

proto: $(DEV_STAMP) ## write the gRPC stubs from proto/
	PYTHON=$(BIN)/python bash proto/generate.sh

lock: $(DEV_STAMP) ## write the locks from the virtual environment
	$(BIN)/python scripts/lock.py

clean: ## remove caches and generated data; the virtual environment and runs stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist nightshift.egg-info $(DEMO)/data
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
