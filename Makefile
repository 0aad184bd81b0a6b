# `make` lists the targets. Everything is installed into VENV. llama.cpp is compiled once for a user and kept in
# ~/.cache/inferencecenter: docs/building.md has the variables.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
MODEL ?=
PORT ?=
CONFIG ?=
CUDA ?=
VULKAN ?=
PORTABLE ?=
LLAMA ?=
LLAMA_WHEELS ?=
export CUDA VULKAN PORTABLE LLAMA LLAMA_WHEELS
ifdef LLAMA
export LLAMA_CPP_LIB_PATH := $(abspath $(LLAMA))
endif
# What llama.cpp is: as the variables say, else as it is installed.
LIBRARIES := $(if $(LLAMA),,$(if $(CUDA)$(VULKAN)$(LLAMA_WHEELS)$(CMAKE_ARGS),libraries,$(VENV)/.llama))

# Where the service goes. DESTDIR is put before all of it, for packages.
DESTDIR ?=
prefix ?= /opt/inferencecenter
sysconfdir ?= /etc
bindir ?= /usr/local/bin
unitdir ?= $(sysconfdir)/systemd/system
sysusersdir ?= $(sysconfdir)/sysusers.d
tmpfilesdir ?= $(sysconfdir)/tmpfiles.d
WHEELS ?= build/wheels
INSTALLED_BY := prefix='$(prefix)' sysconfdir='$(sysconfdir)' bindir='$(bindir)' unitdir='$(unitdir)' \
	sysusersdir='$(sysusersdir)' tmpfilesdir='$(tmpfilesdir)' DESTDIR='$(DESTDIR)' PYTHON='$(PYTHON)' tools/service

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test test-slow test-clients test-all lint docs site clean wheels install install-files uninstall libraries

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.installed $(LIBRARIES) ## Install and start the daemon: MODEL=file.gguf PORT=3000 CONFIG=file.toml CUDA=1 VULKAN=1
	@exec $(BIN)/inferencecenter serve $(if $(CONFIG),--config '$(CONFIG)') $(if $(MODEL),--model '$(MODEL)') $(if $(PORT),--port '$(PORT)')

test: $(VENV)/.installed-dev $(LIBRARIES) ## Run the tests that take a few minutes together
	$(BIN)/pytest

test-slow: $(VENV)/.installed-dev $(LIBRARIES) ## Run the slow tests
	$(BIN)/pytest -m slow

test-clients: $(VENV)/.installed-dev $(LIBRARIES) ## Run the slow tests of clients, which installs them
	$(BIN)/pytest -m slow tests/clients

test-all: test test-slow ## Run every test, the slow ones too

lint: $(VENV)/.installed-dev site ## Check style, types (of the web page too), imports, the site, and that what is generated is current
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check-house
	$(BIN)/python -m tools.reference --check
	tools/check-web $(VENV)
	tools/check-forge $(VENV)
	tools/check-prose $(VENV)

wheels: $(VENV)/.installed ## Build what `make install` installs, into build/wheels; PORTABLE=1 for other processors too
	@tools/wheels '$(VENV)' '$(WHEELS)'

$(WHEELS):
	@$(MAKE) wheels

install: $(WHEELS) ## Install the service, as root: prefix=/opt/inferencecenter DESTDIR=
	@$(INSTALLED_BY) install '$(WHEELS)'

install-files:
	@$(INSTALLED_BY) install-files

uninstall: ## Remove the service, as root; configuration, sessions and the user stay
	@$(INSTALLED_BY) uninstall

docs: $(VENV)/.installed-dev ## Write the generated documentation and the annotated default configuration
	$(BIN)/python -m tools.reference

site: $(VENV)/.installed-dev ## Build the documentation as a site, into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean: ## Remove the virtual environment, caches and what was built
	rm -rf '$(VENV)' build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml tools/install $(wildcard tools/llama/*)
	@PYTHON='$(PYTHON)' tools/install '$(VENV)'
	$(eval JUST_INSTALLED := yes)

$(VENV)/.installed-dev: $(VENV)/.installed
	@PYTHON='$(PYTHON)' tools/install '$(VENV)' dev
	$(eval JUST_INSTALLED := yes)

$(VENV)/.llama libraries: | $(VENV)/.installed
	@$(if $(JUST_INSTALLED),:,$(BIN)/python -m tools.llama install)
