# `make` lists the targets. The first one that needs it makes .venv and installs into it; see README.md, "Develop".

PYTHON ?= python3
ENV ?= venv
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 2
OLDER_TRANSFORMERS ?= 5.17.0 5.22.2
GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)

ifeq ($(ENV),venv)
  PY := .venv/bin/python
  READY := .venv/ready
else ifeq ($(ENV),current)
  PY := $(PYTHON)
  READY :=
else
  $(error ENV is venv or current, not $(ENV))
endif

# Without a GPU one exact version, whose CPU build does not bring triton. With one, the newest torch that dsv4 supports.
ifeq ($(GPU),yes)
  TORCH ?= torch>=2.11,<2.14
  TRITON ?=
else
  TORCH ?= torch==2.13.0
  TRITON ?= triton==3.7.1
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test build check bench sanitize clean

help:
	@echo 'make demo     build, publish to a loopback Hub, fetch, kernelize a DeepSeek-V4 and compare it with the original'
	@echo '              ARGS="--real-size --layers 4" takes the true dimensions, on a GPU; ARGS=--help lists the options'
	@echo 'make test     all tests: on the CPU, with older transformers, and again on the GPU if there is one'
	@echo 'make build    build/, as it goes to the Hub'
	@echo 'make check    build, then check it as before publishing'
	@echo 'make bench    benchmarks/sweep.py on the GPU; ARGS are passed on'
	@echo 'make sanitize compute-sanitizer over the small GPU tests (memory, then races)'
	@echo 'make clean    remove build/ and .venv/'
	@echo
	@echo 'PYTHON=python3.12          the interpreter that .venv is made from (3.10 or newer)'
	@echo 'ENV=current                no .venv: PYTHON as it is, with what is installed there (requirements/dev.txt and torch)'
	@echo 'TORCH_INDEX=<address>      index to install torch from, for instance that of PyTorch'"'"'s CPU packages'
	@echo 'OLDER_TRANSFORMERS=        versions that make test adds ($(OLDER_TRANSFORMERS)); empty where pip has no network'

demo: $(READY)
	$(PY) examples/demo.py $(ARGS)

build: $(READY)
	$(PY) -m tools.build

check: build
	$(PY) -m tools.check

bench: $(READY)
	$(PY) benchmarks/sweep.py $(ARGS)

# Small shapes only: under the sanitizer a launch takes a hundred times as long.
SANITIZED := tests/test_rope.py tests/test_rms_norm.py -k '(odd_everything or small or layout or row_count or 33) and not gradcheck and not bad'
sanitize: $(READY)
	for tool in memcheck racecheck; do \
	    env -u TRITON_INTERPRET DSV4_TEST_DEVICE=cuda PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool \
	        --error-exitcode 99 $(PY) -m pytest -q -x $(SANITIZED) || exit 1; done

# One thread in each of the pytest workers: they share the cores.
ON_CPU := DSV4_TEST_DEVICE=cpu TRITON_INTERPRET=1 OMP_NUM_THREADS=1
ON_GPU := env -u TRITON_INTERPRET DSV4_TEST_DEVICE=cuda
OLDER = PYTHONPATH="$(CURDIR)/.venv/transformers-$$version$${PYTHONPATH:+:$$PYTHONPATH}"
MATRIX := -m transformers_matrix $(wildcard tests/test_layer*.py) tests/test_examples.py

test: check $(OLDER_TRANSFORMERS:%=.venv/transformers-%)
	$(ON_CPU) $(PY) -m pytest -n $(JOBS) $(ARGS)
	set -e; for version in $(OLDER_TRANSFORMERS); do \
	    echo "== transformers $$version"; \
	    $(OLDER) $(ON_CPU) $(PY) -m pytest -n $(JOBS) $(MATRIX) $(ARGS); done
ifeq ($(GPU),yes)
	@echo '== on the GPU'
	$(ON_GPU) $(PY) -m pytest $(ARGS)
	set -e; for version in $(OLDER_TRANSFORMERS); do \
	    echo "== transformers $$version on the GPU"; \
	    $(OLDER) $(ON_GPU) $(PY) -m pytest $(MATRIX) $(ARGS); done
endif

PIP = $(PY) -m pip --disable-pip-version-check --quiet
PIP_TORCH = $(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'

.venv/ready: requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12 ...")'
	@echo 'Installing into .venv, once ...'
	$(PYTHON) -m venv .venv
	$(PIP) install --upgrade 'pip>=24'
ifeq ($(GPU)$(origin TORCH),file)
	$(PIP_TORCH) --dry-run --no-deps --ignore-installed --report - | $(PY) requirements/no_cuda_torch.py
endif
	$(PIP_TORCH)
	$(PIP) install $(TRITON) -r requirements/dev.txt
	@touch $@

# An older transformers with the huggingface_hub that it takes, to be put first on PYTHONPATH. Its kernels and torch are
# those of the environment.
.venv/transformers-%: | $(READY)
	@rm -rf $@.part && mkdir -p $(@D)
	$(PIP) install --target $@.part transformers==$*
	@mv $@.part $@

clean:
	rm -rf build .venv
