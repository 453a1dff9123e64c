#!/usr/bin/env bash
# What takes longer than launch/test.sh allows: builds with sanitizers and planted faults, nvcc for every GPU with
# register spills as errors, then the slow tests, which run them. Arguments go to pytest.

# shellcheck source-path=SCRIPTDIR source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

setup build demo bench mpi test
cd "$root"

# tests/test_native.py runs these: clean under both sanitizers, the planted faults found; tests/test_hostile.py builds
# its own
build_native thread -DEP_A2A_SANITIZE=thread
build_native address -DEP_A2A_SANITIZE=address
build_native no_release -DEP_A2A_SANITIZE=thread -DEP_A2A_FAULT=no_release
build_native no_wait -DEP_A2A_FAULT=no_wait

choose_cuda
if command -v nvcc >/dev/null; then
  say "nvcc for every GPU"
  run_cmake -S . -B build/cmake-nvcc -G Ninja -DEP_A2A_CUDA=ON -DEP_A2A_SUFFIX=-nvcc -DEP_A2A_SPILLS_ARE_ERRORS=ON \
    -DEP_A2A_WERROR=ON -DEP_A2A_NATIVE_TESTS=ON >build/cmake.log || { cat build/cmake.log >&2 && exit 1; }
  run_cmake --build build/cmake-nvcc --target ep_a2a_cuda litmus
  "${CUDACXX:-nvcc}" -std=c++20 -O3 -arch=sm_90 -Icuda -Itests/native -Werror=all-warnings -o build/links bench/links.cu
else
  say "skipped: no nvcc on this machine, nothing compiled for GPUs"
fi

export CUDA_VISIBLE_DEVICES="" # these tests are of the CPU, whatever the machine has
exec "$python" -m pytest -m "slow and not gpu" "$@"
