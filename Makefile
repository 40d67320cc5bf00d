# Every target does its own set-up in $(VENV); the second run is quick. Needs python3 >= 3.10 with venv, g++ and make.
#   make test ARGS="-k linear_logprob"     ARGS goes to pytest, or to rlkernel.bench
#   make bench TORCH=torch==2.12.0         another torch; without TORCH, one that is already installed is used as it is
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
ARGS ?=
# Some images set it.  Without bytecode each of hundreds of processes compiles torch and the frameworks anew.
unexport PYTHONDONTWRITEBYTECODE

comma := ,
PY := $(VENV)/bin/python
DONE := $(VENV)/done
# Most modules of the frameworks are never imported: those that are get their bytecode then.
PIP := $(PY) -m pip install -qq --disable-pip-version-check --no-compile
INSTALL := $(PIP) -c $(DONE)/torch -c requirements/constraints.txt
# torch stays what it is; a torch without Triton (the CPU wheel) gets the Triton that CI runs.
PINS := import importlib.metadata as m; print("torch==" + m.version("torch")); \
        any("triton" in r for r in m.requires("torch")) or print("triton==3.7.1")
# What the two commands take is noted in build/commands.json, unless ARGS choose a part of them; set-up counts where there was none.
BEGAN := $(shell date +%s)
FRESH := $(if $(wildcard $(DONE)/venv),,--fresh)
took = $(if $(ARGS),true,$(PY) -m rlkernel.bench.commands $(1) --began $(BEGAN) --ready $$ready $(FRESH))
SOURCES := $(shell find csrc setup.py pyproject.toml -type f 2>/dev/null)

# What the vendors' libraries (OpenBLAS under NumPy, MKL, oneDNN, torch) and our kernels do on a processor without AVX-512,
# and the tests that look at bits, at parity and at errors of rounding. Kernels that are interpreted or emulated run none of it,
# and neither graphs that are traced nor frequencies of samples depend on it. Tests that compare instruction sets choose them.
AVX2 := RLKERNEL_CPU_ISA=avx2 OPENBLAS_CORETYPE=Haswell MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
NUMERIC := $(filter-out %_stored.py %_compile.py %/test_tensor_core_bits.py, $(wildcard $(addprefix tests/test_,*_bits.py logprob*.py linear_*.py prefix_shared*.py \
        policy_loss*.py preference_loss*.py value_loss*.py gae*.py whiten.py rms_norm.py layer_norm.py rotary.py swiglu.py matmul.py attention.py \
        batch_invariant*.py consistency_invariance.py tensor_parallel*.py group_*.py kl_*.py running_*.py \
        sampl*.py verify_chain*.py)) tests/integrations/test_hf_*.py)

# vLLM wants a torch and a transformers of its own, so it has an environment of its own; the newest one that TRL takes another.
VLLM_VENV ?= .venv-vllm
TRL_VLLM_VENV ?= .venv-trl-vllm
# The folders of tests that test-trl-vllm runs: in_vllm too takes minutes more.
TRL_VLLM_TESTS ?= in_trl_vllm

.PHONY: help build test test-avx2 test-vllm test-trl-vllm test-sglang bench lint format docs check-codegen readme-tables wheels sdist release-tools info clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "make %-15s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: $(DONE)/build $(DONE)/test $(DONE)/docs $(DONE)/frameworks  ## build, run every test, count what ran and what was skipped and why
	@mkdir -p build
	@$(if $(ARGS),,$(PY) -m rlkernel.bench.commands test)
	@ready=$$(date +%s); OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --junitxml=build/tests.xml $(ARGS); status=$$?; \
	$(PY) tests/summary.py build/tests.xml && $(call took,test) --jobs $(JOBS) --status $$status && exit $$status

test-avx2: $(DONE)/build $(DONE)/test $(DONE)/frameworks  ## the tests of bits, parity and rounding as on a processor without AVX-512
	@mkdir -p build
	@$(AVX2) OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --junitxml=build/tests-avx2.xml -m "not slow" -k "not (triton or emulated or distribution or instruction_sets or compile or one_graph)" $(sort $(NUMERIC)) $(ARGS); \
	status=$$?; $(PY) tests/summary.py build/tests-avx2.xml && exit $$status

test-vllm:  ## the tests with the real vLLM, on a CPU, in an environment of its own: $(VLLM_VENV)
	@$(MAKE) --no-print-directory VENV=$(VLLM_VENV) TORCH=torch==2.13.0 run-vllm

test-trl-vllm:  ## the tests with the real TRL over the real vLLM, on a CPU, in an environment of its own: $(TRL_VLLM_VENV)
	@$(MAKE) --no-print-directory VENV=$(TRL_VLLM_VENV) TORCH=torch==2.13.0 run-trl-vllm

test-sglang:  ## the tests with the real SGLang, on a CPU, in a folder of its own beside vLLM's environment: $(VLLM_VENV)/sglang
	@$(MAKE) --no-print-directory VENV=$(VLLM_VENV) TORCH=torch==2.13.0 run-sglang

each_file = $(PY) tests/run_files.py --jobs $(JOBS) $(wildcard $(patsubst %,tests/integrations/%/test_*.py,$(1))) -- $(ARGS)

.PHONY: run-vllm run-trl-vllm run-sglang
run-vllm: $(DONE)/build $(DONE)/vllm
	@$(call each_file,in_vllm)

run-trl-vllm: $(DONE)/build $(DONE)/trl-vllm
	@$(call each_file,$(TRL_VLLM_TESTS))

run-sglang: $(DONE)/build $(DONE)/sglang
	@export PYTHONPATH=$(abspath $(VENV)/sglang); $(call each_file,in_sglang)

bench: $(DONE)/build $(DONE)/bench $(DONE)/frameworks  ## parity, memory and speed of every op, then GRPO training before and after
ifeq ($(ARGS),)
	@$(PY) -m rlkernel.bench.commands bench
	@ready=$$(date +%s); $(PY) -m rlkernel.bench && \
	if $(PY) -m pip show -q trl 2>/dev/null; then $(PY) examples/grpo_arithmetic.py --short && $(call took,bench); \
	else echo "make: examples/grpo_arithmetic.py needs TRL, which needs Python 3.11 or newer"; fi
else
	@$(PY) -m rlkernel.bench $(ARGS)
endif

lint: $(DONE)/build $(DONE)/lint  ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m mypy tests/typed_calls.py

format: $(DONE)/lint  ## format, and repair what ruff can repair by itself
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: $(DONE)/docs $(DONE)/lint  ## the documentation site in build/site; a broken link is an error; needs Python 3.11
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir build/site || { rm -f build/site/sitemap.xml; exit 1; }

check-codegen: $(DONE)/build $(DONE)/test  ## compile the device code for every GPU architecture; a spill, or worse code than in the ledger, is an error
	@$(PY) tests/codegen/check.py $(ARGS)

readme-tables: $(DONE)/build $(DONE)/bench  ## rewrite the tables of README and docs from the newest reports in benchmarks/results
	@$(PY) -m rlkernel.bench readme $(ARGS)

wheels: $(DONE)/release  ## wheels for manylinux_2_28 in dist, for every Python that is here, with CUDA where nvcc is; ARGS goes to .ci/wheels.py
	@$(PY) .ci/wheels.py $(ARGS)

sdist: $(DONE)/release  ## the source archive in dist
	@$(PY) -m build --sdist

release-tools: $(DONE)/release

info: $(DONE)/build  ## what this machine can run
	@$(PY) -m rlkernel.info

build: $(DONE)/build  ## the compiled extension, for the backends whose compiler is found

clean:  ## remove everything that was built; the packages in $(VENV) stay
	rm -rf build dist *.egg-info $(DONE)/build rlkernel/_C*.so

# A torch of the system is used through --system-site-packages: on a GPU machine it is the one that fits the driver.
$(DONE)/venv:
	@echo "make: creating $(VENV)"
	@test -x $(PY) || $(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)
	@mkdir -p $(DONE) && touch $@

$(DONE)/torch: $(DONE)/venv
ifdef TORCH
	@echo "make: installing $(TORCH)"
	@$(PIP) "$(TORCH)"
else
	@$(PY) -m pip show -q torch 2>/dev/null || { echo "make: installing torch"; \
	$(PIP) torch==2.13.0; }
endif
	@$(PY) -c '$(PINS)' > $@

$(DONE)/build: $(DONE)/torch $(SOURCES)
	@echo "make: building the extension"
	@$(INSTALL) -r requirements/build.txt
	@$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

$(DONE)/test $(DONE)/bench $(DONE)/docs: $(DONE)/%: pyproject.toml requirements/constraints.txt | $(DONE)/build
	@echo "make: installing rlkernel[$*]"
	@$(INSTALL) "rlkernel[$*$(if $(filter docs,$*),,$(comma)triton)]"
	@touch $@

$(DONE)/lint: requirements/lint.txt requirements/constraints.txt | $(DONE)/torch
	@echo "make: installing ruff and mypy"
	@$(INSTALL) -r requirements/lint.txt
	@touch $@

$(DONE)/release: requirements/release.txt requirements/constraints.txt | $(DONE)/venv
	@echo "make: installing what builds and audits packages"
	@$(PIP) -c requirements/constraints.txt -r requirements/release.txt
	@touch $@

$(DONE)/frameworks: $(wildcard requirements/frameworks*.txt) requirements/constraints.txt tests/fetch_peers.py | $(DONE)/torch
	@echo "make: installing the frameworks to compare with"
	@$(INSTALL) -r requirements/frameworks.txt
	@$(INSTALL) --no-deps -r requirements/frameworks-no-deps.txt
	@$(PY) tests/fetch_peers.py $(VENV)/peers
	@touch $@

# In a folder of its own: vLLM's tests must see no torchvision. Of that the emptied file tells torch of operators which a build
# for GPUs cannot load on a CPU, and nothing else of it needs them.
$(DONE)/sglang: requirements/sglang.txt $(DONE)/vllm
	@echo "make: installing what is in requirements/sglang.txt"
	@rm -rf $(VENV)/sglang
	@$(PIP) --no-deps --target $(VENV)/sglang -r requirements/sglang.txt
	@: > $(VENV)/sglang/torchvision/_meta_registrations.py
	@touch $@

# torchvision and its kin come as builds for GPUs, which a torch for CPUs cannot load, and transformers imports them.
$(DONE)/vllm $(DONE)/trl-vllm: $(DONE)/%: requirements/%.txt | $(DONE)/torch
	@echo "make: installing what is in requirements/$*.txt"
	@$(PIP) -r requirements/$*.txt
	@$(PY) -m pip uninstall -qq -y --disable-pip-version-check torchvision torchaudio torchcodec
	@touch $@
