# The front door. `make` prints help; every recipe is one or two commands of .venv/bin/mxdraft or pytest.
PYTHON ?= python3
TARGET ?= host
MODEL  ?= smollm2-135m
PROMPT ?= Explain in a few sentences why the sky is blue.

VENV    := .venv
MXDRAFT := $(VENV)/bin/mxdraft
BUNDLE  := build/$(MODEL).mxb
DELTA   := $(wildcard models/$(MODEL)/qat.delta)
RUNTIME := $(shell find runtime targets -name '*.[ch]' -o -name '*.toml')

.PHONY: help demo test lint verify build clean
.DELETE_ON_ERROR:

help:
	@echo "make demo                get the weights, build runtime and bundle, stream an answer"
	@echo "make test                everything that CI runs"
	@echo "make build TARGET=rpi    the C runtime for a target of targets/ (default: host)"
	@echo "make verify              prove that the bundle computes the golden bits on this machine"
	@echo "make lint                ruff, mypy --strict"
	@echo "make clean               remove what was built (not the downloaded weights)"

demo: $(BUNDLE)
	$(MXDRAFT) generate -m $(BUNDLE) -p "$(PROMPT)" -n 128 --stats text

test: $(BUNDLE) build/rpi/mxdraft lint
	$(VENV)/bin/pytest -q

lint: $(VENV)/installed
	$(VENV)/bin/ruff check toolchain tests runtime
	$(VENV)/bin/ruff format --check toolchain tests runtime
	$(VENV)/bin/mypy

verify: $(BUNDLE)
	$(MXDRAFT) verify -m $(BUNDLE)

build: build/$(TARGET)/mxdraft

clean:
	rm -rf build

$(VENV)/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint requirements.lock --editable '.[toolchain,dev]'
	touch $@

build/%/mxdraft: $(VENV)/installed $(RUNTIME)
	$(MXDRAFT) build --target $*
	touch $@

build/$(MODEL)/model.full.onnx: $(VENV)/installed $(DELTA)
	$(MXDRAFT) export "$$($(MXDRAFT) fetch $(MODEL))" -o build/$(MODEL) $(DELTA:%=--delta %)

$(BUNDLE): build/$(MODEL)/model.full.onnx build/host/mxdraft
	$(MXDRAFT) pack build/$(MODEL) -o $@
