# `make` lists the targets. Every target creates or updates the environment in .venv first when that is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --constraint constraints.txt
# Three workers keep two cores busy: a third of a worker's time goes into waiting.
PYTEST := $(BIN)/python -m pytest --numprocesses=3 --dist=loadfile

CONFIG ?= fsdp_full_shard
PRESET ?=
ARGS ?=

# The GPUs that CUDA will show: nvidia-smi does not know about CUDA_VISIBLE_DEVICES.
NUM_GPUS = $(shell if [ -n "$${CUDA_VISIBLE_DEVICES+set}" ]; then printf '%s\n' "$$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c '^[0-9GM]'; \
	else nvidia-smi -L 2>/dev/null | grep -c '^GPU'; fi)
# A name from accelerate_configs/ or a path.
config_file = $(firstword $(wildcard accelerate_configs/$(CONFIG).yaml) $(CONFIG))
# A name from recipes/configs/, with or without the recipe's name in front, or a path. $(1) is the recipe's script.
preset_file = $(firstword $(wildcard recipes/configs/$(1)_$(PRESET).yaml recipes/configs/$(PRESET).yaml) $(PRESET))
# One process per GPU, and what the YAML says where there are no GPUs or where it asks for a single process anyhow.
NUM_PROCESSES ?= $(if $(shell grep -E "^distributed_type: *['\"]?NO['\"]? *$$" $(config_file) 2>/dev/null),,$(filter-out 0,$(NUM_GPUS)))
LAUNCH := $(BIN)/python tools/launch.py

RECIPES := t5-summarize chess-finetune llama-pretrain gpt-shakespeare

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-full test-kill lint check plan download clean $(RECIPES)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9$$(][^=]*:.*## / {gsub(/\$$\(RECIPES\)/, "$(RECIPES)", $$1); printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## the environment in .venv (PYTHON= chooses the interpreter of a new one)

# torch first and alone: a looser range seen first may download several versions of gigabytes each.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), expected Python 3.11 or newer: make install PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing into $(VENV) (downloads PyTorch: a few minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[dev,chess]'
	@touch $@

demo: $(INSTALLED) ## train, evaluate and export the T5 demo preset under FSDP2 (a few minutes without a GPU)
	@if [ -e runs/demo ]; then echo "Removing the previous runs/demo"; rm -r runs/demo; fi
	$(LAUNCH) --config_file accelerate_configs/fsdp_full_shard.yaml --num_processes $(if $(filter 1,$(NUM_GPUS)),1,2) \
		recipes/t5_summarize.py --config recipes/configs/t5_summarize_demo.yaml --output_dir runs/demo

$(RECIPES): $(INSTALLED) ## train a recipe: CONFIG= (accelerate_configs/), PRESET= (recipes/configs/), NUM_PROCESSES=, ARGS=
	$(LAUNCH) --config_file $(config_file) $(addprefix --num_processes ,$(NUM_PROCESSES)) recipes/$(subst -,_,$@).py \
		$(addprefix --config ,$(call preset_file,$(subst -,_,$@))) $(ARGS)

test: $(INSTALLED) ## the tests, without the ones that take minutes
	$(PYTEST) -m "not full"

test-full: $(INSTALLED) ## all tests, without the 200 kills
	$(PYTEST) -m "not kill"

test-kill: $(INSTALLED) ## kill a run at 200 seeded random moments and compare what it goes on with (ten minutes on two cores)
	$(PYTEST) --dist=load -m kill

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: $(INSTALLED) ## explain every YAML of accelerate_configs/ in words, or say what is wrong with it
	$(BIN)/python tools/check_config.py

plan: $(INSTALLED) ## memory per device and largest batch under every YAML: PRESET=, ARGS="--device_memory_gib 80 --num_processes 4 8"
	$(BIN)/python tools/plan.py $(if $(PRESET),--config $(PRESET)) $(ARGS)

download: $(INSTALLED) ## models and data sets into the cache, for machines without a network: PRESET= or ARGS="--model ID"
	$(BIN)/python tools/download.py $(if $(PRESET),--config $(PRESET)) $(ARGS)

clean: ## remove caches and build leftovers (.venv and runs/ stay)
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find common recipes tools tests -name __pycache__ -prune -exec rm -r {} +
