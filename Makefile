PYTHON ?= python3
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
# Another version has an environment of its own: make test TORCH=2.15.0
TORCH ?= $(PINNED)
VENV := .venv$(if $(filter-out $(PINNED),$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
# torch comes first and pinned: an unpinned torch may pull in gigabytes of GPU libraries.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV)/constraints.txt

# Other versions of torch ask for other setuptools: 2.11 for one below 82.
CONSTRAINTS := sed 's/^torch==.*/torch==$(TORCH)/$(if $(filter-out $(PINNED),$(TORCH)),; /^setuptools==/d)'

# What differs most between versions of torch, in a few minutes.
SMOKE := tests/project/test_versions.py tests/backend/test_api.py tests/promises/test_random.py tests/planner/test_streams.py \
    tests/inductor/test_compile.py tests/inductor/test_memory.py tests/eager/drop_in tests/cli

# mypy and import-linter know no package-dir: they read the two folders as they are installed.
INSTALLED := rm -rf build/installed && mkdir -p build/installed && cp -r fxckpt build/installed/fxckpt \
    && cp -r passes build/installed/fxckpt/passes

.PHONY: demo test smoke sweep gpu gpu-wheels torch-tests recipes notebooks docs web lint type format clean

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(CONSTRAINTS) constraints.txt > $(VENV)/constraints.txt
	$(PIP) torch==$(TORCH) 'setuptools>=77'
	$(PIP) --no-build-isolation --editable .
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) --no-build-isolation --editable '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) --no-build-isolation --editable '.[test]'
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) --no-build-isolation --editable '.[docs]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

demo: $(VENV)/.demo  ## train a language model inside three byte budgets, side by side with torch's ways
	KINETO_LOG_LEVEL=99 $(BIN)/python bench/demo.py

test: $(VENV)/.test  ## the whole test suite, without the slow sweeps
	$(BIN)/python -m pytest -n 2 --dist worksteal

smoke: $(VENV)/.test  ## a few minutes of the test suite, for torch versions beside the pinned one
	$(BIN)/python -m pytest -n 2 --dist worksteal $(SMOKE)

sweep: $(VENV)/.test  ## what takes long: every op, draw and budget, and the property tests with a thousand examples each
	$(BIN)/python -m pytest -m sweep --timeout 1800 tests
	$(BIN)/python -m pytest --hypothesis-profile sweep --timeout 7200 tests/solver tests/passes tests/utils tests/planner/test_dags.py

# A machine with a GPU has its own torch, which stays as it is, and often no network: the packages
# that it lacks come from build/wheels.
GPU_VENV := build/gpu-venv
GPU_PACKAGES := scipy networkx tabulate tqdm platformdirs pytest pytest-timeout hypothesis 'setuptools>=77,<82'
GPU_PYTHON ?= 3.12
GPU_OUT := $(or $(OUT),bench/out)
ONLY ?= *
SECONDS ?= 500

gpu-wheels:  ## collect, with a network, what a machine with a GPU may lack
	rm -rf build/wheels && mkdir -p build/wheels
	grep -v '^setuptools==' constraints.txt >build/gpu-constraints.txt
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --only-binary :all: --python-version $(GPU_PYTHON) --implementation cp \
	    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 --platform any --constraint build/gpu-constraints.txt --dest build/wheels $(GPU_PACKAGES)

gpu:  ## on a machine with a GPU: its tests, and bench/gpu.py; results in $$OUT or bench/out
	$(PYTHON) bench/gpu_setup.py $(GPU_VENV) build/wheels $(GPU_PACKAGES)
	$(GPU_VENV)/bin/python bench/gpu.py --tests --only '$(ONLY)' --seconds $(SECONDS) --out $(GPU_OUT)

# FILES="test/test_autograd.py:checkpoint" and WAYS="checkpoint,floor" choose; ON_CPU=cuda runs that
# device's cases on the CPU.
torch-tests: $(VENV)/.test  ## torch's own tests, from a checkout in TORCH_SRC, with fxckpt in place of parts of torch
	@test -n "$(TORCH_SRC)" || { echo "give a checkout of torch: make torch-tests TORCH_SRC=path/to/pytorch"; exit 1; }
	$(BIN)/python -m tests.torch_suite $(TORCH_SRC) $(FILES) $(if $(WAYS),--ways $(WAYS)) $(if $(ON_CPU),--on-cpu $(ON_CPU))

$(VENV)/.recipes: $(VENV)/.base
	$(PIP) --no-build-isolation --editable '.[recipes]'
	touch $@

recipes: $(VENV)/.recipes  ## run the scripts of docs/trainers.md against the real packages
	for recipe in docs/recipes/*.py; do echo $$recipe && $(BIN)/python $$recipe || exit 1; done

notebooks: $(VENV)/.test  ## run the notebooks and keep what they print
	$(BIN)/python notebooks/run.py

# The site has the tree's own layout, so that one relative link holds in it and in the tree.
docs: $(VENV)/.docs  ## build the documentation as a site in build/site
	rm -rf build/pages build/site && mkdir -p build/pages
	find . -path './.*' -prune -o -path ./build -prune -o -name '*.md' -print -o -path './notebooks/pictures/*' -print \
	    | tar cf - -T - | tar xf - -C build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The lock file pins each version and the hash of what is fetched; the copies are committed, so that
# neither npm nor a network is needed to install.
web:  ## fetch the libraries of the HTML page again (needs npm)
	rm -rf build/web && mkdir -p build/web fxckpt/reports/web/vendor
	cp fxckpt/reports/web/package.json fxckpt/reports/web/package-lock.json build/web
	cd build/web && npm ci --ignore-scripts --no-audit --no-fund
	cd build/web/node_modules && cp cytoscape/dist/cytoscape.min.js @dagrejs/dagre/dist/dagre.min.js uplot/dist/uPlot.iife.min.js \
	    uplot/dist/uPlot.min.css ../../../fxckpt/reports/web/vendor
	cd build/web/node_modules && for name in cytoscape @dagrejs/dagre @dagrejs/graphlib uplot; do \
	    cp $$name/LICENSE ../../../fxckpt/reports/web/vendor/LICENSE.$$(basename $$name); done
	cd fxckpt/reports/web/vendor && sha256sum *.js *.css > SHA256SUMS

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(INSTALLED)
	cd build/installed && ../../$(BIN)/lint-imports ../../pyproject.toml

type: $(VENV)/.dev
	$(INSTALLED)
	cd build/installed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p fxckpt

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
