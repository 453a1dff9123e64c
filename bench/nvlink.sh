#!/usr/bin/env bash
# All that wants two GPUs which NVLink joins, on a machine that has them and asks no package registry:
#
#   bash bench/nvlink.sh [--wheels FOLDER] [--lib FOLDER] [--commit HASH] [--out FOLDER] [--seconds N] [PART...]
#
#   --wheels, --lib, --commit   as for launch/test_gpu.sh; `links` may lie beside the libraries, else nvcc builds it
#   --out      where the results go: bench/results if not given
#   --seconds  how long all parts together may take; what is cut off has failed
#   PART       only those, in the order given:
#     links    rates of stores, loads, bulk copies and the copy engine, flags: h200x2_links.json
#     one      tests with one rank a GPU: a rank that is killed, 100,000 rounds, processes, litmus
#     four     processes, four ranks a GPU, under MPS
#     eight    processes, eight ranks a GPU, under MPS; the tests' rows: h200x2_tests.json
#     a2a      dispatch and combine, one rank a GPU: h200x2_a2a.json; runs only where it is named
#
# Each part has its own limit, 8 minutes for the first four. Ends with 0 if all went well.

# shellcheck source-path=SCRIPTDIR source=../launch/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/env.sh"

declare -A limit_s=([links]=60 [one]=180 [four]=130 [eight]=110 [a2a]=120)
wheels="" lib="" commit=() out=$root/bench/results all_s=100000 parts=() failed=()

options() {
  while (($#)); do
    case $1 in
      --wheels | --lib)
        [[ -d ${2:-} ]] || die "$1 ${2:-}: must be a folder"
        printf -v "${1#--}" %s "$(cd "$2" && pwd -P)"
        shift
        ;;
      --commit)
        [[ -n ${2:-} ]] || die "--commit: a value is missing"
        commit=(--commit "$2")
        shift
        ;;
      --out)
        [[ -n ${2:-} ]] || die "--out: a value is missing"
        out=$(realpath -m "$2")
        shift
        ;;
      --seconds)
        [[ ${2:-} =~ ^[1-9][0-9]{0,4}$ ]] || die "--seconds ${2:-}: must be a number"
        all_s=$2
        shift
        ;;
      *)
        [[ -n ${limit_s[$1]:-} ]] || die "$1: neither an option nor a part: links, one, four, eight, a2a"
        parts+=("$1")
        ;;
    esac
    shift
  done
  ((${#parts[@]})) || parts=(links one four eight)
}

build_links() {
  local program=$root/build/bin/links capability
  mkdir -p "$root/build/bin"
  if [[ -x $lib/links ]]; then
    cp "$lib/links" "$program"
    return
  fi
  choose_cuda
  if ! command -v "${CUDACXX:-nvcc}" >/dev/null; then
    say "no nvcc to build links: the CUDA toolkit brings it"
    return 1
  fi
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
  "${CUDACXX:-nvcc}" -std=c++20 -O3 -arch="sm_${capability//./}a" -I "$root/cuda" -I "$root/tests/native" \
    -o "$program" "$root/bench/links.cu"
}

# tests SECONDS RANKS_PER_GPU SUITE...
tests() {
  local seconds=$1 ranks=$2 given=()
  shift 2
  [[ -z $lib ]] || given+=(--lib "$lib")
  bash "$root/launch/test_gpu.sh" "${given[@]}" "${commit[@]}" --seconds "$seconds" --ranks-per-gpu "$ranks" \
    --out "$out/h200x2_tests.json" "$@"
}

links() {
  build_links &&
    timeout -k 10 "$1" "$python" "$root/bench/links.py" "$root/build/bin/links" --seconds "$(($1 * 3 / 4))" \
      "${commit[@]}" --out "$out/h200x2_links.json"
}

a2a() {
  [[ -z $lib ]] || local -x EP_A2A_LIBRARY_DIR=$lib
  timeout -k 10 "$1" "$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$root/bench/a2a.py" \
    --device cuda "${commit[@]}" --out "$out/h200x2_a2a.json"
}

run_part() {
  local seconds=${limit_s[$1]} start=$SECONDS code=0
  ((seconds <= all_s - SECONDS)) || seconds=$((all_s - SECONDS))
  say "$1: at most $seconds s"
  if ((seconds < 10)); then
    code=124
  else
    case $1 in
      links | a2a) "$1" "$seconds" || code=$? ;;
      one) tests "$seconds" 1 nvlink processes litmus || code=$? ;;
      four) tests "$seconds" 4 processes || code=$? ;;
      eight) tests "$seconds" 8 processes || code=$? ;;
    esac
  fi
  say "$1: $((SECONDS - start)) s, exit code $code"
  ((code == 0)) || failed+=("$1")
}

options "$@"
gpu_visible || die "no GPU is visible on this machine"
(($(nvidia-smi -L | grep -c '^GPU') > 1)) || die "needs two GPUs, here is one"
cd "$root"
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export NVSHMEM_REMOTE_TRANSPORT=none NVSHMEM_DISABLE_NVLS=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
mkdir -p "$out"
use_python "$wheels"
for part in "${parts[@]}"; do run_part "$part"; done
((${#failed[@]} == 0)) || die "failed: ${failed[*]}"
say "all parts went well: $out"
