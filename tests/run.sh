#!/usr/bin/env bash
# Runs every test. PYTHON is an interpreter with the package or, where it is not installed, with what the package needs.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
PYTHON=${PYTHON:-python3}
PYTHON=$(command -v "$PYTHON")
export PATH="$(dirname "$PYTHON"):$PATH"

"$PYTHON" tests/check_layers.py

if [ ! -e /usr/include/gtest/gtest.h ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get install -y -qq libgtest-dev >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq libgtest-dev; } >/dev/null || true
fi

# The C++ tests, and the CUDA kernels on CPU threads, in a build of their own; for real CUDA where there is a GPU to run it.
cuda=OFF
if command -v nvidia-smi >/dev/null; then cuda=ON; fi
cmake -S . -B build/tests -G Ninja -DLIGER_TESTS=ON -DLIGER_CUDA="$cuda" -DPython_EXECUTABLE="$PYTHON" | sed -n '/liger 1/p'
cmake --build build/tests -- -k 0 | tail -1
ctest --test-dir build/tests --output-on-failure

# An installed package is tested as it is; otherwise the sources with the library that was built here.
if ! (cd / && "$PYTHON" -c "import liger_kernel.ops" 2>/dev/null); then
  export LIGER_LIBRARY="$root/build/tests/libliger.so" PYTHONPATH="$root/python"
fi
"$PYTHON" -m pytest -q -p no:cacheprovider --import-mode=importlib --ignore=tests/huggingface tests
"$PYTHON" -m pytest -q -p no:cacheprovider tests/huggingface
LIGER_LIBRARY="$root/build/tests/tests/libliger_emulated.so" "$PYTHON" -m pytest -q -p no:cacheprovider --import-mode=importlib tests/test_ops.py tests/test_distributions.py
