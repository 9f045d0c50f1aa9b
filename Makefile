# `make train` and `make test` need nothing but Python 3.11+, and a C++ compiler where they build the CUDA extension.
PYTHON ?= python3
VENV ?= .venv
# CUDA=0: no CUDA extension. CUDA=1: build it, with nvcc from PyPI if there is none. auto: 1 where a GPU is.
# TE_JAX_CUDA_ARCHS says what for ("90a-real", "all"); else it is the GPU's own architecture, or all without one.
CUDA ?= auto
# Arguments of examples/train_gpt.py and of `python -m benchmarks`; of pytest.
ARGS ?=
SUITE ?= all
TESTS ?=

GPU := $(shell $(PYTHON) cmake/locate.py --gpu 2>/dev/null)
MODE := $(if $(GPU),$(CUDA:auto=1),$(CUDA:auto=0))
BUILD := $(filter 1,$(MODE))
ARCHS := $(subst ;, ,$(or $(TE_JAX_CUDA_ARCHS),$(GPU),all))
EXTRAS := examples test $(if $(GPU),cuda13)
# Workers would fight for the memory of one GPU; on CPU, compilation in one process uses one core.
WORKERS := $(if $(GPU),,-n 2 --dist worksteal)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CXX_SOURCES := $(wildcard csrc/*/*.*)
# What an installation is made of; the stamp names what was built.
INSTALLED := $(VENV)/.installed-$(if $(BUILD),$(subst $() ,+,$(strip $(ARCHS))),pure)
SOURCES := pyproject.toml $(wildcard build_backend/*.py) \
  $(if $(BUILD),CMakeLists.txt te_jax/core/archs.py $(wildcard cmake/*.*) $(CXX_SOURCES) $(shell find third_party -type f))
export TE_JAX_BUILD_CUDA := $(MODE)

.PHONY: help train test bench tables docs wheel urls lint types format clean

help:
	@echo "make train ARGS=...   install into $(VENV), train a GPT: ARGS=\"--preset tiny --compare\" (ARGS=--help lists all)"
	@echo "make test TESTS=...   install into $(VENV), run the tests: TESTS=\"tests/test_norm.py -k odd\""
	@echo "make bench ARGS=...   install into $(VENV), measure ops and layers on a GPU: SUITE=layers ARGS=\"--only 'gpt layer'\""
	@echo "make tables           write the documents' tables and plots of figures from results/"
	@echo "make docs             build the site into build/site, warnings are errors"
	@echo "make wheel            build wheels for all architectures into dist/: PYTHONS=\"python3.11 python3.12\" PLATFORM=aarch64"
	@echo "make urls URL=...     write the project's address into pyproject.toml, for wheels and the site"
	@echo "make lint             ruff and clang-format"
	@echo "make types            pyright over the public names"
	@echo "make format           let both rewrite the sources"
	@echo "make clean            remove $(VENV) and build/"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) CUDA=$(CUDA) (1 builds the CUDA extension, 0 does not, auto does where a GPU is)"

train: $(INSTALLED)
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(WORKERS) $(TESTS)

# An --out of ARGS comes later and wins.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks $(SUITE) --out build/bench/bench.json $(ARGS)

tables: $(INSTALLED)
	$(BIN)/python -m benchmarks tables

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(f"te_jax needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@echo "== virtual environment $(VENV)"
	$(PYTHON) -m venv $(VENV)

# Python sources are used in place; a change of the build's sources installs again.
# No build isolation: objects in build/ stay valid, and the CUDA headers that jax brings are found.
$(INSTALLED): $(SOURCES) | $(BIN)/python
	@rm -f $(VENV)/.installed-*
	@$(BIN)/python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["dependencies"], *sum(map(project["optional-dependencies"].get, sys.argv[1:]), []), sep="\n")' \
	  $(EXTRAS) > $(VENV)/packages.txt
ifeq ($(BUILD),)
	@echo "== 1/2 $$(wc -l < $(VENV)/packages.txt) packages and what they need: jax, Flax, what examples and tests import"
	$(PIP) install -r $(VENV)/packages.txt scikit-build-core
	@echo "== 2/2 te_jax, without its CUDA extension$(if $(GPU),, (no GPU is here; CUDA=1 builds it all the same))"
	$(PIP) install --no-build-isolation --no-deps -e .
else
	@echo "== 1/3 $$(wc -l < $(VENV)/packages.txt) packages and what they need: jax, Flax, what examples and tests import; build tools"
	$(PIP) install -r $(VENV)/packages.txt scikit-build-core nanobind "cmake>=3.26" ninja
	@$(BIN)/python cmake/locate.py --requires > $(VENV)/cuda-wheels.txt
	@echo "== 2/3 $$(wc -w < $(VENV)/cuda-wheels.txt) wheels of NVIDIA's compiler and headers that are not here (at most 1 GB)"
	$(PIP) install -r $(VENV)/cuda-wheels.txt
	@echo "== 3/3 te_jax with its CUDA extension for $(ARCHS), some minutes for each; [n/N] counts the files"
	$(PIP) install -v --no-build-isolation --no-deps -e .
endif
	@touch $@
	@$(BIN)/python -m te_jax

# One wheel for each; that of 3.12 serves later versions too. PLATFORM=aarch64 needs g++-aarch64-linux-gnu, and only 3.12.
PLATFORM ?=
PYTHONS ?= $(if $(PLATFORM),,python3.11) python3.12
wheel:
	$(PYTHON) cmake/wheels.py dist $(PYTHONS) $(if $(PLATFORM),--platform $(PLATFORM))

urls:
	@test -n "$(URL)" || { echo "make urls: give the address, as in make urls URL=https://..."; exit 1; }
	sed -i -E 's|^(Homepage = ")[^"]*|\1$(URL)|; s|^(Documentation = ")[^"]*|\1$(URL)/docs|; s|^(Issues = ")[^"]*|\1$(URL)/issues|; s|^(Changelog = ")[^"]*|\1$(URL)/changelog|' pyproject.toml

$(VENV)/.lint $(VENV)/.docs $(VENV)/.types: $(VENV)/.%: pyproject.toml | $(BIN)/python
	$(PIP) install $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"])')
	@touch $@

docs: $(INSTALLED) $(VENV)/.docs
	$(BIN)/python docs/site/assemble.py build/site-source
	$(BIN)/python -m sphinx -q -W --keep-going -b html build/site-source build/site
	@echo "open build/site/index.html"

types: $(INSTALLED) $(VENV)/.types
	$(BIN)/python docs/site/check_types.py

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

clean:
	rm -rf $(VENV) build
