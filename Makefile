# `make help` lists the targets. VENV= uses the Python that is on the path, where nothing can be fetched.
VENV ?= .venv
PYTHON ?= python3
ARGS ?=

venv := $(or $(VENV),.venv)
python := $(if $(VENV),$(venv)/bin/python,$(PYTHON))
environment := $(if $(VENV),,env PYTHONPATH=$(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH)) LIGER_LIBRARY=$(CURDIR)/build/system/libliger.so)
py := $(environment) $(python)
ready := $(if $(VENV),$(venv)/ready,build/system.ready)
build := $(if $(VENV),build/wheel,build/system)
sources := $(shell find liger python cmake -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cmake' -o -name '*.in' -o -name '*.py') \
           CMakeLists.txt pyproject.toml

SHELL := bash
.SHELLFLAGS := -eo pipefail -c
.PHONY: help format lint tidy docs test-docs train train-cpp align check test test-all nightly test-families test-oldest test-torch test-hub downstream fuzz fuzz-hour fuzz-files sanitize nightly-families test-install test-fresh test-platforms test-without-research \
        bench measure install wheel test-wheel clean
.DEFAULT_GOAL := help

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## */\t/' | expand -t 16

train: $(ready)  ## train a Llama, or any family, on real text twice, plain and patched, and compare; ARGS="--family mixtral", "--help" lists the options
	$(py) examples/train.py $(ARGS)

train-cpp: $(ready)  ## train the same Llama in C++ (liger-train) and in Python, patched, and compare losses, speed, memory and start
	$(if $(VENV),,cmake --build build/system)
	$(py) examples/train_cpp.py $(ARGS)

align: $(ready)  ## align a Llama by DPO and GRPO twice, plain and with this library's losses, and compare; ARGS="--loss kto --device cpu"
	$(py) examples/align.py $(ARGS)

# What is built here runs here: CUDA where there is a GPU, for that one, without PTX for others, which takes most of a compilation again.
# tests/run.sh compiles CUDA elsewhere too, for one architecture, to see that it compiles.
gpu := $(shell command -v nvidia-smi)
export LIGER_CUDA ?= $(if $(gpu),ON,OFF)
export LIGER_CUDA_ARCHITECTURES ?= $(if $(gpu),native)
test: $(ready)  ## before a change lands: the C++ API, every operator, the CUDA kernels (emulated without a GPU), Hugging Face, the layers
	PYTHON=$(python) BUILD=$(build) bash tests/run.sh

test-all: $(ready)  ## before a release: the same on every case
	LIGER_TESTS=all PYTHON=$(python) BUILD=$(build) bash tests/run.sh

# The sources as they stand, with the library of the last build: what is installed is not made again for each change.
BASE ?= $(shell git rev-parse --verify --quiet origin/main || echo HEAD)
check:  ## after a change, in a minute or two: what it touches (tests/which.py); BASE=HEAD for what is not committed
	@[ -e $(ready) ] || $(MAKE) $(ready)
	@PYTHONPATH=$(CURDIR)/python LIGER_LIBRARY=$(CURDIR)/$(build)/libliger.so LIGER_TRAIN=$(CURDIR)/$(build)/liger-train BUILD=$(build) \
	  OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(python) tests/which.py $(BASE)

# `make -k nightly` goes on after what fails. One after another: each takes all cores.
.NOTPARALLEL: nightly
nightly: test-all fuzz-hour fuzz-files sanitize nightly-families test-hub downstream test-without-research  ## every night: test-all, an hour of fuzz, broken files under ASan and UBSan, a GPU's sanitizers, other versions of transformers, other tools
nightly-families:
	$(MAKE) test-families VERSIONS="$(OLDEST) 5.6.0 5.24.0"

# A virtual environment, where the target stands, that sees the first one's packages behind those installed into it.
define environment_over_the_first
$(python) -m venv --without-pip $(@D)
$(py) -c "import sysconfig; print(sysconfig.get_path('purelib'))" >$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
endef

# Every family's models. VERSIONS="4.57.6 5.6.0" does it again with those versions of transformers, over the first environment's packages.
VERSIONS ?=
test-families: $(ready) $(VERSIONS:%=build/transformers-%/ready)  ## every model family, with the installed transformers and with VERSIONS="4.57.6 5.6.0 ..."
	for python in $(python) $(VERSIONS:%=build/transformers-%/bin/python); do \
	  $(environment) LIGER_TESTS=all OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $$python -m pytest -q -n 2 -p no:cacheprovider tests/huggingface/test_{families,stands_for,convergence,experts,every_type,plan,recompute,mixers,gated_convolutions,layers}.py --families all $(ARGS) || exit 1; done

OLDEST = 4.57.6
test-oldest: build/transformers-$(OLDEST)/ready  ## with every change: a family of each kind, masks and packed rows with the oldest transformers; two minutes
	$(environment) OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(<D)/bin/python -m pytest -q -n 2 -p no:cacheprovider tests/huggingface/test_{families,stands_for,every_type,ones,masks,packed,encoders}.py $(ARGS)

build/transformers-%/ready: $(ready)
	$(environment_over_the_first)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check transformers==$* && touch $@

# Other versions of torch, each over the first environment's packages, with the library built against it.
test-torch: $(VERSIONS:%=build/torch-%/ready)  ## operators, modules and model families, also compiled, with other versions of torch: VERSIONS="2.14.1 2.15.0"
	export PYTHONPATH=$(CURDIR)/python OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE TORCHINDUCTOR_COMPILE_THREADS=1; \
	for folder in $(VERSIONS:%=build/torch-%); do \
	  export LIGER_LIBRARY=$(CURDIR)/$$folder/build/libliger.so; \
	  test="$$folder/bin/python -m pytest -q -n 2 -p no:cacheprovider $(ARGS)"; \
	  $$test --import-mode=importlib tests/test_ops.py tests/test_cross_entropy.py tests/test_norms.py tests/test_modules.py && $$test tests/huggingface/test_families.py || exit 1; done

build/torch-%/ready: $(ready)
	$(environment_over_the_first)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==$*
	export PATH="$(abspath $(venv))/bin:$$PATH"; \
	cmake -S . -B $(@D)/build -G Ninja -DPython_EXECUTABLE=$(abspath $(@D))/bin/python -DLIGER_CUDA="$$LIGER_CUDA" \
	  -DLIGER_CUDA_ARCHITECTURES="$$LIGER_CUDA_ARCHITECTURES" | sed -n '/liger 1/p' && cmake --build $(@D)/build --target liger
	touch $@

downstream: $(ready)  ## this package inside TRL, LLaMA-Factory, ms-swift, Axolotl, Oumi, DeepSpeed, ...; ARGS="--only axolotl"; half an hour of downloads and tests
	$(py) tests/downstream/run.py $(ARGS)

# `kernels` fits one minor version of transformers or two: that of 5.22. The others are told what to do instead.
# Where there are kernels, the functions that the classic patches replace are modules.
test-hub: build/hub-5.22/ready build/hub-5.23/ready build/hub-4.57/ready  ## use_kernels=True on this library's layers: transformers 5.22 and its kernels, 5.23 with another, 4.57
	$(environment) OMP_NUM_THREADS=2 build/hub-5.22/bin/python -m pytest -q -p no:cacheprovider --import-mode=importlib tests/hub tests/test_hub.py $(ARGS)
	$(environment) LIGER_TESTS=all OMP_NUM_THREADS=2 build/hub-5.22/bin/python -m pytest -q -p no:cacheprovider tests/huggingface/test_rows.py tests/huggingface/test_families.py $(ARGS)
	$(environment) OMP_NUM_THREADS=2 build/hub-5.23/bin/python -m pytest -q -p no:cacheprovider --import-mode=importlib tests/hub/test_versions.py $(ARGS)
	$(environment) OMP_NUM_THREADS=2 build/hub-4.57/bin/python -m pytest -q -p no:cacheprovider --import-mode=importlib tests/hub/test_versions.py $(ARGS)

# Versions of other packages, with what they need, stand in an environment of their own, over the first one's packages.
build/%/ready: requirements-%.txt $(ready)
	$(environment_over_the_first)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@

fuzz: $(ready)  ## draw fresh random cases for as long as told; ARGS="--seconds 600 --device cuda"
	$(py) tests/fuzz.py $(ARGS)

# In a build with AddressSanitizer and UBSan, which reports what is read beyond a buffer, and arithmetic that overflows.
fuzz-files: $(ready)  ## the parsers of safetensors, JSON and tokenizers on broken files; ARGS="600 7": seconds, seed
	PATH="$(abspath $(dir $(python))):$$PATH" cmake --preset asan -DPython_EXECUTABLE=$(abspath $(python)) >/dev/null
	PATH="$(abspath $(dir $(python))):$$PATH" cmake --build --preset asan --target fuzz_files -- -k 0 | tail -1
	$(py) tests/fuzz_files.py build/asan/tests/fuzz_files $(or $(ARGS),600)

fuzz-hour: $(ready)
	$(py) tests/fuzz.py --seconds $(if $(gpu),1800,3600)
	$(if $(gpu),$(py) tests/fuzz.py --seconds 1800 --device cuda)

# initcheck does not see what cuBLAS writes by bulk copies: operators with GEMMs are left out there (tests/sanitize.py).
gemms = fused_linear_cross_entropy gated_mlp fused_experts linear_log_prob linear_distillation
sanitizer := $(or $(shell command -v compute-sanitizer),$(wildcard /usr/local/cuda/bin/compute-sanitizer))
sanitize: $(ready)  ## CUDA kernels under compute-sanitizer: memory, races, what is not initialised; where there is a GPU and that tool
	@$(if $(gpu),$(if $(sanitizer),:,echo "no compute-sanitizer: it is part of CUDA's toolkit" >&2; exit 1),echo "no GPU: nothing to sanitize")
	$(if $(gpu),for tool in memcheck racecheck initcheck; do PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(environment) $(sanitizer) --error-exitcode 1 --tool $$tool \
	  $(python) tests/sanitize.py $$([ $$tool != initcheck ] || echo $(gemms)) || exit 1; done)

test-install: $(ready)  ## every documented way to install, each from a virtual environment with nothing in it (some 10 minutes)
	$(py) -m pytest -q -p no:cacheprovider tests/install.py $(ARGS)

test-fresh:  ## as root: `make train` and `make test` from a clone in an empty Debian, as root, as a plain user, and without dpkg; ARGS="user"
	$(PYTHON) tests/platforms/fresh.py $(ARGS)

test-platforms: $(ready)  ## build for aarch64 (and run it under qemu), Windows (mingw) and ROCm (hipcc); ARGS="aarch64" does one; half an hour
	PATH="$(abspath $(venv))/bin:$$PATH" $(py) tests/platforms/run.py $(ARGS)

without := build/without-research
test-without-research: $(ready)  ## the library without its research operators (LIGER_RESEARCH=OFF): it builds, works, and says what it lacks
	PATH="$(abspath $(venv))/bin:$$PATH" cmake -S . -B $(without) -G Ninja -DPython_EXECUTABLE="$$(realpath -s $$(command -v $(python)))" \
	  -DLIGER_RESEARCH=OFF -DLIGER_CUDA=OFF -DLIGER_MODELS=OFF >/dev/null && cmake --build $(without) --target liger
	export PYTHONPATH=$(CURDIR)/python LIGER_LIBRARY=$(CURDIR)/$(without)/libliger.so; \
	$(python) -m liger_kernel.env_report --device cpu && $(python) -m pytest -q -p no:cacheprovider --import-mode=importlib tests/research/test_without.py

bench: $(ready)  ## time every operator against its rivals; ARGS="--help" lists the options
	$(py) benchmarks/bench.py $(ARGS)

measure: $(ready)  ## every benchmark that the pages show, on this machine, then their tables: hours; ARGS="--only lora", "--list", "--tiny"
	$(py) benchmarks/run_all.py $(ARGS)

install: $(ready)  ## build the package and install it into the virtual environment

TORCH ?= 2.11 2.13 2.14 2.15
CUDA_ARCHITECTURES ?= 80;86;89;90a;100;120
wheel: build/wheel-env/ready  ## one wheel in dist/ for TORCH="2.11 2.13 2.14 2.15"; CUDA_ARCHITECTURES="80;90a", empty: without CUDA kernels; MACHINE=aarch64 cross-builds
	build/wheel-env/bin/python cmake/wheels.py "$(TORCH)" "$(CUDA_ARCHITECTURES)" $(MACHINE)

test-wheel: build/wheel-env/ready  ## install the wheel in dist/ beside each torch, without a compiler; operators, a patched Llama, a C++ program; other Pythons; MACHINE=aarch64: a C++ program under qemu
	$(if $(MACHINE),PATH="$(abspath build/wheel-env/bin):$$PATH" python tests/platforms/run.py wheel,build/wheel-env/bin/python -m pytest -q -p no:cacheprovider --noconftest tests/wheels.py) $(ARGS)

clean:  ## remove what was built
	rm -rf build out $(venv)

# A compiler, make and Python are all that has to be there: what lacks is named before anything is fetched.
$(venv)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON): install python3 and python3-venv (Debian, Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@$(PYTHON) cmake/presupposed.py venv
	$(PYTHON) -m venv $(venv) || { rm -rf $(venv); exit 1; }

# CMAKE_ARGS, which scikit-build-core hands to CMake, may name another mirror (docs/cpp.md).
# torch first, for the build to find; then the package, built against it. With a GPU and no nvcc the compiler comes from the package index.
$(venv)/ready: $(venv)/bin/python requirements.txt $(sources)
	@$(py) cmake/presupposed.py
	$(py) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	if command -v nvidia-smi >/dev/null && ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then \
	  $(py) -m pip install --quiet --disable-pip-version-check -r requirements-cuda.txt; fi
	@mkdir -p build && $(venv)/bin/cmake $(filter -DLIGER_%,$(CMAKE_ARGS)) -P cmake/Sources.cmake
	$(py) -m pip uninstall --quiet --yes liger-kernel 2>/dev/null || true  # another package with the same module
	PATH="$(abspath $(venv))/bin:$$PATH" $(py) -m pip install --disable-pip-version-check --no-build-isolation --no-deps -v . \
	  >build/install.log 2>&1 || { tail -40 build/install.log; exit 1; }
	grep -oE 'liger 1.*' build/install.log
	$(py) -c "import liger_kernel.ops" && touch $(venv)/ready

cpp_files = $(shell git ls-files '*.h' '*.cuh' '*.cpp' '*.cu')
format: build/lint/ready  ## write C++, CUDA and Python as ruff and clang-format have it
	@build/lint/bin/clang-format -i $(cpp_files)
	@build/lint/bin/ruff check --quiet --fix && build/lint/bin/ruff format --quiet

lint: build/lint/ready  ## check that, what ruff and mypy find, the workflows, and that comments keep a line for each formula
	@build/lint/bin/clang-format --dry-run --Werror $(cpp_files)
	@build/lint/bin/ruff check --quiet && build/lint/bin/ruff format --quiet --check
	@build/lint/bin/mypy --no-error-summary
	@build/lint/bin/python tests/check_comments.py
	@build/lint/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@build/lint/bin/zizmor --offline --quiet --no-progress .github/workflows

# Each file alone: the build compiles several as one.
tidy: $(ready) build/lint/ready  ## clang-tidy on C++ files that differ from BASE, or from main: a minute each
	@git diff --name-only --diff-filter=d $(or $(BASE),main) -- 'liger/*.cpp' ':!*_cpu.cpp' | xargs -r -n 1 -P 2 bash tests/tidy.sh $(python) $(build)

# The reference of C++ where Doxygen is: apt-get install doxygen.
docs: build/docs-env/ready  ## the pages, with the reference of Python and C++, as a site: build/docs/index.html
	@NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build --quiet --strict
	@if command -v doxygen >/dev/null; then mkdir -p build/docs/cpp-reference && doxygen docs/site/Doxyfile; fi

test-docs: docs  ## every page of the site in a headless Chromium: links, pictures, errors of scripts, search
	@build/docs-env/bin/python tests/site.py build/docs $(ARGS)

build/lint/ready: requirements-lint.txt
build/docs-env/ready: requirements-docs.txt
build/wheel-env/ready: requirements-wheel.txt
build/lint/ready build/docs-env/ready build/wheel-env/ready:
	$(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $< && touch $@

# Nothing is installed into the system's Python: the library is built beside, and the sources are used where they stand.
build/system.ready: $(sources)
	@$(py) cmake/presupposed.py
	@cmake $(filter -DLIGER_%,$(CMAKE_ARGS)) -P cmake/Sources.cmake
	cmake -S . -B build/system -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) -DLIGER_CUDA="$$LIGER_CUDA" \
	  -DLIGER_CUDA_ARCHITECTURES="$$LIGER_CUDA_ARCHITECTURES" | sed -n '/liger 1/p'
	cmake --build build/system --target liger && touch $@
