# make test and make quickstart do all their own set-up in .venv and re-use it. With CONSTRAINTS=constraints.txt
# they install exactly the versions that are written there. Modules are compiled as they are first imported: a
# quarter of what is installed is, and pip takes over a minute to compile all of it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?=
INSTALLED := $(VENV)/.installed-$(shell cat pyproject.toml $(CONSTRAINTS) | cksum | cut -d' ' -f1)
PAIRS ?= 6400
SFT_ROWS ?= 20000
SAMPLES ?= 1440
PACKAGE := .mypy_cache/package/pacmr_lightning

.PHONY: quickstart test test-slow types docs clean

$(INSTALLED):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e ".[test,oracle]" \
		$(addprefix --constraint ,$(CONSTRAINTS))
	touch $@

quickstart: $(INSTALLED)
	rm -rf runs/quickstart
	$(BIN)/pacmr quickstart --pairs $(PAIRS) --sft_rows $(SFT_ROWS) --samples $(SAMPLES)

# Types are checked beside the tests: it takes a minute the first time, and seconds from then on.
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .mypy_cache
	$(MAKE) -s types > .mypy_cache/report 2>&1 & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(TESTS); \
	tests=$$?; wait $$types; types=$$?; cat .mypy_cache/report; exit $$((tests | types))

# mypy does not know where pyproject.toml puts the three folders, so links lay them into one package for it.
types: $(INSTALLED)
	rm -rf $(PACKAGE)
	mkdir -p $(PACKAGE)
	ln -s $(addprefix ../../../,$(wildcard pacmr_lightning/*) datamodules callbacks) $(PACKAGE)
	$(BIN)/python -m mypy -p pacmr_lightning

# Kills, groups of processes, whole tools and the notebook, which needs what the docs need: another half hour.
test-slow: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(TESTS)

# A broken link, or a docstring that is no reStructuredText, ends it.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf $(VENV) build dist *.egg-info
