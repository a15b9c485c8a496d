# make run    set up everything, then run the main job: an offline batch with SmolLM2-135M
# make test   the same set-up, then the tests
# make chaos  the long form of the tests: an hour or more of kills, hangs, forged frames, soaking, and a million scheduled steps
# make setup  the set-up alone: .venv, pinned packages, the model folder
# make lint   linters, type checker, import contracts, documents
# make ci     the set-up, the linters and the tests: what a change must pass

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes are started; each would compile torch anew where the environment forbids to keep bytecode.
export PYTHONDONTWRITEBYTECODE :=

LINTERS := lint-style lint-types lint-imports lint-documents

.PHONY: setup run test chaos lint $(LINTERS) bytecode ci format clean

# uv takes a sixth of pip's time, and looks where pip is told to; what it cannot find there, pip installs. Most of what is
# installed is never imported; what is, Python compiles then and keeps.
UV := $(if $(PIP_FIND_LINKS),UV_FIND_LINKS='$(PIP_FIND_LINKS)') $(BIN)/uv pip install --quiet --python $(BIN)/python
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile uv && $(UV) -c constraints.txt -e '.[dev]' || \
		$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(INSTALLED)
	@$(BIN)/python scripts/fetch_model.py smollm2-135m

run: setup
	$(BIN)/python examples/offline_batch.py

# Files of tests go four at a time, a thread each, the longest first: on two cores two more fill the time in which the
# others wait; more where there are more cores: `make test TEST_PROCESSES=6`. A GPU is measured by one process; where
# there is none, its tests are skipped with the others.
TEST_PROCESSES := 4
GPU := $(wildcard /dev/nvidiactl /dev/dxg)

test: setup
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		$(if $(GPU),--ignore=tests/gpu)
	$(if $(GPU),$(BIN)/python -m pytest tests/gpu)

chaos: setup
	$(BIN)/python -m pytest tests/chaos tests/scheduler/test_scheduler_properties.py --chaos-long --timeout 3600 -s

lint: $(LINTERS)

lint-types: $(INSTALLED)
	$(BIN)/mypy

lint-style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-imports: $(INSTALLED)
	$(BIN)/lint-imports

lint-documents: $(INSTALLED)
	$(BIN)/python -m benchmarks report --check
	$(BIN)/python -m benchmarks.models_page --check
	$(BIN)/python scripts/from_vllm.py --check
	$(BIN)/mkdocs build --quiet --strict --site-dir build/site

# The processes of the tests start together: each would compile all that they import. What fails here fails there too.
bytecode: $(INSTALLED)
	-@$(BIN)/python -m pytest --collect-only >/dev/null

ci: setup
	$(MAKE) --jobs=2 --output-sync=target lint-types bytecode lint
	$(MAKE) test

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
