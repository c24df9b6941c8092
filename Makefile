# make demo   set up and run notebooks/quickstart.ipynb without a front end
# make lab    open it in JupyterLab, which only this machine reaches
# make test   set up and run the tests;  make test-all runs the slow ones too, with all frameworks installed
# make test-gpu  what needs real GPUs, offline; PYTHON=... has a torch with CUDA, WHEELS=... what that Python lacks
# make gpu-wheels  collect these wheels for another machine's Python; PY=3.12, WHEELS=wheels
# make coverage  lines and branches that the tests of make test run, in all processes
# make mutants  plant faults, one at a time, and see them caught
# make renames  rename ten private methods of the agent in a copy of the tree, and see its tests pass
# make frameworks  only trainings with each framework, against torchrun
# make soak   500 random runs with random faults, and a line that is silent for ten minutes; SOAK_RUNS=100, SOAK_SEED=7 as variables
# make screenshots  pictures of runs, the panel and the status in JupyterLab; STORIES="train panel" takes only these
# make bench  measure this package and its peers
# make lint   format and lint checks, who imports whom, types
# make docs   build the site in build/docs; warnings are errors;  make docs-links asks every other site that it links to
# make dist   build sdist and wheel in dist/, check them, try the wheel in an empty environment
# make house  print the structure's figures: packages, layers, cycles, sizes;  make map  draws the packages
# make front-end  build and test labextension/; needs Node 20.19 or newer
#
# PYTHON=...  the Python to use, 3.11 or newer; a torch that it has is used instead of a download
# VENV=...    the environment's folder; one that is there already is used as it is
# LAB="--no-browser --port=9000"  JupyterLab's options; in a container --ip=0.0.0.0, and -p 127.0.0.1:8888:8888 of docker run
# TESTS="tests/unit/payload/test_capture.py -k names"  what pytest gets
# RENAMES="--package sgpu_magic.pool --seed 7 tests/unit/pool"  what else is renamed, and which tests run
# WORKERS=4   test processes; two cores are busy with four

SHELL := /bin/sh
# an environment that happens to be active is not the one that is used
unexport VIRTUAL_ENV
# a process that may not keep what it compiled compiles everything again: the tests start thousands
unexport PYTHONDONTWRITEBYTECODE
VENV ?= .venv
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && exit; done; echo python3)
TESTS ?=
WORKERS ?= 4
# modules that share a home stay in one process; a few modules alone need no further ones
SPREAD = $(if $(TESTS),,--numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder)
WHEELS ?=
PY ?= 3.12
MUTANTS ?=
RENAMES ?=
BENCH ?=
LAB ?=
STORIES ?=

BIN := $(VENV)/bin
# JupyterLab refuses to start as root, the only user of many containers, unless it is asked to
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)
# make demo says how long everything took from here on
BEGUN := $(shell date +%s)
STATED := pyproject.toml constraints.txt scripts/make_venv.py scripts/progress.py scripts/setup.py sgpu_magic/labextension/package.json
NOTEBOOK := notebooks/quickstart.ipynb
OUT := build/demo
CODE := sgpu_magic tests scripts docs/*.py

.PHONY: demo lab test test-all test-gpu gpu-wheels coverage mutants renames frameworks soak screenshots bench lint docs docs-links dist house map format front-end clean help

help:
	@sed -n 's/^# \{0,1\}//p;t;q' Makefile

demo: $(VENV)/.ready-quickstart
	@$(BIN)/python scripts/demo.py $(NOTEBOOK) $(OUT) $(BEGUN) $$(date +%s)

lab: $(VENV)/.ready-quickstart-lab-run-learn-frameworks-ray
	$(BIN)/python -m jupyterlab $(AS_ROOT) $(LAB) $(NOTEBOOK)

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest $(SPREAD) -m "not slow" $(TESTS)

test-all: $(VENV)/.ready-test-frameworks-trackers
	WHOLE_TESTS=1 $(BIN)/python -m pytest $(SPREAD) -m "not soak" $(TESTS)

test-gpu:
	@$(PYTHON) -I scripts/test_gpu.py $(if $(WHEELS),--wheels $(WHEELS)) $(TESTS)

gpu-wheels: $(VENV)/.ready-test
	@$(BIN)/python scripts/gpu_wheels.py $(PY) $(or $(WHEELS),wheels)

coverage: $(VENV)/.ready-test
	@$(BIN)/python scripts/measure_coverage.py

mutants: $(VENV)/.ready-test
	@$(BIN)/python -m tests.mutants $(MUTANTS)

renames: $(VENV)/.ready-test
	@$(BIN)/python -m tests.mutants.renames $(RENAMES)

frameworks: $(VENV)/.ready-test-frameworks
	$(BIN)/python -m pytest tests/frameworks $(TESTS)

soak: $(VENV)/.ready-test
	PYTHONPATH=tests:tests/support $(BIN)/python -m soak
	$(BIN)/python -m pytest -m soak

screenshots: $(VENV)/.ready-test
	$(BIN)/python scripts/screenshots.py build/screenshots --docs docs $(STORIES)

bench: $(VENV)/.ready-test-frameworks
	PYTHONPATH=tests/support $(BIN)/python -m tests.benchmarks $(BENCH)

lint: $(VENV)/.ready-test
	$(BIN)/python -m ruff format --check $(CODE)
	$(BIN)/python -m ruff check $(CODE)
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

docs: $(VENV)/.ready-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --jobs 2 -b html docs build/docs
	$(BIN)/proselint check --config docs/proselint.json README.md CONTRIBUTING.md SECURITY.md docs/*.md docs/*/*.md

docs-links: $(VENV)/.ready-docs
	$(BIN)/python -m sphinx --keep-going -b linkcheck docs build/docs-links

dist: $(VENV)/.ready-dist
	@$(BIN)/python scripts/dist.py dist

house:
	@$(PYTHON) scripts/house.py

map:
	@$(PYTHON) scripts/house.py --map

format: $(VENV)/.ready-test
	$(BIN)/python -m ruff format $(CODE)
	$(BIN)/python -m ruff check --fix $(CODE)

front-end: $(VENV)/.ready-test
	$(BIN)/python scripts/front_end_records.py
	cd labextension && npm ci && npm run build:view && npm run build:plugin && npm run check && npm run lint && npm test

clean:
	rm -rf build .venv

# one environment; a stamp for each set of extras says that it is installed as pyproject.toml now wants it
$(VENV)/.ready-%: $(STATED)
	@$(PYTHON) -I scripts/make_venv.py $(VENV)
	@$(BIN)/python -I scripts/setup.py $(subst -, ,$*)
	@touch $@
