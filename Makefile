# Every target makes or reuses the environment in .venv by itself; in the repository, docs/without_make.md
# gives the commands behind each target for people without make.
#
#   make lab ARGS="--no-browser --port 8888"     options for JupyterLab
#   make lab PYTHON=python3.12                   the Python that a new .venv is made with
#   make lab TORCH=cuda                          PyTorch with CUDA's libraries, or TORCH=cpu
#   make test INSTALLER=pip                      a new .venv is made with pip, also where uv is

BOOT := $(shell command -v python3 || command -v python || command -v "$(PYTHON)")
NO_PYTHON := echo "The course needs Python 3.11, 3.12 or 3.13, and here there is none: install one \
of these from https://www.python.org/downloads/." >&2; exit 1;
SETUP := $(if $(BOOT),$(BOOT) tools/setup_env.py,$(NO_PYTHON)) $(if $(PYTHON),--python "$(PYTHON)") \
	$(if $(TORCH),--torch "$(TORCH)") $(if $(INSTALLER),--installer "$(INSTALLER)")
RUN := .venv/bin/python
# JupyterLab refuses to run as root, as in a container, unless it is told to
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help setup lab test test-all oldest rules check notebooks class assignments browser book playground bench mutants clean

help:
	@echo 'make lab          open the course in JupyterLab'
	@echo 'make setup        install, and start nothing; after a git pull: update, progress and answers stay'
	@echo 'make test         ten minutes: lint, notebooks against their sources, quick tests, strict nbval'
	@echo 'make test-all     all the tests, but for those that have just passed on the same commit'
	@echo 'make oldest       make test with the lowest versions, apart (ARGS=all: all the tests)'
	@echo 'make rules        notebooks, right answers and techniques under the rules of NCCL (slow)'
	@echo 'make check        the fast part of it: lint, notebooks against their sources'
	@echo 'make notebooks    rebuild the notebooks that are stale (ARGS="03" rebuilds a chapter)'
	@echo 'make class        what learners get, without answers, in a new folder (DIR=/path/to/folder)'
	@echo 'make assignments  the chapters as assignments for nbgrader, in build/assignments'
	@echo 'make browser      run every notebook in headless Chromium and move its sliders'
	@echo 'make book         the notebooks as a static website, in build/book/html'
	@echo 'make playground   pages on which a visitor plays without an installation, in build/playground'
	@echo 'make bench        measure launch and the exercises against the usual tools'
	@echo 'make mutants      small changes of the solutions, which the checks must reject (slow)'
	@echo 'make clean        remove what was generated here, .venv included'

setup:
	@$(SETUP)

lab:
	@$(SETUP)
	@$(RUN) -m jupyterlab --ip=127.0.0.1 --LabApp.default_url=/lab/tree/notebooks $(AS_ROOT) $(ARGS)

test:
	@$(SETUP) --extra dev
	@$(RUN) tools/run_tests.py

test-all:
	@$(SETUP) --extra dev
	@$(RUN) tools/run_tests.py all

oldest:
	@$(SETUP) --extra dev --oldest
	@.venv-oldest/bin/python tools/run_tests.py $(ARGS)

rules:
	@$(SETUP) --extra dev
	@$(RUN) tools/run_tests.py all-rules

check:
	@$(SETUP) --extra dev
	@$(RUN) tools/run_tests.py lint sync

notebooks:
	@$(SETUP) --extra dev
	@$(RUN) tools/notebooks.py build $(ARGS)

class:
	@$(SETUP)
	@$(RUN) tools/class_copy.py "$(DIR)"

assignments:
	@$(SETUP) --extra dev
	@$(RUN) tools/assignments.py build $(ARGS)

browser:
	@$(SETUP) --extra dev
	@$(RUN) -m pytest tests/browser --all-notebooks $(ARGS)

book:
	@$(SETUP) --extra dev
	@$(RUN) tools/book.py $(ARGS)

playground:
	@$(SETUP)
	@$(RUN) tools/playground_pages.py

bench:
	@$(SETUP) --extra dev --extra bench
	@$(RUN) -m tests.benchmarks $(ARGS)

mutants:
	@$(SETUP) --extra dev
	@$(RUN) -m tests.mutations $(ARGS)

clean:
	rm -rf .venv .venv-oldest build .pytest_cache .ruff_cache *.egg-info
	find course_* tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
