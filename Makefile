# `make train` shows a real agent learning, `make test` runs everything that CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAYOUT ?= processes:2
STEPS ?= 100k
ifndef RUN
RUN := runs/breakout-$(shell date +%Y%m%d-%H%M%S)
endif

# bf16 is fastest where the CPU has instructions for it, and very slow elsewhere.
PRECISION ?= $(shell grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo 2>/dev/null && echo bf16 || echo fp32)

# The recipe is made for 10M steps. Few environments and many, larger gradient steps learn visibly within 100k.
QUICK := --env.protocol classic --env.num-envs 8 --scheme.shards 4 --scheme.acting-batch 4 \
	--algorithm.minibatches 8 --algorithm.learning-rate 1e-3 --precision $(PRECISION)

# Python compiles what is imported, a small part of what is installed. It must keep what it has compiled: the tests start
# thousands of processes, and each would compile torch again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile --constraint constraints.txt

# How tests are spread over processes: a file stays together, since its tests share runs.
SPREAD := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help train test test-full test-quick golden clean
.DEFAULT_GOAL := help

help:
	@echo "make train       train PPO on Atari Breakout for some minutes, then evaluate, record and plot it"
	@echo "make test        lint, type-check and test"
	@echo "make test-full   test all combinations of experiments and layouts, of which make test tries some"
	@echo "make test-quick  lint and test in under three minutes, without what starts other processes or trains for long"
	@echo "make golden      record the digests that tests expect on this platform, after an intended change;"
	@echo "                 BASE=COMMIT compares a commit with this working tree instead"
	@echo "make clean       remove $(VENV); runs/ is kept"

train: $(VENV)/.train
	$(BIN)/lockstep train ppo-atari --env.id Breakout $(QUICK) --total-steps $(STEPS) --layout $(LAYOUT) --run $(RUN)
	$(BIN)/lockstep eval $(RUN) --episodes 10
	$(BIN)/lockstep record $(RUN)
	$(BIN)/lockstep plot $(RUN)
	@echo
	@echo "run folder      $(abspath $(RUN))"
	@echo "video           $(RUN)/video.mp4"
	@echo "learning curve  $(RUN)/learning-curve.png"
	@echo "prove it        $(BIN)/lockstep verify $(RUN) --layout inline"

# Types are checked while tests run: this takes one core for more than a minute.
test: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(BIN)/pyright --pythonpath $(BIN)/python >$(VENV)/types.txt 2>&1 & \
		$(BIN)/python -m pytest $(SPREAD); tests=$$?; \
		wait $$!; types=$$?; cat $(VENV)/types.txt; exit $$((tests | types))

test-full: $(VENV)/.test
	$(BIN)/python -m pytest $(SPREAD) --full

test-quick: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m pytest $(SPREAD) -m "not slow"

golden: $(VENV)/.test
	$(BIN)/python tests/golden.py $(if $(BASE),--base $(BASE))

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "lockstep needs Python 3.10 or later; '$(PYTHON)' is not. Use make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "'$(PYTHON)' cannot create virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Build requirements come from the pinned environment too, hence no build isolation.
$(VENV)/.setuptools: $(VENV)/.venv constraints.txt
	@$(PIP) "setuptools>=77"
	@touch $@

$(VENV)/.train: $(VENV)/.setuptools pyproject.toml
	@echo "Installing lockstep and its dependencies into $(VENV)"
	@$(PIP) --no-build-isolation --editable ".[atari]"
	@touch $@

$(VENV)/.test: $(VENV)/.setuptools pyproject.toml
	@echo "Installing lockstep, its tests' environments and its tools into $(VENV)"
	@$(PIP) --no-build-isolation --editable ".[atari,envpool,mujoco,procgen,ray,dev]"
	@touch $@

clean:
	rm -rf $(VENV)
