# Everything a new machine needs is Python 3.11+, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/.peers
JAX := .venv-jax
RESULTS := benchmarks/results

.PHONY: demo test matrix check coverage mutants format docs reproduce bench bench-cuda zoo clean help

help:
	@echo "make demo    set up, then train digits five ways, attack each, write a report"
	@echo "make test    set up, then run the tests"
	@echo "make matrix  the tests on each Python of PYTHONS (python3.11 python3.12 python3.13), in environments of their own"
	@echo "make check   set up, then lint, format and type checks"
	@echo "make mutants     set up, then plant known faults and fail if a test misses one"
	@echo "make coverage    set up, then run the tests with a coverage report"
	@echo "make docs    set up, then build the documentation site into docs/_build"
	@echo "make reproduce   set up, then rerun every table and figure of the paper, quickly, on digits"
	@echo "make bench   set up with peers, then measure speed, memory and scaling on the CPU; figures, docs/performance.md"
	@echo "make bench-cuda   the same on a GPU"
	@echo "make zoo     set up with model libraries, then compare the clipped sums of their networks with the oracle"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/gradveil demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -q

# Tests that trace every line themselves take the tracer over while they run: those lines may show as missed.
coverage: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -q --cov=gradveil --cov-report=term:skip-covered

mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py

# Each Python that is admitted, with the oldest torch that is (constraints.txt). One that is not there is an error.
PYTHONS ?= python3.11 python3.12 python3.13
matrix:
	set -e; for python in $(PYTHONS); do \
	  $(MAKE) test PYTHON=$$python VENV=.venv-$$(basename $$python); \
	done

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

reproduce: $(STAMP)
	$(BIN)/gradveil reproduce all --quick

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Peers to measure beside; what cannot be installed is left out of the results, which say so. Opacus without its
# requirements: torch is there, and a looser one may resolve to a build several gigabytes larger.
$(PEERS): $(STAMP)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "opacus>=1.5" "opt-einsum>=3.3"
	@$(BIN)/python -c "import opacus" && touch $@ || echo "Opacus is not installed: its rows are left out"

# JAX has an environment of its own: it shares nothing with torch, and its requirements are its own.
$(JAX)/.installed:
	-$(PYTHON) -m venv $(JAX) && $(JAX)/bin/python -m pip install --quiet --disable-pip-version-check "jax-privacy>=2"
	@$(JAX)/bin/python -c "import jax_privacy" && touch $@ || { rm -rf $(JAX); echo "JAX-Privacy: left out"; }

.venv-jax: $(JAX)/.installed

bench: $(PEERS) $(JAX)/.installed
	$(BIN)/python benchmarks/speed.py --device cpu --seconds 10 --out $(RESULTS)/speed_cpu.json
	$(BIN)/python benchmarks/any_network.py --seconds 10 --out $(RESULTS)/any_network_cpu.json
	$(BIN)/python benchmarks/scaling.py --device cpu --seconds 1 --out $(RESULTS)/scaling_cpu.json
	$(BIN)/python benchmarks/figures.py
	$(BIN)/python benchmarks/render.py

# Public model libraries without their requirements: torchvision has no build that fits, and only models are used.
zoo: $(STAMP)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[transformers]"
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps timm vit-pytorch einops
	$(BIN)/python benchmarks/zoo.py --out $(RESULTS)/zoo.json
	$(BIN)/python benchmarks/render.py

bench-cuda: $(PEERS)
	$(BIN)/python benchmarks/speed.py --device cuda --seconds 5 --out $(RESULTS)/speed_cuda.json
	$(BIN)/python benchmarks/any_network_cuda.py --seconds 10 --out $(RESULTS)/any_network_cuda.json
	$(BIN)/python benchmarks/scaling.py --device cuda --seconds 1 --out $(RESULTS)/scaling_cuda.json
	$(BIN)/python benchmarks/figures.py
	$(BIN)/python benchmarks/render.py

clean:
	rm -rf $(VENV) $(JAX) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
