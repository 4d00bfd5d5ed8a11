# make help lists the targets. Needed on the machine: Python 3.11 or newer, pip and make.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

# tool:package pairs that make test-all needs beyond Python
SYSTEM_TOOLS := prometheus:prometheus promtool:prometheus chromium:chromium

BUILD := build
PORT ?=
MODEL ?=
REPLICAS ?=
SERVE_OPTIONS := $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL)) $(if $(REPLICAS),--replicas $(REPLICAS))

.PHONY: always help setup fetch serve test test-all test-long test-gpu deps dashboards manifests format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP) ## .venv with the locked dependencies

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Pitstop needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -e .
	touch $@

fetch: setup ## the default model, into the cache folder
	$(BIN)/pitstop fetch

serve: setup ## serve a model: make serve PORT=8123 MODEL=/some/folder REPLICAS=2
	$(if $(MODEL),,$(BIN)/pitstop fetch)
	exec $(BIN)/pitstop serve configs/local.yaml $(SERVE_OPTIONS)

test: setup ## format check, lint, types, import directions, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -n 2 --dist loadscope -m "not slow and not long and not gpu"

test-all: setup fetch ## what takes longer or needs system packages, beyond make test
	@for pair in $(SYSTEM_TOOLS); do command -v "$${pair%%:*}" >/dev/null || { \
	    echo "$${pair%%:*} is missing: apt-get install -y $${pair##*:}, or make deps" >&2; exit 1; }; done
	$(PYTEST) -n 2 --dist loadscope -m "slow and not long and not gpu"

test-long: setup ## kills, silences, drains and load steps of a real fleet, for half an hour; no check in CI does
	$(PYTEST) -o faulthandler_timeout=900 -m long

test-gpu: setup ## what needs a CUDA device and flash-attn; no check in CI does
	$(PYTEST) -m gpu

deps: ## install the system packages that make test-all uses, where they are missing
	@missing=(); for pair in $(SYSTEM_TOOLS); do \
	    command -v "$${pair%%:*}" >/dev/null || missing+=("$${pair##*:}"); done; \
	if [ "$${#missing[@]}" -gt 0 ]; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends "$${missing[@]}"; fi

dashboards: $(BUILD)/prometheus.yaml ## Prometheus on port 9090 beside make serve, with its PORT and alerts; configs/grafana has the dashboards
	@command -v prometheus >/dev/null || { echo "prometheus is missing: make deps" >&2; exit 1; }
	@mkdir -p $(BUILD)/prometheus
	@echo "Prometheus: http://127.0.0.1:9090/alerts"
	exec prometheus --config.file=$< --web.listen-address=127.0.0.1:9090 \
	    --storage.tsdb.path=$(BUILD)/prometheus --log.level=warn

# Each time, as PORT may be another one. The alerts are beside the file it is made from.
$(BUILD)/prometheus.yaml: always
	@mkdir -p $(@D)
	@sed -e 's|127\.0\.0\.1:8000|127.0.0.1:$(or $(PORT),8000)|' -e 's|alerts\.yaml|$(CURDIR)/configs/prometheus/&|' \
	    configs/prometheus/prometheus.yaml >$@

manifests: setup ## what is made from elsewhere: parts of k8s/, the page of metrics
	$(BIN)/python -m k8s.generate

format: setup ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what the other targets made here
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
