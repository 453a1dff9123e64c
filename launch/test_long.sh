#!/usr/bin/env bash
# What takes longer than launch/test.sh allows: sanitizers, a planted fault that must be found, nvcc for every GPU
# with register spills as errors, and the slow tests. Arguments go to pytest.

# shellcheck source-path=SCRIPTDIR source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

setup build demo bench mpi test
cd "$root"

# ThreadSanitizer's memory map has no place for the most random addresses that Linux can give
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed_addresses=(setarch "$(uname -m)" -R); fi
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1" ASAN_OPTIONS="detect_leaks=1 strict_string_checks=1"

native=()
for source in tests/native/*.cpp; do
  [[ -f $source ]] || die "no native test in tests/native"
  native+=("$(basename "$source" .cpp)")
done

for sanitizer in thread address; do
  build_native "$sanitizer" "-DEP_A2A_SANITIZE=$sanitizer"
  for name in "${native[@]}"; do
    say "$name under the $sanitizer sanitizer"
    timeout 900 "${fixed_addresses[@]}" "build/bin-$sanitizer/$name"
  done
done

say "a build without the release before the flags, which ThreadSanitizer has to find"
build_native no_release -DEP_A2A_SANITIZE=thread -DEP_A2A_FAULT=no_release
found=0
for name in "${native[@]}"; do
  log=build/no_release-$name.log
  timeout 900 "${fixed_addresses[@]}" "build/bin-thread-fault-no_release/$name" >"$log" 2>&1 && continue
  if grep -q 'WARNING: ThreadSanitizer: data race' "$log"; then
    say "$name: $(grep -m 1 '^SUMMARY' "$log")"
    found=1
  fi
done
((found)) || die "no native test reports a data race in a build whose release is removed"

choose_cuda
if command -v nvcc >/dev/null; then
  say "nvcc for every GPU"
  run_cmake -S . -B build/cmake-nvcc -G Ninja -DEP_A2A_CUDA=ON -DEP_A2A_SUFFIX=-nvcc -DEP_A2A_SPILLS_ARE_ERRORS=ON \
    -DEP_A2A_WERROR=ON >build/cmake.log || { cat build/cmake.log >&2 && exit 1; }
  run_cmake --build build/cmake-nvcc --target ep_a2a_cuda
else
  say "skipped: no nvcc on this machine, nothing compiled for GPUs"
fi

exec "$python" -m pytest -m "slow and not gpu" "$@"
