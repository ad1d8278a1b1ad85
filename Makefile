# Two commands matter: `make demo` and `make test`.  Both work on a fresh clone and install into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without an NVIDIA GPU a CPU build of torch is enough; set TORCH to install another one.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.9,torch==2.13.0)
PACKAGES := twinpool router prefill_service decode_service kv_transfer

.PHONY: demo test test-long serve check format proto clean

demo: $(VENV)/.installed
	$(BIN)/twinpool demo

serve: $(VENV)/.installed
	$(BIN)/twinpool serve

test: check
	$(BIN)/pytest -m "not slow and not gpu"

test-long: $(VENV)/.dev
	$(BIN)/pytest -m "slow and not gpu"

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(VENV)/.dev  # regenerate twinpool/pb from proto/
	$(BIN)/python tests/architecture/generate_proto.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache

$(VENV)/.installed: pyproject.toml
	@echo "making $(VENV) and installing (a few minutes the first time) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing the test tools ..."
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev]"
	@touch $@
