# `make` lists all commands. They need make and python3 (3.10 or newer).

VENV   := .venv
OWN    := $(VENV)/bin/python
PIP    := $(VENV)/bin/pip
STAMP  := $(VENV)/.installed
TESTED := $(VENV)/.tests-installed
# A Python given as PYTHON=, or in the environment, is used as it is: nothing is installed into it.
GIVEN  := $(filter-out $(OWN),$(PYTHON))
override PYTHON := $(or $(GIVEN),$(OWN))
# Otherwise the launchers, whose parent has it, would omit it from the command that resumes the run.
unexport PYTHON
READY  := $(if $(GIVEN),given,$(STAMP))
READY_TO_TEST := $(if $(GIVEN),given,$(TESTED))
NPROC  ?= $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU' | sed 's/^0$$/2/')
CONFIG ?= config/local3.yaml
# Settings: the arguments of the form section.key=value.
SETTINGS = $(strip $(foreach word,$(MAKEOVERRIDES),$(if $(findstring .,$(firstword $(subst =, ,$(word)))),$(word))))
NODES  ?= 4
NODE   ?= login
# The given Python, otherwise the one in .venv if it exists, otherwise python3.
ANY_PYTHON = $(or $(GIVEN),$(wildcard $(OWN)),python3)
# An environment module or a site may provide that Python's packages in PYTHONPATH.
SITE_PATH = $${PYTHONPATH:+:$$PYTHONPATH}

.DEFAULT_GOAL := help
.PHONY: cluster-deps cluster-up cluster-down cluster-shell has-torch test-cluster test-gpu test-login test-nccl test-torch
.PHONY: help files init no-run given setup train sample plot test test-fast lint prove bench-launch bench-step bench-checkpoint bench-restart bench-snapshots bench-failures bench-shapes bench-faults bench-gpu bench-settings bench-scale reference pictures clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | awk -F'|' '{ printf "make %-17s %s\n", $$1, $$2 }'

setup: $(STAMP) ## create .venv and install the requirements

init: ## copy this project into your own repository: DIR=REPOSITORY makes REPOSITORY/launch-kit
	@bash scripts/lib/init.sh "$(DIR)"

train: $(READY) ## train the built-in model on this machine (CONFIG=..., NPROC=..., train.max_steps=...)
	PYTHON=$(PYTHON) scripts/ssh/launch_singlenode.sh $(CONFIG) $(NPROC) $(SETTINGS)

sample: $(if $(RUN),$(READY),no-run) ## generate text from the newest checkpoint of a run of the built-in model (RUN=id)
	@$(PYTHON) -m training.sample checkpoints/$(RUN)

plot: $(if $(RUN),$(READY),no-run) ## draw the metrics of one or more runs beside their logs (RUN="id id")
	@$(PYTHON) -m training.plot $(RUN)

# What a given Python must have.
NEEDED = torch PyYAML
plot: NEEDED = matplotlib
pictures: NEEDED += rich
test test-fast lint test-cluster test-login prove: NEEDED = $(shell sed -n 's/==.*//p' requirements.txt tests/requirements.txt)

given:
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no Python at $(PYTHON); correct PYTHON" >&2; exit 3; }
	@$(PYTHON) tests/lacking.py $(NEEDED)

no-run:
	@echo "make: give RUN=, a run id" >&2; exit 2

test: $(READY_TO_TEST) ## run lint and the tests; list what was skipped, and why
	@PYTHON=$(PYTHON) tests/run.sh all

test-fast: $(READY_TO_TEST) ## run lint and the quick tests, in about a minute
	@PYTHON=$(PYTHON) tests/run.sh fast

lint: $(READY_TO_TEST) ## run shellcheck, shfmt, ruff and mypy; check what make reference writes
	@PYTHON=$(PYTHON) tests/run.sh lint

files: ## list every file with what it is for (FOLDERS="launcher/plan scripts")
	@python3 tests/files.py $(FOLDERS)

test-torch: ## test what another version of torch can break: one row in docs/admin.md (VERSION=2.6.0 PYTHON=...)
	@PYTHONPATH=bench$(SITE_PATH) $(ANY_PYTHON) tests/with_torch.py $(if $(RECORD),--record-failures) $(VERSION)

test-cluster: $(READY_TO_TEST) ## run only the tests on the cluster on this machine (as root)
	@PYTHON=$(PYTHON) tests/run.sh cluster

TEST_GPU = PYTHONPATH=$(CURDIR):$(CURDIR)/bench$(SITE_PATH) $(ANY_PYTHON) tests/gpu $(if $(JSON),--json $(JSON)) $(if $(SECONDS),--seconds $(SECONDS))

has-torch:
	@$(ANY_PYTHON) -c 'import torch, yaml' 2>/dev/null || { \
	  echo "make: $(ANY_PYTHON) lacks torch or PyYAML; install them, or give PYTHON=" >&2; \
	  exit 3; }

test-gpu: has-torch ## test what can break on a GPU: one table, under 10 minutes (PYTHON=..., JSON=FILE)
	@$(TEST_GPU) $(ROWS)

test-nccl: has-torch ## test NCCL between ranks that share a GPU: one table, in 7 minutes (JSON=FILE, PRETEND=1: without a GPU)
	@$(if $(PRETEND),CUDA_VISIBLE_DEVICES= )$(TEST_GPU) --nccl $(if $(PRETEND),--pretend) $(ROWS)

test-login: $(READY_TO_TEST) ## run every test as on a login node, where SLURM and PBS answer (as root)
	@PYTHON=$(PYTHON) tests/login_node.sh tests/run.sh all

cluster-deps: ## install the packages that the cluster needs, with apt-get (as root)
	@tests/cluster/cluster.sh deps

cluster-up: ## start a cluster with a real SLURM on this machine (as root; NODES=4)
	@tests/cluster/cluster.sh up $(NODES)

cluster-shell: ## open a shell on a host of the cluster (as root; NODE=login, node1, ...)
	@tests/cluster/cluster.sh shell $(NODE)

cluster-down: ## stop the cluster and everything on it (as root)
	@tests/cluster/cluster.sh down

prove: $(READY_TO_TEST) ## run the long proofs, and write bench/proofs.md (PART=list shows its parts; TIMES=5)
	@PYTHONPATH=.:tests/unit:bench $(PYTHON) tests/prove.py $(if $(TIMES),--times $(TIMES)) $(PART)

bench-launch: $(READY) ## measure a launch to its first step: our launcher and others
	$(PYTHON) bench/launch.py

bench-step: $(READY) ## measure a training step: train.py and a bare loop
	$(PYTHON) bench/step.py

bench-checkpoint: $(READY) ## measure a save: the stall, end to end, the cost for a loop; ours and torch's
	PYTHONPATH=. $(PYTHON) bench/checkpoint.py

bench-restart: $(READY) ## measure a restart after a killed rank: ours and torchrun
	$(PYTHON) bench/restart.py

bench-snapshots: $(READY) ## measure snapshots in memory: their cost, and what a kill costs with them
	$(PYTHON) bench/snapshots.py

bench-failures: $(READY) ## compare what launchers do when a rank fails or the launcher is killed
	$(PYTHON) bench/failures.py

bench-shapes: $(READY) ## run copies of well-known scripts under torchrun and our launchers (as root)
	$(PYTHON) bench/shapes.py

bench-scale: $(READY) ## measure node rank 0 and the launcher in runs of up to 1,024 simulated nodes
	PYTHONPATH=. TORCH_CPP_LOG_LEVEL=ERROR $(PYTHON) bench/scale.py

bench-gpu: $(READY) ## measure training on one GPU: train.py, a bare loop, accelerate, Lightning
	PYTHONPATH=. $(PYTHON) bench/gpu.py

bench-settings: $(READY) ## measure what each setting gives GPT-2 on one GPU, in 8 minutes (JSON=FILE, PRETEND=1: without a GPU)
	$(if $(PRETEND),CUDA_VISIBLE_DEVICES= )PYTHONPATH=. $(PYTHON) bench/gpu_settings.py $(if $(PRETEND),--pretend) $(if $(JSON),--json $(JSON)) $(if $(SECONDS),--seconds $(SECONDS)) $(ROWS)

bench-faults: $(READY) ## cause each fault on the cluster on this machine, under our launchers and torchrun (as root)
	$(PYTHON) bench/faults.py

reference: ## write docs/reference.md's tables and --help from launcher/plan/settings.ini
	@$(ANY_PYTHON) -m docs.reference

pictures: $(READY) ## draw the pictures of the README from real runs
	$(PYTHON) docs/pictures.py

clean: ## remove .venv and caches; logs and checkpoints stay
	rm -rf $(VENV) .tools .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip's output is long; it is shown only when pip fails.
$(OWN):
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	  { echo "make: python3 is missing or older than 3.10; install Python 3.10 or newer" >&2; exit 3; }
	@python3 -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "make: python3 has no venv module; install it (Debian: apt install python3-venv)" >&2; exit 3; }
	@python3 -m venv $(VENV)

# uv creates a .venv without pip.
$(PIP): | $(OWN)
	@[ -e $@ ] || $(OWN) -m ensurepip --default-pip >/dev/null 2>&1 || \
	  { echo "make: $(OWN) has no pip; run uv pip install --python $(OWN) pip, or remove $(VENV)" >&2; exit 3; }

$(STAMP): requirements.txt | $(PIP)
	@echo "installing $< into $(VENV) (torch for CUDA: 3 GB to download, some minutes)"
	@$(OWN) -m pip install -qq --disable-pip-version-check -r $<
	@touch $@

$(TESTED): tests/requirements.txt $(STAMP)
	@echo "installing $< into $(VENV)"
	@$(OWN) -m pip install -qq --disable-pip-version-check -r $<
	@touch $@
