# ComputeShare: `make` lists the targets.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DATASET ?= digits
WORKERS ?= 2
MINUTES ?= 30
JOBS ?= 1
UV_VERSION := 0.13.9
unexport PYTHONDONTWRITEBYTECODE # with it every process that starts compiles torch anew: seconds each

.PHONY: help install demo test lint check e2e pictures wheel bench chaos up down migrate lock clean

help: ## List the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## Make the virtual environment from the lock file

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "Python 3.11, 3.12 or 3.13 is needed; name one by PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip sync --python $(BIN)/python --require-hashes requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --editable .
	@touch $(STAMP)

demo: install ## Train DATASET on this machine with WORKERS workers, all in one command
	@$(BIN)/computeshare demo --dataset $(DATASET) --workers $(WORKERS)

test: install ## Run the tests, of slow ones a sample that differs by commit; `make chaos` runs them all
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: install ## Format, lint, types, direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint ## The same, migrations and fast tests
	$(BIN)/python -m pytest -n auto tests/unit tests/integration/api/test_database.py

e2e: install ## Run the tests that start processes and a browser
	$(BIN)/python -m pytest tests/e2e

pictures: install ## Take the README's pictures anew
	$(BIN)/python -m pytest -q tests/e2e/pages/test_readme_pictures.py -k taken
	cp artifacts/screenshots/readme/*.png docs/images/

wheel: install ## Build the wheel, into dist
	@rm -rf build
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/computeshare-*.whl

bench: install ## Measure beside torch DistributedDataParallel, over thin links too (as root), into bench-results; ONLY="PART ..."
	@$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY)) $(if $(QUICK),--quick)

chaos: install ## Run a release's schedules, kills, cuts and fuzzing for MINUTES, JOBS at a time, going on from the last time
	$(BIN)/python -m bench.chaos --minutes $(MINUTES) --jobs $(JOBS)

up: install ## Start a control plane here, with WORKERS local workers
	@$(BIN)/computeshare up --workers $(WORKERS)

down: install ## Stop the control plane that runs here
	@$(BIN)/computeshare down

migrate: install ## Bring the database up to date (`computeshare up` does so by itself)
	$(BIN)/alembic upgrade head

lock: install ## Pin the newest versions that pyproject.toml allows, for Linux and macOS
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-header \
		--generate-hashes --all-extras pyproject.toml --output-file requirements.lock

clean: ## Remove the virtual environment and what tools left behind
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache artifacts
