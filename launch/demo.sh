#!/usr/bin/env bash
# The demo with 4 ranks on this machine, started by torchrun; sets up what is missing first.
#
#   bash launch/demo.sh [--mpi] [--ranks N] [--ranks-per-gpu N] [options of `python -m ep_a2a demo`]
#
# --mpi starts the ranks by mpirun. --ranks-per-gpu runs them on GPUs, N on each, where N > 1 through launch/mps.sh;
# without it they run on the CPU.

# shellcheck source-path=SCRIPTDIR source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

launcher=torchrun ranks=4 options=() shared=() groups=(build demo mpi)
while (($#)); do
  case $1 in
    --mpi) launcher=mpirun ;;
    --ranks)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "--ranks ${2:-}: must be a number from 1"
      ranks=$2
      shift
      ;;
    --ranks-per-gpu)
      [[ ${2:-} =~ ^[1-9][0-9]?$ ]] || die "--ranks-per-gpu ${2:-}: must be a number in [1, 99]"
      gpu_visible || die "--ranks-per-gpu $2: no GPU is visible on this machine"
      shared=(bash "$root/launch/mps.sh" --ranks-per-gpu "$2" --)
      groups+=(gpu)
      options+=(--device cuda)
      shift
      ;;
    *) options+=("$1") ;;
  esac
  shift
done

setup "${groups[@]}"
if [[ $launcher == torchrun ]]; then
  exec "${shared[@]}" "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$ranks" \
    -m ep_a2a demo "${options[@]}"
fi
command -v mpirun >/dev/null || die "no mpirun: install MPI (PyPI: mpi4py and mpich)"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 # Open MPI only
exec "${shared[@]}" mpirun -n "$ranks" "$python" -m ep_a2a demo "${options[@]}"
