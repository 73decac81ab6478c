# Every developer command. `make` alone prints them.
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# The MLX build for this machine: none on macOS, where plain mlx is the Metal build.
MLX_EXTRA ?= $(shell sh scripts/mlx_extra.sh)
COMMA := ,

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast check format bench proto clean

help: ## Print this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|' 2>/dev/null \
		|| grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with everything in it; on Linux without a GPU also a fast BLAS
	@sh scripts/install_blas.sh

$(STAMP): pyproject.toml constraints.txt backend.proto scripts/build_hook.py scripts/gen_proto.py
	sh scripts/make_venv.sh $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,media,metrics$(if $(MLX_EXTRA),$(COMMA)$(MLX_EXTRA))]'
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt mlx-vlm
	@touch $@

demo: install ## Run the main job on the embedded model: thought, tool call, answer, over a real socket
	$(PYTHON) -m backend.cli demo

test: $(STAMP) ## Run all tests (CPU, real tiny models, a real socket); PYTEST_FLAGS=--cov for coverage
	$(PYTHON) -m pytest -q $(PYTEST_FLAGS)

test-fast: $(STAMP) ## Run the tests that need no MLX, in seconds
	$(PYTHON) -m pytest -q -m 'not mlx'

check: $(STAMP) ## Lint, format, types, import contracts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(STAMP) ## Format and fix what can be fixed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: install ## Measure against raw mlx-lm in the same run (BENCH_FLAGS='--json' for JSON)
	$(PYTHON) -m benchmarks $(BENCH_FLAGS)

proto: $(STAMP) ## Generate the stubs again
	$(PYTHON) scripts/gen_proto.py

clean: ## Remove what was made here
	rm -rf $(VENV) build dist .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis backend/pb/*_pb2*
