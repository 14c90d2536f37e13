# What people type in a checkout. `make` alone shows the list; every target may be run again at any time.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
# Present when this very checkout's environment holds what the lock asks for; a warm `make setup` looks no further.
STAMP := $(VENV)/.holds-$(shell { cat requirements-dev.lock pyproject.toml; echo '$(CURDIR)'; } | sha256sum | cut -c1-16)

.PHONY: help setup demo test unit e2e conformance provision-e2e provision-demo lint format protocol lock wheel clean packages

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Make .venv/bin/slurmlet and the upstream binaries (first time: minutes; then a second)
	@$(BIN)/slurmlet upstream > /dev/null

demo: setup ## Watch a Deployment run as Slurm jobs of an unprivileged user on three hosts (root, for the testbed)
	@bash demo/run

test: setup lint unit e2e ## Everything: lint, unit and contract tests, then the real Slurm (root, for the testbed)

unit: setup ## Unit and contract tests, and the lines and branches they reach, by room: no root, no network
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(BIN)/coverage run -m pytest tests/unit tests/contract -n 2 --dist loadgroup
	@$(BIN)/coverage combine --quiet
	@$(BIN)/python tests/coverage_rooms.py

e2e: setup ## Tests on the testbed only (make e2e T="-k logs" picks some)
	@tests/e2e/run $(T)

conformance: setup ## Upstream's conformance specs on a testbed of their own (FOCUS=… picks, ARGS=--list shows; docs/conformance.md)
	@export SLURMLET_TESTBED_NAME=run-conformance; \
	trap '$(BIN)/slurmlet testbed down' EXIT; \
	$(BIN)/slurmlet testbed up --nodes 32 --no-rest; \
	$(BIN)/python -m slurmlet.testbed.conformance $(if $(FOCUS),--focus '$(FOCUS)') $(ARGS)

provision-demo: setup ## Watch machines being made for jobs and going again: Slurm, Cluster API, a picture at the end (root)
	@$(BIN)/python demo/provision.py

provision-e2e: setup ## Tests of `slurmlet provision`: real Cluster API, machines that boot (root; T="-k circle" picks some)
	@tests/provision_e2e/run $(T)

lint: $(STAMP) ## Style, types, layers, no import cycles, and that the runner still parses on Python 3.9
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo 'run `make format`' >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/vermin --quiet --no-tips --violations --target=3.9- src/slurmlet/{linux,protocol,podnet,runner,agent,entrypoint}

format: $(STAMP) ## Put every Python file into the house's format
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format .

wheel: $(STAMP) ## Build dist/slurmlet-*.whl
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist .

protocol: $(STAMP) ## Write docs/protocol.md from the types in src/slurmlet/protocol
	@$(BIN)/python tests/unit/protocol_page.py

lock: $(STAMP) ## Resolve the dependencies anew into requirements*.lock
	@[ -x $(BIN)/uv ] || $(BIN)/python -m pip install --quiet uv
	@compile="$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate"; \
	$$compile pyproject.toml -o requirements.lock > /dev/null; \
	printf 'hatchling\neditables\n' | $$compile --group dev pyproject.toml - -o requirements-dev.lock > /dev/null

clean: ## Take the testbed down and remove what was built here (the cache stays)
	@if [ -x $(BIN)/slurmlet ]; then \
	  $(BIN)/slurmlet testbed down || echo 'the testbed could not be taken down (that needs root)' >&2; fi
	@rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find src tests -type d -name __pycache__ -prune -exec rm -rf {} +
	@cache="$${SLURMLET_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/slurmlet}"; \
	if [ -d "$$cache" ]; then echo "The cache of binaries and system images stays: rm -rf $$cache removes it too."; fi

# A checkout that was moved has scripts that point to its old place: such an environment is made anew.
$(STAMP): requirements-dev.lock pyproject.toml | packages
	@if ! head -3 $(BIN)/pip 2>/dev/null | grep -qF '$(VENV)/' || ! $(BIN)/python -c '' 2>/dev/null; then \
	  for python in python3.13 python3.12 python3.11 python3; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	    python=; \
	  done; \
	  if [ -z "$$python" ]; then echo 'slurmlet needs Python 3.11 or newer with venv (Debian: python3-venv)' >&2; exit 1; fi; \
	  echo "setup: environment with $$($$python --version)"; \
	  $$python -m venv --clear $(VENV); \
	fi
	@echo 'setup: locked dependencies'
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --require-hashes -r requirements-dev.lock
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.holds-*
	@touch $@

# What a bare Debian lacks: venv, what the testbed is made with, a C compiler for runc. Only root can mend it; others
# get as far as they can without.
packages:
	@want=; \
	python3 -c 'import ensurepip, venv' 2>/dev/null || want="$$want python3-venv"; \
	command -v debootstrap > /dev/null || [ -x /usr/sbin/debootstrap ] || want="$$want debootstrap"; \
	command -v ip > /dev/null || [ -x /usr/sbin/ip ] || want="$$want iproute2"; \
	command -v gcc > /dev/null || want="$$want gcc libc6-dev"; \
	[ -e /etc/ssl/certs/ca-certificates.crt ] || want="$$want ca-certificates"; \
	if [ -n "$$want" ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  echo "setup: apt-get install$$want"; \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $$want > /dev/null; \
	fi
