#!/usr/bin/env bash
# Runs the tests: those of `make test`, or with LIGER_TESTS=all those of `make test-all` (tests/tiers.py). PYTHON is an
# interpreter with the package or, where it is not installed, with what the package needs; BUILD is where CMake has built
# the library.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
PYTHON=${PYTHON:-python3}
PYTHON=$(command -v "$PYTHON")
bin=$(cd "$(dirname "$PYTHON")" && pwd)  # whose ninja a test finds in other folders, where no other is on the path
PYTHON=$bin/$(basename "$PYTHON")
export PATH="$bin:$PATH"

"$PYTHON" tests/check_layers.py

# OpenMP's threads spin while they wait, which takes the cores from the other processes.
export OMP_WAIT_POLICY=PASSIVE

# The C++ tests, and the CUDA kernels on CPU threads, beside the library that was built before; with CUDA, also where it
# was built without: CUDA kernels that no GPU runs are compiled for their errors alone, without optimisation.
if [ "${LIGER_TESTS:-}" != all ] && [ "${LIGER_CUDA:-}" = OFF ] && [[ $("${CUDACXX:-nvcc}" --help 2>&1) == *Ofast-compile* ]]; then
  export LIGER_CUDA_OPTIONS=--Ofast-compile=max
fi
TIMEFORMAT="  in %0lR, with %0lU of CPU time"
cmake -S . -B "$BUILD" -DLIGER_TESTS=ON -DLIGER_CUDA=ON -DLIGER_CUDA_ARCHITECTURES="${LIGER_CUDA_ARCHITECTURES:-90a}" \
  -DLIGER_WHEEL_VERSION= >/dev/null
time cmake --build "$BUILD" -- -k 0 | tail -1
failed=0
time ctest --test-dir "$BUILD" --output-on-failure -j 3 || failed=1

# An installed package is tested as it is; otherwise the sources with the library that was built here.
if ! (cd / && "$PYTHON" -c "import liger_kernel.ops" 2>/dev/null); then
  export LIGER_LIBRARY="$root/$BUILD/libliger.so" PYTHONPATH="$root/python${PYTHONPATH:+:$PYTHONPATH}"
fi
export LIGER_TRAIN="$root/$BUILD/liger-train"
# Every suite runs, whatever the others said.
suite() { time "$PYTHON" -m pytest -q -p no:cacheprovider "$@" || failed=1; }
parallel=()
if "$PYTHON" -c "import xdist" 2>/dev/null; then
  parallel=(-n "$(($(nproc) < 16 ? $(nproc) : 16))" --dist worksteal)  # neighbours share a module's fixture
  export OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=1  # of each process: all cores in each were slower, the more there are
fi
suite "${parallel[@]}" --import-mode=importlib --ignore=tests/huggingface --ignore=tests/downstream --ignore=tests/hub --ignore=tests/test_large.py tests
# The set of instructions that no newer machine chooses, which handles both 16-bit types alike.
exact="exact and cpu"
operators="tests/test_ops.py tests/test_cross_entropy.py tests/test_norms.py"
emulated=test limited="sm_80 sm_89 sm_120" limits=test  # all of them
if [ "${LIGER_TESTS:-}" != all ]; then
  exact+=" and (float32 or bfloat16)"
  emulated="not exact or float32 or bfloat16"  # both 16-bit types are one template
  limited=sm_89 limits="exact and float32"
fi
ATEN_CPU_CAPABILITY=default suite "${parallel[@]}" --import-mode=importlib -k "$exact" tests/test_ops.py
suite "${parallel[@]}" tests/huggingface
suite tests/test_large.py  # fills a GPU's memory: alone
# The emulation has the CPU's tensors: a GPU is out of sight.
emulation() {
  CUDA_VISIBLE_DEVICES= LIGER_LIBRARY="$root/$BUILD/tests/libliger_emulated.so" LIGER_EMULATED_DEVICE="$1" suite "${parallel[@]}" --import-mode=importlib "${@:2}"
}
emulation sm_90 -k "$emulated" $operators tests/test_distributions.py tests/test_reads.py tests/test_optim.py tests/test_causal_conv1d.py tests/research/test_norms.py tests/research/test_sparsemax.py
emulation sm_90 -k rows_of_operators tests/test_batch_invariance.py
emulation sm_90 -k "tiles or many_heads or few_chains" tests/test_delta_rule.py
emulation sm_90 -k "test_linear and bfloat16 or every_number or operator" tests/test_eight_bit.py tests/test_eight_bit_experts.py
emulation sm_90 --import-mode=prepend tests/huggingface/gpu_traces.py
# Devices with less shared memory, and without clusters: other kernels run there.
for device in $limited; do
  emulation "$device" -k "$limits" $operators
  emulation "$device" -k "test_linear and bfloat16" tests/test_eight_bit.py
done
exit $failed
