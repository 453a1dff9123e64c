#!/usr/bin/env bash
# The tests that need a GPU, on a machine that has one and asks no package registry:
#
#   bash launch/test_gpu.sh [--wheels FOLDER] [--lib FOLDER] [--commit HASH] [--out FILE] [--quick] [--seconds N]
#                           [--ranks-per-gpu N] [SUITE...]
#
#   --wheels   packages that python3 lacks, as .whl files: installed into build/site-gpu
#   --lib      libep_a2a_host.so and libep_a2a_cuda.so, perhaps litmus beside them: taken where they load on this GPU;
#              else cmake and nvcc build them for it
#   --commit   of the rows that are written, where git cannot say
#   --out      the rows: bench/results/h200_tests.json if not given
#   --quick    what takes 3 minutes at most, in all; its rows are added to those that are there
#   --seconds  how long all suites together may take; those that are cut off have failed
#   --ranks-per-gpu  of all worlds of `processes`; else they have 2 to 16 ranks on whatever GPUs there are
#   SUITE      local, litmus, processes, sanitize, soak: only those; or nvlink, which wants two GPUs
#
# Where GPUs are shared, `processes` runs under launch/mps.sh. Ends with 0 if every suite passed.

# shellcheck disable=SC2329 # traps call these functions
# shellcheck source-path=SCRIPTDIR source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

readonly most_ranks=8
declare -A files=(
  [local]="tests/test_gpu_streams.py tests/test_gpu_errors.py tests/test_gpu_graphs.py tests/test_gpu_local.py"
  [litmus]=tests/test_gpu_litmus.py
  [processes]=tests/test_gpu_processes.py
  [sanitize]=tests/test_gpu_sanitize.py
  [soak]=tests/test_gpu_soak.py
  [nvlink]="tests/test_gpu_nvlink.py tests/test_gpu_errors.py::test_another_current_device"
)
declare -A limit_s=([local]=300 [litmus]=120 [processes]=420 [sanitize]=420 [soak]=420 [nvlink]=240)

wheels="" lib="" quick="" all_s="" ranks_per_gpu="" marks="gpu" suites=() converter=() child="" reports=$root/build/gpu

options() {
  while (($#)); do
    case $1 in
      --wheels | --lib)
        [[ -d ${2:-} ]] || die "$1 ${2:-}: must be a folder"
        printf -v "${1#--}" %s "$(cd "$2" && pwd -P)"
        shift
        ;;
      --commit | --out)
        [[ -n ${2:-} ]] || die "$1: a value is missing"
        if [[ $1 == --out ]]; then converter+=("$1" "$(realpath -m "$2")"); else converter+=("$1" "$2"); fi
        shift
        ;;
      --quick)
        quick=--quick marks="gpu and not slow" all_s=180
        export EP_A2A_SOAK_ROUNDS=2000
        ;;
      --seconds)
        [[ ${2:-} =~ ^[1-9][0-9]{0,4}$ ]] || die "--seconds ${2:-}: must be a number"
        all_s=$2
        shift
        ;;
      --ranks-per-gpu)
        [[ ${2:-} =~ ^[1-9][0-9]?$ ]] || die "--ranks-per-gpu ${2:-}: must be a number in [1, 99]"
        ranks_per_gpu=$2
        converter+=("$1" "$2")
        shift
        ;;
      *)
        [[ -n ${files[$1]:-} ]] ||
          die "$1: neither an option nor a suite: local, litmus, processes, sanitize, soak, nvlink"
        suites+=("$1")
        ;;
    esac
    shift
  done
  ((${#suites[@]})) || suites=(local litmus processes sanitize soak)
}

# fits FOLDER: do both libraries there load, with the structs of these sources and code for this GPU?
fits() {
  [[ -n $1 && -f $1/libep_a2a_host.so && -f $1/libep_a2a_cuda.so ]] &&
    EP_A2A_LIBRARY_DIR=$1 "$python" -c 'import torch
torch.cuda.init()
from ep_a2a import native
native.load("host")
native.load("cuda").load_kernels()'
}

use_libraries() {
  local targets=(litmus) capability
  mkdir -p "$root/build/lib" "$root/build/bin"
  if fits "$lib"; then
    cp "$lib"/libep_a2a_{host,cuda}.so "$root/build/lib"
    if [[ -f $lib/litmus ]]; then
      cp "$lib/litmus" "$root/build/bin"
      return
    fi
  else
    [[ -z $lib ]] || say "--lib $lib: its libraries do not load here"
    targets+=(ep_a2a_host ep_a2a_cuda)
  fi
  choose_cuda
  command -v "${CUDACXX:-nvcc}" >/dev/null || die "no nvcc to build ${targets[*]}: the CUDA toolkit brings it"
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
  say "building ${targets[*]} for compute capability $capability"
  run_cmake -S "$root" -B "$root/build/cmake-gpu" -G Ninja -DEP_A2A_CUDA=ON -DEP_A2A_NATIVE_TESTS=ON \
    -DEP_A2A_CUDA_TARGETS="${capability//./}a" -DEP_A2A_PTX_TARGET= >"$root/build/cmake.log" ||
    { cat "$root/build/cmake.log" >&2 && die "cmake failed"; }
  run_cmake --build "$root/build/cmake-gpu" --target "${targets[@]}" || die "the build failed"
}

# Ends what a suite has left, by its process group.
stop_child() {
  local tries
  [[ -n $child ]] || return 0
  if kill -"$1" -- "-$child" 2>/dev/null; then
    for ((tries = 400; tries > 0; tries--)); do
      kill -0 -- "-$child" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL -- "-$child" 2>/dev/null || true
  fi
  child=""
}

# $1 the exit code that says which signal
interrupted() {
  trap '' INT TERM HUP
  stop_child INT
  trap - EXIT
  exit "$1"
}

run_suite() {
  local name=$1 seconds=${limit_s[$1]} code=0 start=$SECONDS runner=() gpus names out tee tries
  if [[ -n $all_s ]]; then
    ((seconds <= all_s - SECONDS)) || seconds=$((all_s - SECONDS))
    if ((seconds < 5)); then
      say "$name: not run, the $all_s s for all are over"
      echo "124 0" >"$reports/$name.status"
      return
    fi
  fi
  if [[ $name == processes ]]; then
    gpus=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')
    runner=(bash launch/mps.sh --ranks-per-gpu "${ranks_per_gpu:-$(((most_ranks + gpus - 1) / gpus))}" --)
    [[ -z $ranks_per_gpu ]] || export EP_A2A_TEST_RANKS=$((gpus * ranks_per_gpu))
  fi
  read -ra names <<<"${files[$name]}"
  say "$name: at most $seconds s"
  exec {out}> >(exec tee "$reports/$name.log")
  tee=$!
  set -m # the suite gets a process group
  timeout -s INT -k 35 "$seconds" "${runner[@]}" "$python" -m pytest -m "$marks" "${names[@]}" \
    -p no:cacheprovider -o junit_family=xunit1 --junitxml="$reports/$name.xml" >&"$out" 2>&1 &
  child=$!
  set +m
  wait "$child" || code=$?
  stop_child TERM
  exec {out}>&-
  for ((tries = 50; tries > 0; tries--)); do # it ends with what it has to show
    kill -0 "$tee" 2>/dev/null || break
    sleep 0.1
  done
  echo "$code $((SECONDS - start))" >"$reports/$name.status"
}

options "$@"
gpu_visible || die "no GPU is visible on this machine; launch/test.sh runs what needs none"
cd "$root"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=32
export NVSHMEM_REMOTE_TRANSPORT=none # all ranks are on this host
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 # Open MPI only
export NVSHMEM_DISABLE_NVLS=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
rm -rf "$reports"
mkdir -p "$reports"
trap 'stop_child TERM' EXIT
trap 'interrupted 130' INT
trap 'interrupted 143' TERM
trap 'interrupted 129' HUP
use_python "$wheels"
use_libraries
for suite in "${suites[@]}"; do run_suite "$suite"; done
"$python" tests/gpu_results.py "$reports" "${suites[@]}" "${converter[@]}" ${quick:+"$quick"}
