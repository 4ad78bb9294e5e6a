# make demo      trains a small language model on this machine and lets it write
# make test      everything that has to hold before a commit lands
# make docs      the documentation's site, in build/site
# make package   the wheel and the source distribution, in build/dist, tried in two clean environments, with the command
#                line and without any extra
# make kernels   compiles every GPU kernel for an H100, without a GPU, and reads the machine code for hazards; minutes
# make sweep     our attention in every class of transformers that can be built small: docs/stock_models.md; 10 minutes
# make hooks     ruff and pyright before each commit
# All build .venv from requirements.lock, which takes a few minutes once. PYTHON=python3.12 chooses the interpreter.
# TORCH=2.11.0, or newest, chooses another torch than the lock's, in an environment of its own, .venv-torch-2.11.0, which
# has the torchvision of that torch, and timm.

PYTHON ?= python3
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
INSTALLED := $(VENV)/installed
PYTEST := $(BIN)/python -m pytest
# a process for each core, up to four, as each loads torch; a file's tests stay together, for the runs that they share,
# and files keep their order, so that the longest, of few tests, do not come last (tests/conftest.py puts them first)
PYTEST_OPTIONS ?= --numprocesses=logical --maxprocesses=4 --dist=loadfile --no-loadscope-reorder
# the laws of every attention, map, module and model, in which each call of the package is checked to be as its
# annotations say: shapes, types and results. That takes as long again as the calls, so the other laws go without it
CHECKED := test_conftest.py attention feature_maps nn compat/weights models/test_language_model.py models/test_sequence_model.py \
           states/test_rows.py ops/fast ops/test_features.py ops/test_linear.py
CHECKED := $(CHECKED:%=tests/%)

.PHONY: demo test lint types checked laws docs package kernels sweep hooks clean

demo: $(INSTALLED)
	$(BIN)/python -m linattn.cli.demo

# pyright has one process, beside which the tests use what it leaves of two cores
test: lint
	$(MAKE) --jobs=2 types checked
	$(MAKE) laws

lint: $(INSTALLED)
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

checked: $(INSTALLED)
	$(PYTEST) --jaxtyping-packages=linattn,tests.checked $(CHECKED) $(PYTEST_OPTIONS)

# tests/compiled is among them, because torch.compile cannot trace the checks
laws: $(INSTALLED)
	$(PYTEST) $(CHECKED:%=--ignore=%) $(PYTEST_OPTIONS)

# a warning is an error: a name without a page, a link that leads nowhere
docs: $(INSTALLED)
	rm -rf docs/reference/names build/site
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/site

package: $(INSTALLED)
	rm -rf build/dist build/clean build/bare
	$(BIN)/python -m hatchling build -d build/dist
	$(BIN)/python -m twine check --strict build/dist/*
	$(BIN)/python tests/package/tag.py "$(TAG)" build/dist
	$(PYTHON) -m venv build/clean
	build/clean/$(notdir $(BIN))/python -m pip install --disable-pip-version-check --quiet -c requirements.lock "$$(ls build/dist/*.whl)[cli]"
	build/clean/$(notdir $(BIN))/python -I tests/package/readme.py README.md
	$(PYTHON) -m venv build/bare
	build/bare/$(notdir $(BIN))/python -m pip install --disable-pip-version-check --quiet -c requirements.lock build/dist/*.whl
	build/bare/$(notdir $(BIN))/python -I tests/package/bare.py

kernels: $(INSTALLED)
	PYTHONPATH=. $(BIN)/python benchmarks/gpu_compile.py --capability 90

# a second call goes on where the first one stopped
sweep: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.integrations.transformers.stock_attention.sweep --page docs/stock_models.md

hooks: $(INSTALLED)
	$(BIN)/pre-commit install

$(INSTALLED): requirements.lock pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'linattn needs Python 3.11 or newer; say which: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
ifdef TORCH
	# another torch wants another triton and other setuptools; the interpreter of triton 3.6, torch 2.11's, an older numpy
	grep -vE '^(torch|triton|setuptools|numpy)==' requirements.lock > $(VENV)/requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r $(VENV)/requirements.txt 'numpy<2.4' timm torchvision torch$(if $(filter-out newest,$(TORCH)),==$(TORCH))
else
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements.lock
endif
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -c "open('$(INSTALLED)', 'w').close()"

clean:
	rm -rf .venv .venv-torch-* build
