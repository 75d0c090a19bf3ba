# Every target makes what it needs. ARGS passes options on: make test ARGS="-k demo"

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUNS := $(VENV)/.runs
OLDER := build/transformers-4.56.2
SUPPORTED := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))

.DEFAULT_GOAL := help
.PHONY: help env demo test test-older check style types imports format models bench scale proto clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(READY) ## Make .venv and put Lilliput and its tools into it

# a first look needs no tools
demo: $(if $(wildcard $(READY)),$(READY),$(RUNS)) ## Start three servers on this machine and chat with a small real model
	@$(BIN)/lilliput demo $(ARGS)

test: $(READY) ## Run all tests
	$(BIN)/lilliput fetch
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-older: $(OLDER)/.ready ## Run the tests of models, and one of a real swarm, with the oldest transformers that is promised
	PYTHONPATH=$(CURDIR)/$(OLDER) $(BIN)/python -m pytest -n 2 --dist loadfile tests/models tests/client/test_smollm2.py $(ARGS)

# An older transformers, with the releases of its own dependencies that it wants, over the other packages of .venv.
$(OLDER)/.ready: $(READY) Makefile
	rm -rf $(OLDER)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDER) \
		"transformers==4.56.2" "huggingface_hub==0.36.2" "tokenizers==0.22.2"
	@touch $@

check: style types imports ## Check style, types, and who imports whom

style: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-logo

format: $(READY) ## Put the code into the style that check asks for
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

models: $(READY) ## Prove the families of models and write docs/models.md
	$(BIN)/python -m pytest tests/models/test_families.py tests/models/test_quantization.py $(ARGS)
	$(BIN)/python tests/models/models_page.py

bench: $(READY) ## Measure speed
	@$(BIN)/lilliput bench $(ARGS)

scale: $(READY) ## Start 60 servers of a tiny model, and have one client use them all
	LILLIPUT_SCALE_SERVERS=$${LILLIPUT_SCALE_SERVERS:-60} $(BIN)/python -m pytest tests/client/test_scale.py -s $(ARGS)

# Old generated code works with every newer protobuf runtime, new code not with an older one: hence the pinned old compiler.
proto: $(READY) ## Generate the wire's Python code again from lilliput.proto
	rm -rf build/proto
	$(BIN)/python -m venv build/proto
	build/proto/bin/python -m pip install --quiet --disable-pip-version-check "grpcio-tools==1.66.2" "setuptools<80"
	cd src/lilliput/wire && ../../../build/proto/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. lilliput.proto
	rm -rf build/proto

clean: ## Remove what make made here (the model in your cache folder stays)
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv whose Python is gone or too old is made again; one that is only behind pyproject.toml is brought up to date.
define install
	@if ! $(BIN)/python -c '$(SUPPORTED)' 2>/dev/null; then \
		for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
			if $$python -c '$(SUPPORTED)' 2>/dev/null; then found=$$python; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "Lilliput needs Python 3.11, 3.12 or 3.13 with its venv module. Install one, or name one: make env PYTHON=..." >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $$($$found --version)"; \
		$$found -m venv --clear $(VENV); \
	fi
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(1)]'
	@touch $@
endef

$(READY): pyproject.toml constraints.txt
	$(call install,dev)

$(RUNS): pyproject.toml constraints.txt
	$(call install,api)
