# torchweld from a fresh clone: `make test` and `make demo` need Python >= 3.10, g++ and make.
#
#   PYTHON=python3.12   the interpreter          TORCH=2.11.0   the torch to install
#   VENV=none           use the current environment as it is; touches no network
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
TORCH ?= 2.13.0
# The Triton that goes with it; a CUDA build of torch brings its own.
TRITON ?= 3.7.1
VENV ?= .venv
# The CUDA library is built if there is a GPU to run it; CUDA=1 or CUDA=0, or TORCHWELD_CUDA, overrides this.
CUDA ?= $(or $(TORCHWELD_CUDA),$(if $(shell command -v nvidia-smi),1,0))
export TORCHWELD_CUDA := $(CUDA)

# Compiled modules are kept, whatever the environment says: tests start hundreds of interpreters.
export PYTHONDONTWRITEBYTECODE :=

ifeq ($(VENV),none)
PY := $(PYTHON)
else
PY := $(VENV)/bin/python
endif
EMULATOR := build/emulator/lib
EMULATOR_ASAN := build/emulator-asan/lib
ASAN := build/asan/lib
PYTEST := $(PY) -m pytest
# The tests of some lanes.
lanes = $$($(PY) tests/helpers/lanes.py $(1))

say = @printf '\033[1m== %s\033[0m\n' "$(1)"

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

.PHONY: tools
tools:
	@command -v $(PYTHON) >/dev/null || { echo "torchweld: $(PYTHON) was not found: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "torchweld: $(PYTHON) is older than 3.10: name a newer one with PYTHON=..."; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "torchweld: no C++ compiler was found: apt-get install g++"; exit 1; }
	@[ "$(VENV)" = none ] || $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "torchweld: $(PYTHON) has no venv module: apt-get install python3-venv"; exit 1; }

# The environment: everything pinned, then the package in place.
.PHONY: env
ifeq ($(VENV),none)
env: tools
	@$(PY) -c 'import torchweld' 2>/dev/null || $(PY) -m pip install -q --no-index --no-build-isolation --no-deps -e .
	@$(PY) csrc/build.py
else
env: tools $(VENV)/.ready
	@$(PY) csrc/build.py

$(VENV)/.ready: requirements.txt pyproject.toml setup.py
	$(call say,making $(VENV) with torch $(TORCH))
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q --upgrade pip
	@$(PY) -m pip install -q "torch==$(TORCH)"
	@$(PY) -c 'import triton' 2>/dev/null || $(PY) -m pip install -q "triton==$(TRITON)"
	@$(PY) -m pip install -q -r requirements.txt
	$(call say,building torchweld)
	@$(PY) -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@
endif

.PHONY: build
build: env ## Build the native libraries in place for this machine; only what changed is compiled

.PHONY: emulator
emulator: env ## Build the CUDA kernels for the CPU, for the tests
	@$(PY) csrc/build.py --emulator --out $(EMULATOR)

.PHONY: test
test: emulator ## Run the package's tests: each thing that it does
	$(call say,testing)
	@$(PYTEST) -n 2 --dist worksteal -m "not details and not nightly" tests $(ARGS)

.PHONY: test-details
test-details: emulator ## Run the tests that `make test` leaves out: the same with other models, forms and compilers
	$(call say,testing details)
	@$(PYTEST) -n 2 --dist worksteal -m "details and not nightly" tests $(ARGS)

.PHONY: check
check: env ## Run the tests for every change: each op and optimizer once on the CPU, fuse, rooms and docs
	$(call say,checking)
	@$(PYTEST) -n 2 --dist worksteal $(call lanes,check) -m "not interpreted and not emulated and not details and not nightly" $(ARGS)

.PHONY: test-matrix
test-matrix: export TORCHWELD_MATRIX := 1
test-matrix: test test-details ## Run both with all combinations of tests that otherwise run a covering part

# What a lane is of: `.ci/run` takes a thin one of these tests, `make nightly` all of them.
NUMBERS := numbers
SANITIZED_TESTS := numbers kernels

.PHONY: nightly
nightly: test-matrix test-isa sanitize test-peers test-python test-lane-all test-newest mutants ## Run what `.ci/run` leaves out, and its lanes whole
	@$(PYTEST) -n 2 -m nightly tests || [ $$? = 5 ]

.PHONY: mutants
mutants: env ## Plant faults one at a time, and fail where no test notices
	@$(PY) tests/helpers/mutate.py && $(PY) tests/helpers/mutate.py --native

.PHONY: test-isa
test-isa: export TORCHWELD_ISA := all
test-isa: env ## Test kernels on every CPU instruction set except the best, which `make test` uses
	@for isa in $$($(PY) -c 'from torchweld.dispatch import native; print(*native.list_supported_isas()[1:])'); do \
	  printf '== %s\n' $$isa; \
	  TORCHWELD_CPU_ISA=$$isa $(PYTEST) -n 2 $(call lanes,$(NUMBERS)) -m "native and not emulated" || exit 1; \
	done

# What depends on the source of transformers, with its oldest release that pyproject.toml accepts.
OLDEST := build/transformers-4.56
# The newest release that takes a kernels of the package index.
NAMING := build/transformers-5.21
RECOGNISED := $(addprefix tests/peers/peer_,welds.py fuse.py generate.py)

TRANSFORMERS := transformers==5.24.0
.PHONY: test-transformers
test-transformers: env ## Test fuse on models of the newest transformers; installs it
	@[ "$(VENV)" = none ] || $(PY) -m pip install -q "$(TRANSFORMERS)"
	@$(PYTEST) -n 2 --dist worksteal tests/peers/peer_fuse.py tests/peers/peer_generate.py $(ARGS)

.PHONY: test-peers
test-peers: env ## Test against other packages; installs them
	$(call say,testing against peers)
	@[ "$(VENV)" = none ] || $(PY) -m pip install -q "$(TRANSFORMERS)" "bitsandbytes==0.50.2" \
	  "peft==0.21.2" "accelerate==1.15.0" "torchao==0.18.0" "kernels==0.17.2" "trl==1.16.0"
	@[ "$(VENV)" = none ] || $(PY) -m pip install -q --no-deps "liger-kernel==0.8.5" "torchtitan==0.3.0" \
	  "diffusers==0.42.1" \
	  "spmd_types==0.2.3" "torchdata==0.11.0" "torch_checkpointing==0.1.1"
	@[ "$(VENV)" = none ] || $(PY) -m pip install -q "tyro==1.0.17" "tensorboard==2.21.0" "einops==0.8.2" "lightning==2.6.6"
	@[ "$(VENV)" = none ] || DS_BUILD_OPS=0 $(PY) -m pip install -q --no-build-isolation "deepspeed==0.19.8"
	@$(PYTEST) -n 2 --dist loadfile tests/peers/peer_*.py $(ARGS)
	@[ -d $(OLDEST) ] || $(PY) -m pip install -q --no-deps --target $(OLDEST) "transformers==4.56.0" \
	  "huggingface-hub==0.36.2" "kernels==0.9.0" "tokenizers==0.22.2" requests urllib3 idna certifi charset-normalizer
	@PYTHONPATH=$(OLDEST) $(PYTEST) -n 2 --dist loadfile $(RECOGNISED) $(ARGS)
	@[ -d $(NAMING) ] || $(PY) -m pip install -q --no-deps --target $(NAMING) "transformers==5.21.1"
	@PYTHONPATH=$(NAMING) $(PYTEST) -n 2 --dist loadfile tests/peers/peer_kernels.py $(ARGS)

# Tests that compute rows of their own in docs/stack.md.
SEAMS := $(addprefix tests/distributed/test_,plan_unknown.py pipeline_stages.py exchanges.py)

.PHONY: stack
stack: env ## Run all cells of the matrix of strategies and write docs/stack.md
	@rm -f build/stack.jsonl
	@TORCHWELD_STACK=$(CURDIR)/build/stack.jsonl TORCHWELD_MATRIX=1 $(PYTEST) -p no:xdist tests/distributed/test_stack.py tests/peers/peer_stack.py tests/peers/peer_plan.py $(SEAMS) $(ARGS)
	@$(PY) tests/helpers/stack_table.py build/stack.jsonl

# A Python by its version, or pyenv's where that is not the version in use.
find-python = $(firstword $(shell python$(1) -c 'import sys, venv; print(sys.executable)' 2>/dev/null) \
	$(wildcard $(HOME)/.pyenv/versions/$(1)*/bin/python$(1)))
PYTHON310 ?= $(call find-python,3.10)
PYTHON312 ?= $(call find-python,3.12)
# Ends a recipe that has no room for an environment $(1) of another torch, $(2).
needs_disk = free=$$(df --output=avail -BG . | tail -n 1 | tr -dc 0-9); \
	[ -d $(1) ] || [ $$free -ge 12 ] || { echo "torchweld: the tests under torch $(2) did not run: they need 12 GB of disk, $$free GB are free"; exit 0; }

.PHONY: test-python
test-python: ## Run `make check` under the oldest Python (3.10)
	@[ -n "$(PYTHON310)" ] || { echo "torchweld: the check did not run: no python3.10 with venv"; exit 0; }; \
	$(call needs_disk,.venv-3.10,$(TORCH)); \
	$(MAKE) --no-print-directory check PYTHON=$(PYTHON310) VENV=.venv-3.10

LANE := of_torch of_each_kind
.PHONY: test-lane-all
test-lane-all: export LANE := of_torch processes
test-lane-all: test-lane ## Run `make test-lane` with all tests of several processes

.PHONY: test-lane
test-lane: ## Run the tests that depend on torch under Python 3.12, the oldest torch (2.10) and Triton 3.6
	@[ -n "$(PYTHON312)" ] || { echo "torchweld: the second lane did not run: no python3.12 with venv"; exit 0; }; \
	$(call needs_disk,.venv-2.10,2.10); \
	$(MAKE) --no-print-directory lane LANE="$(LANE)" PYTHON=$(PYTHON312) TORCH=2.10.0 VENV=.venv-2.10

NEWEST := 2.15.0
NEW := .venv-$(NEWEST)
# With the libraries that the pinned torch has built, as in a wheel.
$(NEW)/.ready: requirements.txt pyproject.toml setup.py
	@$(PYTHON) -m venv $(NEW)
	@$(NEW)/bin/python -m pip install -q "torch==$(NEWEST)"
	@$(NEW)/bin/python -m pip install -q -r requirements.txt
	@cp -r $(VENV)/lib/python3*/site-packages/*torchweld* $(NEW)/lib/python3*/site-packages/
	@touch $@

.PHONY: test-newest
test-newest: env ## Run the tests of `make test-lane` under the newest torch
	@[ "$(VENV)" != none ] || { echo "torchweld: the tests under torch $(NEWEST) did not run: VENV=none installs nothing"; exit 0; }; \
	$(call needs_disk,$(NEW),$(NEWEST)); \
	$(MAKE) --no-print-directory $(NEW)/.ready && \
	$(NEW)/bin/python -m pytest -n 2 --dist worksteal $(call lanes,$(LANE)) -m "not interpreted and not emulated" $(ARGS)

NEWER := 2.14.1
.PHONY: test-newer
test-newer: ## Run tests of what asks torch by private names under a torch that is newer than the pinned one
	@$(MAKE) --no-print-directory test-newest LANE=of_new_torch NEWEST=$(NEWER)

# Triton 3.6 does not interpret under numpy >= 2.4.
.PHONY: lane
lane: env
	@$(PYTEST) -n 2 --dist worksteal $(call lanes,$(LANE)) -m "not interpreted and not emulated" $(ARGS)

.PHONY: resources
resources: env ## Compile every Triton kernel for sm_80, 90, 100 and 120, and record its resources
	@$(PY) tests/helpers/resources.py $(ARGS)

.PHONY: demo
demo: env ## Train a small GPT eager and fused: times, memory, and the loss curves in build/demo.png
	@$(PY) -m torchweld demo --plot build/demo.png --json build/demo.json $(ARGS)

# mypy sees the package as an install maps it, with its two rooms that have folders of their own;
# tests and examples use it from there.
TYPED := build/typed
.PHONY: lint
lint: env ## Run ruff, clang-format and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m clang_format --version >/dev/null 2>&1; git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(dir $(PY))clang-format --dry-run -Werror
	@rm -rf $(TYPED) && mkdir -p $(TYPED) && cp -rs $(CURDIR)/python/torchweld $(TYPED) && \
	  ln -s $(CURDIR)/bench $(CURDIR)/triton_kernels $(TYPED)/torchweld && $(PY) -m mypy

.PHONY: format
format: env ## Format the sources with ruff and clang-format
	@$(PY) -m ruff check --fix . ; $(PY) -m ruff format .
	@git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(dir $(PY))clang-format -i

# The site's generator has an environment of its own, which falls back to the tests' packages.
DOCS := build/docs
.PHONY: docs
docs: env .venv-docs/.ready ## Build the docs site in build/docs; a broken link fails
	@TORCHWELD_SITE_PACKAGES=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  .venv-docs/bin/sphinx-build -q -W --keep-going -E -b html -d build/doctrees -c docs . $(DOCS)
	@cp $(DOCS)/README.html $(DOCS)/index.html && echo "$(CURDIR)/$(DOCS)/index.html"

# The docs of all releases, each in its folder.
SITE := build/site
.PHONY: docs-release
docs-release: export TORCHWELD_VERSIONS := versions.html
docs-release: docs ## Add this version's docs to those of other releases in SITE
	@mkdir -p $(SITE) && $(PY) docs/versions.py $(DOCS) $(SITE) && echo "$(abspath $(SITE))/index.html"

.venv-docs/.ready: requirements-docs.txt
	$(call say,making .venv-docs)
	@$(PYTHON) -m venv .venv-docs && .venv-docs/bin/python -m pip install -q -r $< && touch $@

.PHONY: wheel
# For all GPUs and processors, not only for those at hand.
wheel wheel-try wheel-matrix wheel-aarch64: export TORCH_CUDA_ARCH_LIST ?= all
wheel wheel-try wheel-matrix wheel-aarch64: export TORCHWELD_ISA ?= all
wheel: env ## Build one wheel for every torch >= 2.10, in dist/
	@$(call build-wheel,$$(uname -m))

define build-wheel
	rm -rf build/lib build/lib.* build/bdist* dist/torchweld-*$(1).whl && \
	  $(PY) -m pip wheel -q --no-build-isolation --no-deps -w dist . && \
	  $(PY) .ci/check_wheel.py dist/torchweld-*$(1).whl
endef

# Torch's headers are those of the environment: the ones that the libraries include are alike.
.PHONY: wheel-aarch64
wheel-aarch64: env ## Build the wheel for 64-bit ARM by a cross-compiler, in dist/
	@command -v aarch64-linux-gnu-g++ >/dev/null || { echo "torchweld: no cross-compiler was found: apt-get install g++-aarch64-linux-gnu"; exit 1; }
	@export CXX=aarch64-linux-gnu-g++; $(call build-wheel,aarch64)

.PHONY: test-aarch64
test-aarch64: wheel-aarch64 ## Test that wheel in an emulated ARM processor, under the oldest torch
	@.ci/test_aarch64 $(ARGS)

# What the README's first block needs besides torch.
NEEDED_FIRST = $$(sed -n '/^```python/q; s/^<!-- needs \(.*\) -->$$/\1/p' $(CURDIR)/README.md)
.PHONY: wheel-try
wheel-try: wheel ## Install the wheel in an empty environment outside the checkout, and try it
	$(call say,trying the wheel with torch $(TORCH))
	@at=$$(mktemp -d) && trap 'rm -rf "$$at"' EXIT && cp dist/torchweld-*$$(uname -m).whl "$$at" && \
	  $(PYTHON) -m venv "$$at/venv" && cd "$$at" && venv/bin/python -m pip install -q "torch==$(TORCH)" && \
	  venv/bin/python -m pip install -q torchweld-*.whl $(NEEDED_FIRST) && \
	  venv/bin/python -I $(CURDIR)/.ci/try_wheel.py torchweld-*.whl

.PHONY: release-version
release-version: ## Check that TAG names the version, and that the changelog has its date
	@version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' python/torchweld/version.py); \
	  [ "$(TAG)" = "v$$version" ] || { echo "torchweld: the tag is $(TAG), the version $$version"; exit 1; }; \
	  grep -qE "^## $$version - [0-9]{4}-[0-9]{2}-[0-9]{2}$$" CHANGELOG.md || \
	  { echo "torchweld: CHANGELOG.md has no date for $$version"; exit 1; }

# What the release workflow runs before it uploads.
.PHONY: release-try
release-try: wheel-try ## Build the source archive and the wheel in dist/, check them, and try the wheel
	@rm -f dist/*.tar.gz && cd csrc && $(abspath $(PY)) -c 'import os, backend; os.chdir(".."); backend.build_sdist("dist")' >/dev/null
	$(call say,checking dist)
	@[ -x .venv-twine/bin/twine ] || { $(PYTHON) -m venv .venv-twine && .venv-twine/bin/python -m pip install -q "twine==6.2.0"; }
	@.venv-twine/bin/twine check --strict dist/*

.PHONY: wheel-matrix
wheel-matrix: wheel ## Test the wheel under Python 3.12 and torch 2.11
	@[ -d .venv-wheel ] || $(PYTHON312) -m venv .venv-wheel
	@.venv-wheel/bin/pip install -q torch==2.11.0
	@.venv-wheel/bin/pip install -q -r requirements.txt
	@.venv-wheel/bin/pip install -q --force-reinstall --no-deps dist/torchweld-*.whl
	@.venv-wheel/bin/python -c 'import torchweld; print(torchweld.__file__, torchweld.backends())'
	@.venv-wheel/bin/python -m pytest -n 2 $(call lanes,of_torch processes) -m "not interpreted and not emulated" $(ARGS)

.PHONY: cuda-check
cuda-check: env ## Compile changed CUDA kernels for sm_80, sm_90 and sm_100; a register spill fails
	@TORCHWELD_CUDA=1 $(PY) csrc/cuda_check.py $(ARGS) || { [ $$? = 3 ] && [ "$(VENV)" != none ] && \
	  $(PY) -m pip install -q -r requirements-cuda.txt && TORCHWELD_CUDA=1 $(PY) csrc/cuda_check.py $(ARGS); }

# Python, torch and numpy leak at exit; what the sanitizers are for is what kernels do.
# Without memory, malloc returns null as it does elsewhere, and torch raises its error.
SANITIZED := ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1 \
	UBSAN_OPTIONS=print_stacktrace=1 LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)"
.PHONY: sanitize-cpu
sanitize-cpu: env ## Run the CPU kernels under ASan and UBSan
	@$(PY) csrc/build.py --no-cuda --sanitize address,undefined --isa here --out $(ASAN)
	@$(SANITIZED) TORCHWELD_LIB=$(CURDIR)/$(ASAN) \
	  $(PYTEST) -n 2 $(call lanes,$(SANITIZED_TESTS)) -m "native and not emulated" -k "not inductor and not resident" $(ARGS)

.PHONY: sanitize
sanitize: env ## Run the contract on the CPU kernels and the emulated CUDA kernels under ASan and UBSan
	@$(PY) csrc/build.py --no-cuda --sanitize address,undefined --isa here --out $(ASAN)
	@$(PY) csrc/build.py --emulator --sanitize address,undefined --out $(EMULATOR_ASAN)
	@$(SANITIZED) TORCHWELD_LIB=$(CURDIR)/$(ASAN) \
	  TORCHWELD_EMULATOR=$(CURDIR)/$(EMULATOR_ASAN)/libtorchweld_emulated_cuda.so \
	  $(PYTEST) -n 2 $(call lanes,numbers kernels) -m native -k "not inductor and not resident" $(ARGS)

gpu gpu-sanitize: export TORCHWELD_CUDA := 1
NEEDS_GPU = @$(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	{ echo "torchweld: torch sees no GPU here"; exit 1; }

.PHONY: gpu
gpu: env ## On a GPU: check and time the kernels; ARGS: --minutes 9, --evidence DIR, op names
	$(NEEDS_GPU)
	@$(PY) -m torchweld doctor && $(PY) -m torchweld bench --record $(ARGS)

.PHONY: gpu-sanitize
gpu-sanitize: env ## On a GPU: run compute-sanitizer's memcheck and racecheck on the CUDA kernels
	$(NEEDS_GPU)
	@for tool in memcheck racecheck; do \
	  compute-sanitizer --tool $$tool --error-exitcode 1 --target-processes all $(PYTEST) -p no:xdist \
	    $(call lanes,numbers) -k "gpu-cuda and (layouts or every_sample or part_drops or lie_anywhere)" $(ARGS) || exit 1; \
	done

.PHONY: clean
clean: ## Remove all build outputs
	@rm -rf build dist python/torchweld/lib *.egg-info python/*.egg-info
