# `make` lists the targets. Everything is installed into VENV. llama.cpp is compiled once per user and cached in
# ~/.cache/inferencecenter; docs/building.md documents the variables.

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
# The build of llama.cpp: by the variables, else as installed.
LIBRARIES := $(if $(LLAMA),,$(if $(CUDA)$(VULKAN)$(LLAMA_WHEELS)$(CMAKE_ARGS),libraries,$(VENV)/.llama))

# Locations of the service. DESTDIR is prepended to all of them, for packages.
DESTDIR ?=
prefix ?= /opt/inferencecenter
sysconfdir ?= /etc
bindir ?= /usr/local/bin
unitdir ?= $(sysconfdir)/systemd/system
sysusersdir ?= $(sysconfdir)/sysusers.d
tmpfilesdir ?= $(sysconfdir)/tmpfiles.d
WHEELS ?= build/wheels
# Vulkan's compiler and headers, where they are installed.
VULKAN_TOOLS := $(and $(shell command -v glslc),$(wildcard /usr/include/vulkan/vulkan.hpp),$(wildcard /usr/include/spirv/unified1/spirv.hpp))
DEVICE_LIBRARIES := INFERENCECENTER_TEST_RPC_LIBS="$${INFERENCECENTER_TEST_RPC_LIBS-$(CURDIR)/build/llama-rpc}" \
	INFERENCECENTER_TEST_VULKAN_LIBS="$${INFERENCECENTER_TEST_VULKAN_LIBS-$(if $(VULKAN_TOOLS),$(CURDIR)/build/llama-vulkan)}"
INSTALLED_BY := prefix='$(prefix)' sysconfdir='$(sysconfdir)' bindir='$(bindir)' unitdir='$(unitdir)' \
	sysusersdir='$(sysusersdir)' tmpfilesdir='$(tmpfilesdir)' DESTDIR='$(DESTDIR)' PYTHON='$(PYTHON)' tools/service

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run nn test test-devices test-slow device-libraries test-extra test-clients test-all lint docs site clean wheels install install-files uninstall libraries

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.installed $(LIBRARIES) ## Install and start the daemon: MODEL=file.gguf PORT=3000 CONFIG=file.toml CUDA=1 VULKAN=1
	@exec $(BIN)/inferencecenter serve $(if $(CONFIG),--config '$(CONFIG)') $(if $(MODEL),--model '$(MODEL)') $(if $(PORT),--port '$(PORT)')

nn: ## Build the C library in build/nn
	@$(MAKE) -C clients/c OUT='$(abspath build/nn)'

test: $(VENV)/.installed-dev $(LIBRARIES) ## Run the fast tests, a few minutes
	$(BIN)/pytest

test-slow: $(VENV)/.installed-dev $(LIBRARIES) device-libraries ## Run the slow tests
	$(DEVICE_LIBRARIES) $(BIN)/pytest -m slow

test-devices: $(VENV)/.installed-dev $(LIBRARIES) device-libraries ## Run the slow tests of GPUs, Vulkan and RPC
	$(DEVICE_LIBRARIES) $(BIN)/pytest -m slow tests/gpu tests/vulkan tests/rpc

# llama.cpp with RPC, and with Vulkan where its compiler is installed.
device-libraries: $(VENV)/.installed-dev
	@[ -n "$${INFERENCECENTER_TEST_RPC_LIBS+set}" ] || CUDA= VULKAN= CMAKE_ARGS=-DGGML_RPC=ON $(BIN)/python -m tools.llama unpack build/llama-rpc
	@[ -n "$${INFERENCECENTER_TEST_VULKAN_LIBS+set}" ] || [ -z '$(VULKAN_TOOLS)' ] || \
		CUDA= VULKAN=1 CMAKE_ARGS= $(BIN)/python -m tools.llama unpack build/llama-vulkan

test-extra: $(VENV)/.installed-dev $(LIBRARIES) ## Install third-party clients and run their tests
	$(BIN)/pytest -m extra

test-clients: test-extra

test-all: test test-slow test-extra ## Run all tests

lint: $(VENV)/.installed-dev site ## Check style, types (also of the web page), imports, the site and generated files
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check-house
	$(BIN)/python -m tools.reference --check
	tools/check-web $(VENV)
	tools/check-forge $(VENV)
	tools/check-prose $(VENV)

wheels: $(VENV)/.installed ## Build the wheels for `make install` in build/wheels; PORTABLE=1 for any CPU
	@tools/wheels '$(VENV)' '$(WHEELS)'

$(WHEELS):
	@$(MAKE) wheels

install: $(WHEELS) ## Install the service, as root: prefix=/opt/inferencecenter DESTDIR=
	@$(INSTALLED_BY) install '$(WHEELS)'

install-files:
	@$(INSTALLED_BY) install-files

uninstall: ## Remove the service, as root; keeps configuration, sessions and user
	@$(INSTALLED_BY) uninstall

docs: $(VENV)/.installed-dev ## Generate documentation and the annotated default configuration
	$(BIN)/python -m tools.reference

site: $(VENV)/.installed-dev ## Build the documentation site in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean: ## Remove the virtual environment, caches and builds
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
