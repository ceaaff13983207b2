# Every target but help sets up first: .venv with the pinned stack of constraints.txt. When it is
# there already, that costs a fraction of a second.
#   make train ARGS="--epochs 3"     more flags for the command
#   DLRM_DEVICE=cpu make train       cpu or cuda instead of what is detected
SHELL := /bin/sh
PYTHON ?= python3
ARGS ?=
# relative, so that a checkout under a path with spaces works
PY := .venv/bin/python
# test workers: a number, or one for every core up to 8
JOBS ?= logical

# The environment is the pinned one whatever shell, conda or ROS set-up make is called from.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX

.PHONY: help setup train test test-all lab lint format check

help:
	@echo 'make train      set up, prepare the bundled Criteo-format sample, train on it'
	@echo 'make test       set up, run the tests (test-all: the slow ones too)'
	@echo 'make lab        set up, open JupyterLab on the tutorials'
	@echo 'make check      set up, say what this machine has and what is missing'
	@echo 'make lint       set up, ruff and mypy (make format: let ruff mend what it can)'
	@echo 'make setup      set up only'
	@echo
	@echo 'More flags: make train ARGS="--epochs 3". CPU or CUDA by hand: DLRM_DEVICE=cpu make train.'

setup:
	@$(PYTHON) dlrm/setup_env.py

train: setup
	$(PY) -m dlrm.preprocess --data criteo --input data/criteo_sample.tsv --out runs/sample-data
	$(PY) -m dlrm.train --preset tiny --data criteo --input runs/sample-data --out runs/sample --overwrite $(ARGS)

test: setup
	$(PY) -m pytest -n $(JOBS) --maxprocesses 8 $(ARGS)

test-all: setup
	$(PY) -m pytest -n $(JOBS) --maxprocesses 8 -m "" $(ARGS)

lab: setup
	$(PY) -m jupyterlab $(ARGS) tutorials

check: setup
	@$(PY) -m dlrm.check $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(wildcard dlrm compiler)

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
