# make demo   sets up all it needs and trains a model on this machine, from bootstrap to an exported model
# make test   sets up all it needs and runs every test
VENV ?= .venv
TESTS ?= tests/lab
export VENV
BIN := $(VENV)/bin
# Tests wait for processes and disks most of the time.
PROCESSES ?= $(shell echo $$(($$(nproc) + 1)))
# $(call ctest,FOLDER,IN): with a temporary directory of their own, which they must leave empty, in the folder IN.
ctest = TMPDIR=$$(mktemp -d $(if $(2),-p $(2))); export TMPDIR; \
  ctest --output-on-failure -j $(PROCESSES) --test-dir $(1); status=$$?; rmdir "$$TMPDIR" && exit $$status
# Libraries whose own loops train PyTorch models, and what they import.
LOOPS := deepctr-torch==0.3.0 fuxictr==2.3.10 torchfm==0.7.0 pytorch-lightning==2.6.6 accelerate==1.15.0 \
  scikit-learn scipy joblib threadpoolctl narwhals polars polars-runtime-32 tqdm fsspec \
  torchmetrics lightning-utilities huggingface-hub safetensors psutil
LOOPS_MODULES := accelerate, deepctr_torch, fuxictr, pytorch_lightning, torchfm
CMAKE_TEST = cmake -G Ninja -S . -DOE_BUILD_PYTHON=OFF -DOE_BUILD_TESTS=ON $(CMAKE_ARGS)

.PHONY: help setup demo demo-ssd test test-torch test-jax test-hosts test-lab test-kubernetes test-collection test-core bench-quick images sanitize sanitize-address sanitize-thread fuzz simulate lint lint-setup docs docs-check pictures format generate constraints sbom wheel sdist clean

help:
	@echo 'make demo      bootstrap this machine and train DeepFM on it (a directory stands in for PMem)'
	@echo 'make demo-ssd  train 20 GiB of rows on a drive in 4 GiB of memory (GIB=, DIRECTORY=; minutes)'
	@echo 'make test      C++ and Python tests'
	@echo 'make test-torch  those of PyTorch, which it installs (a large download; make test skips them without)'
	@echo 'make test-jax  those of Keras on JAX, which it installs (a large download)'
	@echo 'make test-hosts  the tests on hosts with a Debian of their own (as root, mmdebstrap; minutes)'
	@echo 'make test-lab  the tests on virtual nodes (as root, QEMU; an hour and more; TESTS=FILE for some)'
	@echo 'make test-kubernetes  training on a real Kubernetes and docker (as root; KUBERNETES=DIRECTORY, or built first)'
	@echo 'make test-collection  ansible-test sanity on the Ansible collection (it downloads its tools)'
	@echo 'make bench-quick  every benchmark on tiny sizes: whether it works (minutes; as root those of drives and hosts, too)'
	@echo 'make images    the images of server and worker (ENGINE=podman or docker; minutes)'
	@echo 'make lint      formatters, linters and type checkers, changing nothing'
	@echo 'make docs      serve the documentation site on 127.0.0.1:8000 (DOCS_ADDRESS)'
	@echo 'make docs-check  build it, with warnings as errors'
	@echo 'make format    let the formatters write'
	@echo 'make sanitize  C++ tests under ASan+UBSan and under TSan (clang)'
	@echo 'make fuzz      libFuzzer on the parsers, FUZZ_SECONDS=60 for each (clang)'
	@echo 'make simulate  a whole cluster with faults in one process, SECONDS=60 of new seeds, or SEED=N again'
	@echo 'make generate  write the files that follow from the settings: schema, roles, sample, flags, reference'
	@echo 'make pictures  draw the pictures of the README anew (chromium; two minutes)'
	@echo 'make wheel     a wheel in dist/; make sdist: the sources'
	@echo 'make sbom      a bill of materials (CycloneDX) of the environment in dist/'
	@echo 'make constraints  pin what pyproject.toml asks for; UPGRADE=1 takes the newest versions'
	@echo 'make clean     remove build outputs and .venv (not .oeprov, where jobs and checkpoints live)'

setup:
	@tools/setup.sh run

demo:
	@tools/setup.sh demo
	$(BIN)/oeprov bootstrap -i inventory/local.yml --yes
	$(BIN)/oeprov launch-training -i inventory/local.yml

demo-ssd:
	@tools/setup.sh demo
	$(BIN)/python tools/demo_ssd.py

test: test-core
	@tools/setup.sh test
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile

BACKENDS = tests/oe_runtime/keras/test_keras_backends.py

test-torch: setup
	@tools/setup.sh test
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q 'torch>=2.8'
	@$(BIN)/python -c 'import $(LOOPS_MODULES)' >/dev/null 2>&1 || \
	  $(BIN)/pip install -q --no-deps $(LOOPS) || echo 'make: without libraries that hold the loop; their tests are skipped'
	@$(BIN)/python -c 'import faiss' 2>/dev/null || \
	  $(BIN)/pip install -q --no-deps 'faiss-cpu>=1.9' || echo 'make: without faiss; the two-tower example searches exactly'
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile tests/oe_runtime/pytorch
	$(BIN)/python -m pytest tests/documents/test_examples.py -k pytorch
	$(BIN)/python -m pytest tests/provision/jobs/test_training_end_to_end.py -k accelerate
	KERAS_BACKEND=torch $(BIN)/python -m pytest $(BACKENDS)

test-jax: setup
	@tools/setup.sh test
	@$(BIN)/python -c 'import jax' 2>/dev/null || $(BIN)/pip install -q jax
	KERAS_BACKEND=jax $(BIN)/python -m pytest $(BACKENDS)

test-hosts: setup
	@tools/setup.sh test
	@[ "$$(id -u)" -ne 0 ] || command -v systemd-nspawn >/dev/null || \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends systemd-container >/dev/null
	$(BIN)/python -m pytest -m 'hosts and slow' tests/hosts

test-lab: setup
	@tools/setup.sh test
	@$(BIN)/python -c 'from provision.lab import programs; programs.require(install=True)'
	$(BIN)/python -m pytest -m lab -s $(TESTS)

test-kubernetes: setup
	@tools/setup.sh test
	tools/kubernetes.sh
	$(BIN)/python -m pytest -m kubernetes -s tests/cluster

test-collection: setup
	tools/ansible-sanity.sh

bench-quick: setup
	@tools/setup.sh test
	$(BIN)/python benchmarks/quick.py $(if $(FETCH),--fetch) $(if $(ONLY),--only $(ONLY))

ENGINE ?= podman
images:
	$(ENGINE) build -f containers/Containerfile --target server -t oeprov-server .
	$(ENGINE) build -f containers/Containerfile --target worker -t oeprov-worker .

test-core: setup
	@$(CMAKE_TEST) -B build/test -DCMAKE_BUILD_TYPE=Release >/dev/null
	cmake --build build/test
	$(call ctest,build/test)

# By clang, which takes two thirds of GCC's time for instrumented code. Such programs start slowly: about twenty tests share a
# process.
SANITIZE = $(CMAKE_TEST) -DCMAKE_CXX_COMPILER=clang++ -DOE_WERROR=ON -DCMAKE_BUILD_TYPE=Sanitize -DOE_TEST_SHARDS=48
# Sanitizers look at memory and threads; make test keeps the files of its tests on a disk. Tests that wait for syncs of a
# disk take a fifteenth of the time in memory.
MEMORY = $(shell [ "$$(df --output=avail -m /dev/shm 2>/dev/null | tail -n 1)" -ge 2048 ] 2>/dev/null && echo /dev/shm)
# Crashes under ASan, which takes ten times as long for each; make test has more (pool_crash_test.cc, row_log_crash_test.cc).
SANITIZE_CRASH_POINTS ?= 2000
# Long under TSan, which has nothing to see in them: they have one thread (more of them: oe_runtime/core/CMakeLists.txt).
ONE_THREAD = *AnyIndexTest.*:CompactIndexTest.*:*EveryFlippedByte*:RowLogTest.OneLargeReservation*:RowLogTest.CleaningMoves*
# Of each storage, one number of kept checkpoints is enough for TSan: its threads are the same with any.
KEPT = *TableUpdatesTest.*_3:*TableUpdatesTest.*_5
# Tests that fork: memkind then takes all its locks, which are more than the 64 that TSan holds, if an earlier test of the
# same process used it.
FORKS = *AForkedProcessGivesNothingBack:*RefusesADirectoryThatALiveProcessHolds:*EveryRowIsAsItWasAtTheNewestCheckpoint*

sanitize: sanitize-address sanitize-thread

sanitize-address:
	@tools/setup.sh clang
	@$(SANITIZE) -B build/asan -DOE_SANITIZE=address,undefined >/dev/null
	cmake --build build/asan --target core_test
	export OE_CRASH_POINTS=$(SANITIZE_CRASH_POINTS); $(call ctest,build/asan,$(MEMORY))

sanitize-thread:
	@tools/setup.sh clang
	@$(SANITIZE) -B build/tsan -DOE_SANITIZE=thread >/dev/null
	cmake --build build/tsan --target core_test
	export GTEST_FILTER='-$(ONE_THREAD):$(KEPT):$(FORKS)'; $(call ctest,build/tsan,$(MEMORY))

FUZZ_SECONDS ?= 60

fuzz:
	@tools/setup.sh clang
	tools/fuzz.sh $(FUZZ_SECONDS)

SECONDS ?= 60

simulate: setup
	@$(CMAKE_TEST) -B build/test -DCMAKE_BUILD_TYPE=Release >/dev/null
	cmake --build build/test --target simulate
	build/test/oe_runtime/core/simulate $(or $(SEED),--seconds $(SECONDS))

CXX_FILES = $(shell git ls-files 'oe_runtime/core/*.cc' 'oe_runtime/core/*.h' 'tests/fuzz/*.cc' 'tests/fuzz/*.h' 'tests/simulation/*.cc' 'tests/simulation/*.h' benchmarks/table_bench.cc)

# Each of these is a hook of .pre-commit-config.yaml too.
LINTERS = lint-ruff lint-mypy lint-imports lint-house lint-node lint-ansible lint-cxx lint-tidy docs-check

MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

.PHONY: $(LINTERS)
lint: $(LINTERS)

$(LINTERS): lint-setup

lint-setup:
	@tools/setup.sh lint

lint-ruff:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-mypy:
	$(BIN)/mypy

lint-imports:
	$(BIN)/lint-imports

lint-house:
	$(BIN)/python tools/check_tidy.py

lint-node:
	$(BIN)/vermin --quiet --no-tips --violations -t=3.6- provision/node

lint-ansible:
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/ansible-lint --offline --profile production -q playbooks roles meta

lint-cxx:
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

# Each file by itself, so that it must include what it uses.
lint-tidy:
	@$(CMAKE_TEST) -B build/tidy -DCMAKE_BUILD_TYPE=Release -DOE_UNITY=OFF >/dev/null
	tools/tidy.sh build/tidy

DOCS_ADDRESS ?= 127.0.0.1:8000

docs:
	@tools/setup.sh lint
	$(MKDOCS) serve -a $(DOCS_ADDRESS)

docs-check:
	$(MKDOCS) build --strict --quiet

format:
	@tools/setup.sh lint
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

generate: setup
	$(BIN)/python tools/generate.py

pictures: setup
	@tools/setup.sh test
	$(BIN)/python tools/pictures.py

constraints: setup
	tools/constraints.sh $(if $(UPGRADE),--upgrade)

sbom: setup
	@[ -x build/release/bin/cyclonedx-py ] || { $(BIN)/python -m venv build/release && \
	  build/release/bin/pip install -q --require-hashes -r constraints/release.txt; }
	@mkdir -p dist
	build/release/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application \
	  --output-reproducible -o dist/oeprov.cdx.json $(BIN)/python

wheel: setup
	$(BIN)/pip wheel -q --no-deps --no-build-isolation -w dist .

sdist: setup
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")'

clean:
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache
