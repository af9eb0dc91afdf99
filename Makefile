# SPDX-License-Identifier: Apache-2.0
# The front door. `make` prints help; every recipe is one or two commands of .venv/bin/mxdraft or pytest.
PYTHON ?= python3
TARGET ?= host
MODEL  ?= smollm2-135m
PROMPT ?= Explain in a few sentences why the sky is blue.

VENV    := .venv
MXDRAFT := $(VENV)/bin/mxdraft
BUNDLE  := build/$(MODEL).mxb
# The trained base plane (empty: rounded weights), the drafter for it, and the text that the n-gram table counts.
DELTA   ?= $(wildcard models/$(MODEL)/qat.delta)
DRAFTER ?= $(if $(strip $(DELTA)),$(wildcard models/$(MODEL)/drafter.npz))
TEXT    ?= $(wildcard models/$(MODEL)/teacher_text.npz)
SCHEDULE?= $(wildcard models/$(MODEL)/schedule.toml)
# Only from the command line: some shells have HOST in their environment, for this machine.
DEVICES := $(if $(findstring command,$(origin HOST)),$(HOST:%=--host %)) $(HOSTS:%=--hosts %)
RUNTIME := $(shell find runtime targets -name '*.[ch]' -o -name '*.toml')
C_FILES = $(shell find runtime tests bench -name '*.[ch]')
# The code that decides what is built, exported and packed.
TOOLS    := toolchain/mxdraft
BUILDER  := $(wildcard $(TOOLS)/ship/*.py)
EXPORTER := $(wildcard $(addprefix $(TOOLS)/,mx.py checkpoint/*.py checkpoint/models.toml export/*.py train/delta.py train/drafter.py))
PACKER   := $(wildcard $(addprefix $(TOOLS)/,pack.py bundle/*.py))

SECONDS ?= 60
# Of bench-peers: base is compared with llama.cpp's Q4_0, full with Q8_0.
PRECISION ?= base

.PHONY: help demo test unit fuzz fuzz-coverage test-deploy test-serve soak races mutate soak-serve test-train lint format analyze verify bench bench-peers build deploy rollback status emulated-pi clean
.DELETE_ON_ERROR:

help:
	@echo "make demo                get the weights, build runtime and bundle, stream an answer"
	@echo "make test                lint and tests (CI also runs the next two)"
	@echo "make test-deploy         deploy to an emulated Raspberry Pi"
	@echo "make test-train          install torch and test training"
	@echo "make test-serve          install real clients and point them at mxdraft serve"
	@echo "make soak-serve SECONDS=600   48 clients at once, half of which hang up"
	@echo "make build TARGET=rpi    the C runtime for a target of targets/ (default: host)"
	@echo "make deploy TARGET=rpi HOST=pi@raspberrypi.local   ship, prove there, switch (docs/deploy.md)"
	@echo "make deploy TARGET=rpi HOSTS=hosts.toml            the same for a fleet"
	@echo "make deploy TARGET=rpi                             an archive with an install.sh instead"
	@echo "make rollback|status HOST=pi@raspberrypi.local     switch back; what is deployed"
	@echo "make verify              prove that the bundle computes the golden bits on this machine"
	@echo "make bench               speed of this machine, compared with its read bandwidth"
	@echo "make bench-peers         the same compared with llama.cpp, which it builds first (PRECISION=full, JSON=FILE, PROMPTS=FILE)"
	@echo "make fuzz SECONDS=600     each fuzzer for so long, with red zones around all memory"
	@echo "make fuzz-coverage       what the fuzzers reach, in lines and branches"
	@echo "make races SECONDS=60     ThreadSanitizer on engines, sequences and the soak"
	@echo "make mutate              break the C code in many small ways and see that a test notices (an hour)"
	@echo "make soak SECONDS=7200    48 sequences that join and leave: texts, memory and descriptors"
	@echo "make lint                ruff, clang-format, codespell, mypy --strict"
	@echo "make format              rewrite Python and C files as make lint wants them"
	@echo "make analyze             gcc's static analyzer on the C runtime"
	@echo "make clean               remove build/ (not the downloaded weights)"

demo: $(BUNDLE)
	$(MXDRAFT) generate -m $(BUNDLE) -p "$(PROMPT)" -n 128 --stats text

test: lint unit

unit: $(BUNDLE) build/rpi/mxdraft
	$(VENV)/bin/pytest -q

fuzz: $(BUNDLE)
	MXDRAFT_FUZZ_SECONDS=$(SECONDS) $(VENV)/bin/pytest -q tests/test_fuzz.py tests/fuzz

fuzz-coverage: $(VENV)/installed
	$(VENV)/bin/python tests/fuzzers.py $(SECONDS)

# ThreadSanitizer: engines that share a tuner, costs of several sequences, copies, and the soak.
races: $(VENV)/installed
	$(VENV)/bin/pytest -q tests/test_limits.py tests/test_tuner.py -k "cache_of_each or data_race or stay_whole"
	MXDRAFT_SOAK_FLAGS="-g -fsanitize=thread -Wno-tsan" MXDRAFT_SOAK_SECONDS=$(SECONDS) $(VENV)/bin/pytest -q -s tests/test_fuzz.py -k soak

# About an hour.
mutate: $(VENV)/installed
	$(VENV)/bin/python tests/mutate.py

soak: $(VENV)/installed
	MXDRAFT_SOAK_SECONDS=$(SECONDS) $(VENV)/bin/pytest -q -s tests/test_fuzz.py -k soak

# Separate, because torch is large and only training needs it.
test-train: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --constraint requirements.lock --editable '.[train]'
	$(VENV)/bin/pytest -q tests/test_qat.py tests/test_draft_train.py

# Their own environment: these clients bring a hundred packages.
CLIENTS := openai==3.57.0 ollama==0.6.3 langchain-openai==1.7.4 wyoming==1.10.2 schemathesis==4.32.5

build/clients/installed: Makefile
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --quiet $(CLIENTS)
	touch $@

test-serve: $(BUNDLE) build/host/mxdraft build/clients/installed
	MXDRAFT_CLIENTS=build/clients/bin/python $(VENV)/bin/pytest -q tests/test_serve.py -k 'real_clients or schemathesis'

soak-serve: $(BUNDLE) build/host/mxdraft
	$(VENV)/bin/python tests/serve_soak.py build/host/mxdraft $(BUNDLE) $(SECONDS)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/clang-format --dry-run --Werror $(C_FILES)
	$(VENV)/bin/codespell
	$(VENV)/bin/mypy

format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	@$(VENV)/bin/clang-format -i $(C_FILES)

# Leaks are for LeakSanitizer: what a reader stores in a model, mxd_model_close() frees in another file.
# The analyzer sees one file at a time; analyze.h tells it what mxd_fail() returns, which status.c defines.
analyze:
	@for file in $(filter-out runtime/src/status.c,$(filter %.c,$(RUNTIME))); do \
		gcc -std=c11 -O2 -ffp-contract=off -D_GNU_SOURCE -Iruntime/include -include tests/c/analyze.h -fanalyzer -Wno-analyzer-malloc-leak \
			-Wall -Wextra -Werror -c $$file -o /dev/null || failed=1; \
	done; test -z "$$failed"

verify: $(BUNDLE)
	$(MXDRAFT) verify -m $(BUNDLE)

bench: $(BUNDLE)
	build/host/mxdraft bench -m $(BUNDLE) --precision base

# In its own environment: it is not a dependency, and takes some 15 minutes to compile.
build/peers/installed:
	$(PYTHON) -m venv build/peers/venv
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" build/peers/venv/bin/python -m pip install \
		--no-binary llama-cpp-python llama-cpp-python==0.3.36
	touch $@

bench-peers: $(BUNDLE) build/peers/installed
	$(VENV)/bin/python -m bench.peers -m $(BUNDLE) --peer build/peers/venv/bin/python --directory build/peers \
		--precision $(PRECISION) --plot build/peers/$(PRECISION).svg $(JSON:%=--json %) $(PROMPTS:%=--prompts %)

build: build/$(TARGET)/mxdraft

deploy: $(BUNDLE) build/$(TARGET)/mxdraft
	$(MXDRAFT) deploy --target $(TARGET) -m $(BUNDLE) $(DEVICES) $(DEST:%=--dest %) $(if $(SERVICE),--service)

rollback status: $(VENV)/installed
	$(MXDRAFT) $@ $(DEVICES) $(DEST:%=--dest %)

emulated-pi: $(VENV)/installed
	$(VENV)/bin/python tests/emulated_pi.py

test-deploy: $(BUNDLE) build/rpi/mxdraft emulated-pi
	MXDRAFT_EMULATED_PI=1 $(VENV)/bin/pytest -q tests/test_deploy_ssh.py

clean:
	rm -rf build

$(VENV)/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint requirements.lock --editable '.[toolchain,fleet,dev]'
	touch $@

build/%/mxdraft: $(VENV)/installed $(RUNTIME) $(BUILDER)
	$(MXDRAFT) build --target $*
	touch $@

# Written last: the export is whole once it is there.
build/$(MODEL)/export.json: $(VENV)/installed $(DELTA) $(DRAFTER) $(EXPORTER)
	$(MXDRAFT) export "$$($(MXDRAFT) fetch $(MODEL))" -o build/$(MODEL) $(DELTA:%=--delta %) $(DRAFTER:%=--drafter %)

$(BUNDLE): build/$(MODEL)/export.json build/host/mxdraft $(TEXT) $(SCHEDULE) $(PACKER)
	$(MXDRAFT) pack build/$(MODEL) -o $@ $(TEXT:%=--text %) $(SCHEDULE:%=--schedule %)
