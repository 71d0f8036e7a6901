# What a user types: run, demo, test, check. Everything happens inside .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev

# One after the other: each of these starts an inference engine, and some run for many minutes.
VLLM_TESTS := $(BIN)/python -m pytest tests/vllm -o faulthandler_timeout=1800

.PHONY: run demo test test-full test-guest test-guest-smoke test-vllm test-vllm-smoke vllm lmcache check format bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev
	@touch $@

run: $(STAMP)  ## start the gateway on a soft card, in the foreground
	@$(BIN)/xkv-gateway serve

demo: $(STAMP)  ## status and a short replay against a running gateway (starts one if none runs)
	@sh bench/demo.sh $(BIN)/xkv-gateway

test: $(DEV)  ## the test-suite (under 10 minutes)
	$(BIN)/python -m pytest --numprocesses auto

test-full: $(DEV) lmcache  ## everything that this machine can run, however long
	$(BIN)/python -m pytest --numprocesses auto -m "not soak and not vllm and not guest"
	$(BIN)/python -m pytest -m guest tests/guest
	$(VLLM_TESTS) -m vllm

test-guest: $(DEV)  ## what needs Linux as a peer, in a guest under QEMU (Debian's packages, no installation)
	$(BIN)/python -m pytest -m guest tests/guest

test-guest-smoke: $(DEV)  ## the shortest of these
	$(BIN)/python -m pytest -m "guest and smoke" tests/guest

test-vllm: $(DEV) lmcache  ## the connector and the front end with a real vLLM on the CPU (in .venv-vllm, or where XKV_VLLM_VENV says)
	$(VLLM_TESTS) -m vllm

test-vllm-smoke: $(DEV) vllm  ## the shortest of these
	$(VLLM_TESTS) -m "vllm and smoke"

vllm: $(DEV)
	$(BIN)/python -m tests.vllm.environment

lmcache: $(DEV)
	$(BIN)/python -m tests.vllm.environment --lmcache

check: $(DEV)  ## ruff, format, mypy strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(DEV)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV)  ## speed and memory; see bench/README.md
	$(BIN)/python -m bench

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-vllm build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
