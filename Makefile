# FedAlloy. `make help` explains every target.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
CORE := $(VENV)/.core
READY := $(VENV)/.ready
CHECKED := src tests examples benchmarks docs/site

.DEFAULT_GOAL := help
# Hundreds of processes start in the tests: what Python compiles for one serves the next.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup run test fuzz deployment check format bench docs package clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /\1\t/' | expand -t 12

setup: $(READY) ## make .venv and install everything that tests and checks need (once)

# What 'pip install fedalloy' installs: enough for 'make run', and half as large.
$(CORE): pyproject.toml constraints.txt
	@echo 'Making $(VENV): torch and a few more, just under 1 GB; this takes a minute or two.'
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e .
	@touch $@

$(READY): $(CORE)
	@echo 'Adding what tests and checks need, another 1 GB.'
	@$(INSTALL) -e '.[test]'
	@touch $@

run: $(CORE) ## compare methods on embedded data, offline: tables, a report, and what was seen in a sentence
	$(BIN)/fedalloy compare fedavg "feddw(mu=1)" fedrda fedblade ssf \
	    "fedsce(p=1, mu=0.1)" --data digits --skew dirichlet:0.1 --clients 10 \
	    --model "mlp(norm=batch)" --rounds 20 --epochs 2 --lr 0.1 \
	    --seeds 0,1,2 --target 0.8

test: $(READY) ## run all tests (browser tests where a browser is found)
	$(BIN)/pytest -q -n 3 --dist loadgroup --durations 15

fuzz: $(READY) ## try what is generated many times over, drawn anew: hours, if you let it
	FEDALLOY_FUZZ=1 $(BIN)/pytest -q -n 2 --dist loadgroup -m 'fuzz or hypothesis' --timeout 7200

deployment: $(READY) ## run the tests of a real federation, those that take minutes too
	FEDALLOY_DEPLOYMENT=1 $(BIN)/pytest -q tests/deploy/test_deployment.py tests/deploy/test_page.py --durations 15

check: $(READY) ## format, lint and strict types, then all tests
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

format: $(READY) ## put the code into shape
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

bench: $(READY) ## time rounds beside a bare PyTorch loop
	$(BIN)/fedalloy bench --out benchmarks/last.json

docs: $(READY) ## build the documentation site into build/site, strictly: every link is checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: $(READY) ## build wheel and sdist into dist/, install them away from the source and use them there
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	FEDALLOY_DIST=dist $(BIN)/pytest -q tests/test_package.py

clean: ## remove what the targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist runs
