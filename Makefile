# make search   set up, then search the bundled miniature: 200 trials, 3 confirmed (TRIALS=20 CONFIRM=0: a first look)
# make test     set up, then run lint, types and every test
# make setup    the shared part alone: .venv with what the CPU path needs

PYTHON ?= python3
TRIALS ?= 200
CONFIRM ?= 3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

.PHONY: search test setup lint clean

search: setup
	$(PY) -m search.run --trials $(TRIALS) --confirm $(CONFIRM)

test: setup lint
	sh tests/install_browser.sh $(VENV)
	$(PY) -m pytest -n 2 -m "not vllm"
	$(PY) -m pytest -m vllm

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

setup: $(STAMP)

$(STAMP): pyproject.toml setup.sh
	PYTHON=$(PYTHON) sh setup.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV)
