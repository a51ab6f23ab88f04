# Everything lives in $(VENV); nothing needs root. Needed beforehand: Python >= 3.11 with venv and headers, a C++20 compiler.
PYTHON ?= python3
VENV   ?= .venv
NPROC  ?= 2
TIMEOUT ?= 300
WORKERS ?= 3
# The torch that these commands install: the newest one that the whole suite runs on. pyproject.toml says which may be used.
TORCH  ?= torch<2.14
BIN    := $(VENV)/bin
LINT   := build/lint
PAGES  := build/docs/pages
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard cmake/* csrc/* csrc/bindings/*)

.PHONY: help demo test test-full fake-test faults lint docs format bench pictures gpu-test gpu-bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       install, train a byte-level GPT at stage 3 on $(NPROC) processes, resume it on one"
	@echo "                OFFLOAD=folder keeps parameters, gradients and optimizer states in files there"
	@echo "make test       install with the test tools and run the quick tests (TESTS=path narrows it, WORKERS=0 shows output)"
	@echo "                TORCH='torch==2.14.1' does either with another torch, in a fresh VENV=folder"
	@echo "make test-full  every test"
	@echo "make fake-test  the tests of accelerators, on one that needs no hardware (tests/fake_device)"
	@echo "make faults     which test catches each seeded fault of tests/faults (FAULTS=name narrows it)"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make docs       the guide and the API reference into build/docs/site, with every link checked"
	@echo "make bench      benchmarks/step.py on CPU"
	@echo "make pictures   plan GPTs and draw the pictures of README.md and docs/guide/tiling.md"
	@echo "make gpu-test   build in place, offline, against this machine's torch, and run tests/gpu"
	@echo "make gpu-bench  the same build, benchmarks/step.py and kernels.py on CUDA"

demo: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) $(if $(OFFLOAD),examples/07_offload.py $(OFFLOAD),examples/01_first_run.py)
	$(BIN)/python examples/02_resume.py

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --timeout=$(TIMEOUT) -n $(WORKERS) --dist worksteal -m "not slow" $(TESTS)

test-full: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --timeout=$(TIMEOUT) -n $(WORKERS) --dist worksteal --hypothesis-profile=full $(TESTS)

fake-test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --timeout=$(TIMEOUT) -n $(WORKERS) --dist worksteal --device=fake $(or $(TESTS),tests/fake_device tests/gpu)

faults: $(VENV)/.installed-dev
	$(BIN)/python tests/faults/run.py $(FAULTS)

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/step.py

pictures: $(VENV)/.installed
	$(BIN)/python docs/pictures/make.py

# Tools see one package tree: the folders passes/ and runtime/ sit inside zerograph/ only once installed.
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(LINT) && mkdir -p $(LINT)
	cp -Rp zerograph $(LINT)/ && cp -Rp passes runtime $(LINT)/zerograph/
	touch $(LINT)/zerograph/_core.py  # a name for the extension in the import graph; mypy reads _core.pyi
	cd $(LINT) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p zerograph
	.ci/imports $(BIN)/python $(LINT)

# One tree of links to what pages link to, so that links are the same here and on the site.
docs: $(VENV)/.installed-dev
	rm -rf $(PAGES) && mkdir -p $(PAGES)
	ln -s $(addprefix $(CURDIR)/,README.md docs benchmarks examples) $(PAGES)
	$(BIN)/mkdocs build --quiet

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: ZeroGraph needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)"; echo; \
	  echo "hint: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@$(PYTHON) -c 'import os, sys, sysconfig; p = sysconfig.get_path("include"); sys.exit(not os.path.exists(p + "/Python.h"))' || { \
	  echo "error: the headers of '$(PYTHON)' are missing, which the native core and Inductor compile against"; echo; \
	  echo "hint: apt install python3-dev"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)

# Build isolation brings scikit-build-core, pybind11 and, where they are missing, CMake and Ninja.
$(VENV)/.installed: $(BUILD_INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e . "$(TORCH)"
	@touch $@

$(VENV)/.installed-dev: $(BUILD_INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev,hf]" "$(TORCH)"
	@touch $@ $(VENV)/.installed

# On a GPU machine the image's own torch, pybind11, scikit-build-core and CMake are used, with no network. Where there is
# no make, .ci/gpu does it.
gpu-test gpu-bench: gpu-%:
	PYTHON=$(PYTHON) .ci/gpu $*

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f $(VENV)/.installed $(VENV)/.installed-dev
	find zerograph passes runtime tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
