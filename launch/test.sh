#!/usr/bin/env bash
# All tests that need no GPU and are not slow; sets up what is missing first. Arguments go to pytest.

# shellcheck source-path=SCRIPTDIR source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

setup build demo bench mpi lint test
"$python" -c 'import pytest' 2>/dev/null || die "pytest is missing and no package registry gave it"
cd "$root"
bash launch/lint.sh
build_native plain
build_native hostile -DEP_A2A_HOSTILE=ON
export CUDA_VISIBLE_DEVICES="" # these tests are of the CPU, whatever the machine has
exec "$python" -m pytest -m "not slow and not gpu" "$@"
