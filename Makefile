# `make train` and `make test` need nothing but Python 3.11+ (and, for the CUDA extension, a C++ compiler).
PYTHON ?= python3
VENV ?= .venv
# CUDA=0: no CUDA extension. CUDA=1: build it, with nvcc from PyPI if there is none. auto: where a GPU or nvcc 13 is.
CUDA ?= auto
# Arguments of examples/train_gpt.py and of `python -m benchmarks`; of pytest.
ARGS ?=
TESTS ?=

GPU := $(shell if nvidia-smi -L >/dev/null 2>&1 || test -e /dev/nvidia0; then echo yes; fi)
MODE := $(if $(GPU),$(CUDA:auto=1),$(CUDA))
JAX := $(if $(GPU),jax[cuda13],jax)
# Workers would fight for the memory of one GPU; on CPU, compilation in one process uses one core.
WORKERS := $(if $(GPU),,-n 2 --dist worksteal)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed-cuda-$(MODE)
SOURCES := pyproject.toml CMakeLists.txt $(wildcard cmake/*.* build_backend/*.py csrc/*) $(shell find third_party -type f)
CXX_SOURCES := $(wildcard csrc/*)
export TE_JAX_BUILD_CUDA := $(MODE)

.PHONY: help train test bench lint format cuda-check clean

help:
	@echo "make train ARGS=...   install into $(VENV), train a GPT: ARGS=\"--preset tiny --compare\" (ARGS=--help lists all)"
	@echo "make test TESTS=...   install into $(VENV), run the tests: TESTS=\"tests/test_norm.py -k odd\""
	@echo "make bench ARGS=...   install into $(VENV), measure ops and layers on a GPU: ARGS=\"--suite layers --only 'gpt layer'\""
	@echo "make lint             ruff and clang-format"
	@echo "make format           let both rewrite the sources"
	@echo "make cuda-check       compile all CUDA sources for sm_90a, warnings are errors"
	@echo "make clean            remove $(VENV) and build/"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) CUDA=$(CUDA) (auto, 1, 0)"

train: $(INSTALLED)
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(WORKERS) $(TESTS)

# An --out of ARGS comes later and wins.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks --out build/bench/bench.json $(ARGS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(f"te_jax needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@echo "== virtual environment $(VENV)"
	$(PYTHON) -m venv $(VENV)

# Python sources are used in place. A change of the build's sources installs again; the stamp names the mode.
# No build isolation: objects in build/ stay valid, and the CUDA headers that jax brings are found.
$(INSTALLED): $(SOURCES) | $(BIN)/python
	@rm -f $(VENV)/.installed-*
	@echo "== 1/3 $(JAX) and build tools$(if $(GPU), (an NVIDIA GPU is here))"
	$(PIP) install "$(JAX)" scikit-build-core nanobind "cmake>=3.26" ninja
	@echo "== 2/3 CUDA compiler and headers that are not here yet (up to 1 GB)"
	$(BIN)/python cmake/locate.py --requires > $(VENV)/cuda-wheels.txt
	$(PIP) install -r $(VENV)/cuda-wheels.txt
	@echo "== 3/3 te_jax; compiling its CUDA extension takes some minutes"
	$(PIP) install --no-build-isolation -e ".[examples,test$(if $(GPU),$(comma)cuda13)]"
	@touch $@
	@$(BIN)/python -m te_jax

comma := ,

$(VENV)/.lint: pyproject.toml | $(BIN)/python
	$(PIP) install $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["lint"])')
	@touch $@

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

cuda-check: $(INSTALLED)
	$(BIN)/cmake -S . -B build/cuda-check -G Ninja -DTE_JAX_WERROR=ON -DTE_JAX_CUDA_ARCHS=90a-real -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/cuda-check

clean:
	rm -rf $(VENV) build
