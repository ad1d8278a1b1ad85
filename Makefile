# Two commands matter: `make demo` and `make test`.  Both work on a fresh clone and install into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Without an NVIDIA GPU a CPU build of torch is enough and much smaller, where pip is set up to find one.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.9,torch==2.13.0+cpu)

.PHONY: demo test test-long study sim-accuracy gpu-check serve check format proto clean

demo: $(VENV)/.installed
	$(BIN)/twinpool demo

serve: $(VENV)/.installed
	$(BIN)/twinpool serve

test: check
	$(BIN)/pytest -m "not slow and not gpu"

test-long: $(VENV)/.dev
	$(BIN)/pytest -m "slow and not gpu"

gpu-check: $(VENV)/.dev  # a table, and docs/measurements/DATE-GPU.json; without a GPU it skips everything
	$(BIN)/python -m tests.gpu.check

# Three workers of one thread each, divided 1:2, 2:1 and not at all: about 15 minutes on two cores.  What is in
# $(STUDY) is kept, so it goes on where it was stopped; remove the folder to begin anew.
STUDY ?= study
study: $(VENV)/.lab
	$(BIN)/twinpool sweep --workers 3 --ratios 1:2,2:1 --colocated --threads 1 --kv-memory 1GiB \
	  --workload "synthetic:prompt=bimodal(48,512,long_share=0.25,spread=0.3),output=uniform(12,36),seed=1" \
	  --rates 0.4,0.75,1.5 --ttft 2s --tpot 150ms --cell 18 --late-limit 100ms --out $(STUDY)
	mkdir -p docs/study
	cp -r $(STUDY)/report.html $(STUDY)/study.json $(STUDY)/figures docs/study/

# Calibrates this machine, predicts five layouts at three loads, runs them, and writes docs/benchmarks.md: about 12
# minutes.  What is in sim-accuracy/ is kept, so it goes on where it was stopped.
sim-accuracy: $(VENV)/.dev
	$(BIN)/python -m benchmarks.sim_accuracy --write

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
	$(PIP) install "$(TORCH)" || { echo "taking the default build of torch ..."; $(PIP) install "torch>=2.9"; }
	$(PIP) install -e .
	@touch $@

$(VENV)/.lab: $(VENV)/.installed
	$(PIP) install -e ".[lab]"
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing the test tools ..."
	$(PIP) install -e ".[dev]"
	@touch $@
