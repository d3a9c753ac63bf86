PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch comes first and pinned: an unpinned torch may pull in gigabytes of GPU libraries.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test sweep lint type format clean

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 setuptools
	$(PIP) --no-build-isolation --editable .
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) --no-build-isolation --editable '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) --no-build-isolation --editable '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

demo: $(VENV)/.demo  ## train a language model inside three byte budgets, side by side with torch's ways
	KINETO_LOG_LEVEL=99 $(BIN)/python bench/demo.py

test: $(VENV)/.test  ## the whole test suite, without the slow sweeps
	$(BIN)/python -m pytest

sweep: $(VENV)/.test  ## what takes long: every op, every draw, and the property tests with a thousand examples each
	$(BIN)/python -m pytest -m sweep --timeout 1800 tests
	$(BIN)/python -m pytest --hypothesis-profile sweep --timeout 7200 tests/passes tests/test_dags.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy knows no package-dir: it reads the two folders laid out as they are installed.
type: $(VENV)/.dev
	rm -rf build/types && mkdir -p build/types
	cp -r fxckpt build/types/fxckpt && cp -r passes build/types/fxckpt/passes
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p fxckpt

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
