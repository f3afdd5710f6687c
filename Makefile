# make demo   the main job: installs what it needs, trains examples/train_gpt.py, draws its loss; DEMO="--steps 50"
# make test   the test suite in minutes, with torch and what tests need alone; make test-full adds rows that need other
#             packages, all rows of its tables, and what is slow
# make chaos  training with ranks and replicas that are killed and stopped: CHAOS="--minutes 120" goes on for so long
# make mutants  seeded defects, and which tests catch them: MUTANTS="comm hooks" runs some, "--full" adds the full suite
# make docs   the documentation site, docs/_build/html; its notebooks are executed, which takes minutes the first time
# make lint   style, types, import contract
# make gpu    on a machine with a GPU: its tests, and figures beside DDP's, into benchmarks/RESULTS-gpu.md, in ten minutes.
#             The first Python of PYTHON, PATH and .venv whose torch sees the GPU is taken; GPU="--only tests" runs a part
#
# Each makes what it needs in .venv; a second call finds it there. PYTHON=python3.12 chooses the interpreter.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-input --constraint constraints.txt
DEPENDENCIES := pyproject.toml constraints.txt
DEMO ?=
PYTEST ?=
SPHINX ?=
CHAOS ?=
MUTANTS ?=
GPU ?=

export OMP_NUM_THREADS ?= 1
# Else every process that a test starts would compile ltx anew: 0.1 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-full docs chaos mutants lint format notebooks bench gpu clean
.DELETE_ON_ERROR:

# The model is small and the number of processes any: all use the CPU, even if there are GPUs.
demo: $(VENV)/.demo
	CUDA_VISIBLE_DEVICES= $(BIN)/ltx run -n 2 examples/train_gpt.py --out ltx-demo $(DEMO)

# In two processes, of which each takes a module when it is done with one. PYTEST="--shard 1/4" runs a quarter.
test: $(VENV)/.test
	@echo "The tests take five to eight minutes on two cores. The end says how many rows wait for .ci/run, with more packages."
	$(BIN)/python -m tests.shards --doctest-ignore-import-errors $(PYTEST)

test-full: $(VENV)/.full
	@echo "All of the suite takes half an hour to an hour and a half on two cores. PYTEST=\"--part 1/4\": a quarter of its rows."
	$(BIN)/python -m tests.shards --full $(PYTEST)

# Warnings are errors. SPHINX="-D nb_execution_mode=off" shows the notebooks' committed outputs instead.
docs: $(VENV)/.full
	$(BIN)/python -m sphinx -W -q -b html $(SPHINX) docs docs/_build/html

chaos: $(VENV)/.full
	$(BIN)/python -m tests.chaos $(CHAOS)

mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants $(MUTANTS)

lint: $(VENV)/.full
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.full
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every notebook is executed from a clean kernel and fails on the first cell that raises.
notebooks: $(VENV)/.full
	@for notebook in $(wildcard notebooks/*.ipynb); do \
		echo "executing $$notebook" && \
		$(BIN)/jupyter-execute --timeout=300 "$$notebook" || exit 1; \
	done

# One table: ltx, DDP, Fabric, accelerate and JAX on loopback and two shaped links. Others beside it:
# python -m benchmarks.step_time, benchmarks.collectives, benchmarks.hooks, benchmarks.codecs, benchmarks.strategies,
# benchmarks.simulated, benchmarks.studies.hooks, benchmarks.studies.strategies, benchmarks.studies.published,
# benchmarks.start, benchmarks.checks, benchmarks.record, benchmarks.overhead, benchmarks.memory, benchmarks.field (right or wrong, by library).
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.table $(BENCH)

# Needs no environment of its own: it finds one, or makes it.
gpu:
	@$(PYTHON) -m benchmarks.gpu $(GPU)

clean:
	rm -rf $(VENV) .gpu ltx-demo docs/_build docs/_dark docs/reference/names .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.python $(DEPENDENCIES)
	$(INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/.bench: $(VENV)/.python $(DEPENDENCIES)
	$(INSTALL) --editable '.[bench]'
	touch $@

$(VENV)/.test: $(VENV)/.python $(DEPENDENCIES)
	@echo "Installing torch and what the tests need into $(VENV): a minute or two, mostly torch's download."
	$(INSTALL) --editable '.[test]'
	touch $@

# Also models of other libraries, torchft, JupyterLab in a browser, and the documentation.
$(VENV)/.full: $(VENV)/.test
	$(INSTALL) --editable '.[browser,demo,docs,lint,models,notebook,test,torchft]'
	touch $@
