#!/usr/bin/env bash
# Runs a command whose processes share GPUs, under a CUDA MPS daemon of its own:
#
#   bash launch/mps.sh [--ranks-per-gpu N] [--] COMMAND...
#
# Without MPS the processes on a GPU take turns, and every wait for a peer lasts a turn. N shares the GPU's threads out
# (100 / N percent each, rounded down: NVSHMEM wants at most 100 in all); with N = 1, or none, the command runs as it
# is.
# The exit code is the command's. However this ends, the daemon, its server and its folder go with it. Compute mode and
# clocks stay as they are.

# shellcheck disable=SC2329 # traps call these functions
# shellcheck source-path=SCRIPTDIR source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

ranks_per_gpu=1 control="" folder="" command_pid=""

# What the daemon answers to a command.
ask() { echo "$1" | timeout 10 "$control" 2>&1; }

daemon_answers() {
  local answer
  answer=$(ask get_server_list) && [[ $answer != *[Cc]annot* ]]
}

# Daemon and server of this run, as far as they live: by what they say, and by the folder in their environment.
mps_pids() {
  local pid
  {
    cat "$folder/pipe/nvidia-cuda-mps-control.pid" || true
    ask get_server_list || true
    grep -lszxF "CUDA_MPS_PIPE_DIRECTORY=$folder/pipe" /proc/[0-9]*/environ | tr -dc '0-9\n' || true
  } 2>/dev/null | grep -xE '[0-9]+' | sort -u | while read -r pid; do
    ! is_mps "$pid" || echo "$pid"
  done
}

# Is it alive, and no other process that was given its number?
is_mps() { tr '\0' ' ' 2>/dev/null <"/proc/$1/cmdline" | grep -q nvidia-cuda-mps; }

# ends PID SECONDS: true once it has ended
ends() {
  local tries
  for ((tries = $2 * 10; tries > 0; tries--)); do
    is_mps "$1" || return 0
    sleep 0.1
  done
  return 1
}

stop_command() {
  local tries
  [[ -n $command_pid ]] || return 0
  kill -"${1:-TERM}" -- "-$command_pid" 2>/dev/null || return 0
  for ((tries = 150; tries > 0; tries--)); do
    kill -0 -- "-$command_pid" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL -- "-$command_pid" 2>/dev/null || true
}

stop_daemon() {
  local pid pids=()
  [[ -n $folder ]] || return 0
  mapfile -t pids < <(mps_pids)
  ((${#pids[@]})) || return 0
  ask quit >/dev/null || true
  for pid in "${pids[@]}"; do
    ends "$pid" 10 || { kill -TERM "$pid" 2>/dev/null && ends "$pid" 5; } || kill -KILL "$pid" 2>/dev/null || true
  done
}

stop() {
  trap '' INT TERM HUP
  stop_command "${1:-TERM}"
  stop_daemon
  [[ -z $folder ]] || rm -rf "$folder"
  folder="" command_pid=""
}

# $1 the signal, $2 the exit code that says so
interrupted() {
  stop "$1"
  trap - EXIT
  exit "$2"
}

start_daemon() {
  local tries log
  folder=$(mktemp -d -t ep-a2a-mps.XXXXXX)
  export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
  mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  log=$CUDA_MPS_LOG_DIRECTORY/control.log
  if timeout 20 "$control" -d >"$folder/start.log" 2>&1; then
    for ((tries = 50; tries > 0; tries--)); do
      daemon_answers && return
      sleep 0.2
    done
  fi
  tail -n 20 "$folder/start.log" "$log" >&2 2>/dev/null || true
  die "no MPS daemon starts on this machine (above: what it said)"
}

while (($#)); do
  case $1 in
    --ranks-per-gpu)
      [[ ${2:-} =~ ^[1-9][0-9]?$ ]] || die "--ranks-per-gpu ${2:-}: must be a number in [1, 99]"
      ranks_per_gpu=$2
      shift 2
      ;;
    --)
      shift
      break
      ;;
    -*) die "$1: no such option; launch/mps.sh [--ranks-per-gpu N] [--] COMMAND..." ;;
    *) break ;;
  esac
done
(($#)) || die "no command: launch/mps.sh [--ranks-per-gpu N] [--] COMMAND..."
((ranks_per_gpu > 1)) || exec "$@"

control=$(command -v nvidia-cuda-mps-control || true)
[[ -n $control || ! -x /usr/local/nvidia/bin/nvidia-cuda-mps-control ]] ||
  control=/usr/local/nvidia/bin/nvidia-cuda-mps-control
[[ -n $control ]] ||
  die "no nvidia-cuda-mps-control on PATH or in /usr/local/nvidia/bin: it comes with the driver, sharing a GPU needs it"

trap stop EXIT
trap 'interrupted INT 130' INT
trap 'interrupted TERM 143' TERM
trap 'interrupted HUP 129' HUP
start_daemon
export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / ranks_per_gpu))
unset CUDA_DEVICE_MAX_CONNECTIONS # a GPU has not as many queues as 32 of each process: later ones would not start

[[ ! -t 0 ]] || exec </dev/null # in the background a command that reads a terminal would stop
set -m # the command gets a process group, and signals as from a shell
"$@" <&0 &
command_pid=$!
set +m
code=0
wait "$command_pid" || code=$?
exit "$code"
