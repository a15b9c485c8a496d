# make run    set up everything, then run the main job: an offline batch with SmolLM2-135M
# make test   the same set-up, then the tests
# make chaos  the long form of the tests: an hour or more of kills, hangs, forged frames, soaking, and a million scheduled steps
# make setup  the set-up alone: .venv, pinned packages, the model folder
# make lint   linters, type checker, import contracts

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup run test chaos lint format clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(INSTALLED)
	@$(BIN)/python scripts/fetch_model.py smollm2-135m

run: setup
	$(BIN)/python examples/offline_batch.py

# These tests go two at a time, a thread each; those that count processes or look at the clock have the machine alone.
PARALLEL := $(addprefix tests/,attention chat checkpoint e2e kernels kv_cache model_executor scheduler testing worker \
	chaos/test_ring_model.py chaos/test_fuzz_messages.py chaos/test_fuzz_shared_memory.py)

test: setup
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist loadfile $(PARALLEL)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(PARALLEL))

chaos: setup
	$(BIN)/python -m pytest tests/chaos tests/scheduler/test_scheduler_properties.py --chaos-long --timeout 3600 -s

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks report --check

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
