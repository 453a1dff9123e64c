# shellcheck shell=bash
# Sourced by the scripts beside it. `setup GROUP...` gives a Python that has torch, the packages of those groups of
# pyproject.toml, and this library built and installed:
#
#   torch already imports in python3   that Python is used as it is; packages it lacks go to build/site-deps,
#                                      this library to build/site
#   otherwise                          .venv at the root, with the torch named below
#
# Nothing is done twice: packages are compared with pyproject.toml, sources with the fingerprint of the last build.
# Sets root, python, PATH, PYTHONPATH and OMP_NUM_THREADS.

set -euo pipefail

readonly torch_for_venv="torch==2.13.0"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=""

say() { printf 'ep_a2a: %s\n' "$*"; }

die() {
  printf 'ep_a2a: %s\n' "$*" >&2
  exit 1
}

# Is there a torch that is new enough? (not in .venv itself, which is ours to fill)
has_torch() {
  (cd "$root" && "$1" - "$2" 2>/dev/null) <<'PYTHON'
import os, re, sys
if sys.argv[1] and os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1]):
    sys.exit(1)
import torch
sys.exit(tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 8))
PYTHON
}

choose_python() {
  command -v python3 >/dev/null || die "no python3: install Python 3.10 or newer (Debian: apt-get install python3)"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$(python3 --version) is too old: Python 3.10 or newer is needed"
  if has_torch python3 "$root/.venv"; then
    python=$(command -v python3)
    site_deps=$root/build/site-deps
    own_path=${PYTHONPATH:-}
    export PATH="$site_deps/bin:$site_deps/local/bin:$PATH"
    use_site_deps
    "$python" -m pip --version >/dev/null 2>&1 || die "python3 has no pip: install it (Debian: apt-get install python3-pip)"
    return
  fi
  python=$root/.venv/bin/python
  site_deps=""
  export PATH="$root/.venv/bin:$PATH"
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    say "making .venv"
    rm -rf "$root/.venv"
    if ! python3 -m venv "$root/.venv"; then
      rm -rf "$root/.venv"
      die "python3 cannot make virtual environments: install venv (Debian: apt-get install python3-venv)"
    fi
  fi
}

# Puts build/site and build/site-deps on PYTHONPATH. In the second, pip follows the layout of the Python it serves.
use_site_deps() {
  local folder version
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  export PYTHONPATH="$root/build/site${own_path:+:$own_path}"
  for folder in "$site_deps"/{,local/}lib/"$version"/{site,dist}-packages; do
    [[ ! -d $folder ]] || PYTHONPATH+=":$folder"
  done
  for folder in "$site_deps"/{,local/}lib; do # mpi4py looks beside the Python alone
    [[ ! -f $folder/libmpi.so.12 ]] || export MPI4PY_LIBMPI="$folder/libmpi.so.12"
  done
}

# Prints the requirements of the named groups that are not met, one a line. "." stands for the dependencies.
missing_packages() {
  "$python" - "$root/pyproject.toml" "$@" <<'PYTHON'
import importlib.metadata as metadata
import sys

try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib
from pip._vendor.packaging.requirements import Requirement

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
groups = {**project["optional-dependencies"], ".": project["dependencies"]}


def is_met(text: str) -> bool:
    requirement = Requirement(text)
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


wanted = dict.fromkeys(text for group in sys.argv[2:] for text in groups[group])
print("\n".join(text for text in wanted if not text.startswith("torch>") and not is_met(text)))
PYTHON
}

# An MPI that mpi4py already works with is kept too: a second one beside it would not start its processes.
has_mpi() {
  timeout 60 "$python" -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI' >/dev/null 2>&1
}

install_packages() {
  local groups=(. "$@") group missing names
  if [[ -n $site_deps && -f $site_deps/groups ]]; then
    mapfile -t -O "${#groups[@]}" groups <"$site_deps/groups" # what another script asked for stays
  fi
  if [[ ${MPI4PY_LIBMPI:-} != "$site_deps/"* ]] && has_mpi; then
    for group in "${!groups[@]}"; do [[ ${groups[group]} != mpi ]] || unset "groups[group]"; done
  fi
  missing=$(missing_packages "${groups[@]}") || die "could not compare packages with pyproject.toml"
  if [[ -z $site_deps ]]; then
    has_torch "$python" "" || missing+=$'\n'$torch_for_venv
    [[ -n $missing ]] || return 0
    mapfile -t names <<<"${missing#$'\n'}"
    say "installing into .venv: ${names[*]}"
    "$python" -m pip install --quiet "${names[@]}" || die "pip could not install ${names[*]}"
  elif [[ -n $missing ]]; then
    say "installing into build/site-deps what python3 lacks: ${missing//$'\n'/ }"
    install_beside "${groups[@]}" || say "no package registry gave them; going on without"
  fi
}

# All that python3 lacks, in one call and a new folder, so that no older version stays beside a newer one. A --prefix,
# because MPI's libraries lie outside of site-packages; nothing that python3 has is touched.
install_beside() {
  local plan=$root/build/plan.json new=$site_deps.new text lacking names
  text=$(PYTHONPATH=$own_path missing_packages "$@") || return 1
  mapfile -t lacking <<<"$text"
  PYTHONPATH=$own_path "$python" -m pip install --quiet --retries 1 --dry-run --report "$plan" "${lacking[@]}" >/dev/null ||
    return 1
  text=$("$python" -c 'import json, sys
for item in json.load(open(sys.argv[1]))["install"]:
    print(item["metadata"]["name"] + "==" + item["metadata"]["version"])' "$plan") || return 1
  mapfile -t names <<<"$text"
  rm -rf "$new"
  PIP_USER=0 PYTHONPATH=$own_path "$python" -m pip install --quiet --retries 1 --no-deps --ignore-installed \
    --no-warn-script-location --prefix "$new" "${names[@]}" || return 1
  printf '%s\n' "$@" | LC_ALL=C sort -u >"$new/groups"
  rm -rf "$site_deps"
  mv "$new" "$site_deps"
  use_site_deps
}

# use_python WHEELS: on a machine without a registry, the python3 that has torch and pytest; before what it has come
# build/site-gpu, into which the wheels of that folder go, and this checkout
use_python() {
  local wheels=$1
  command -v python3 >/dev/null || die "no python3"
  python=$(command -v python3)
  site_deps=$root/build/site-gpu own_path=${PYTHONPATH:-}
  if [[ -n $wheels ]]; then
    compgen -G "$wheels/*.whl" >/dev/null || die "--wheels $wheels: no .whl file is there"
    rm -rf "$site_deps"
    PIP_USER=0 "$python" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-index \
      --no-deps --no-compile --no-cache-dir --ignore-installed --no-warn-script-location --prefix "$site_deps" \
      "$wheels"/*.whl || die "pip could not install the wheels of $wheels"
  fi
  export PATH="$site_deps/bin:$site_deps/local/bin:$PATH"
  use_site_deps
  export PYTHONPATH="$root:$PYTHONPATH"
  has_torch "$python" "" || die "python3 has no torch of 2.8 or newer"
  "$python" -c 'import pytest' 2>/dev/null || die "python3 has no pytest: give its wheels with --wheels"
}

gpu_visible() {
  [[ ${CUDA_VISIBLE_DEVICES-unset} != "" ]] && [[ $(nvidia-smi -L 2>/dev/null || true) == *GPU* ]]
}

# ON where a GPU and nvcc are there, or as EP_A2A_CUDA says
choose_cuda() {
  [[ -x /usr/local/cuda/bin/nvcc ]] && export PATH="$PATH:/usr/local/cuda/bin"
  if [[ -n ${EP_A2A_CUDA:-} ]]; then
    cuda=$EP_A2A_CUDA
  elif ! gpu_visible; then
    cuda=OFF
  elif command -v "${CUDACXX:-nvcc}" >/dev/null; then
    cuda=ON
  else
    cuda=OFF
    say "a GPU is visible, but no nvcc: building for the CPU alone (the CUDA toolkit brings nvcc)"
  fi
}

fingerprint() {
  (
    cd "$root"
    echo "$python $cuda ${CXX:-}"
    find pyproject.toml CMakeLists.txt cmake cuda ep_a2a -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z |
      xargs -0 sha256sum
  ) | sha256sum | cut -d ' ' -f 1
}

install_library() {
  local stamp=$root/.venv/ep_a2a.stamp now new=$root/build/site.new options=(--quiet --no-index --no-build-isolation --no-deps)
  [[ -z $site_deps ]] || stamp=$root/build/site/ep_a2a.stamp
  now=$(fingerprint)
  if [[ -f $root/build/lib/libep_a2a_host.so && -f $stamp && $(<"$stamp") == "$now" ]]; then return 0; fi
  command -v "${CXX:-g++}" >/dev/null || die "no C++ compiler: install g++ 11 or newer (Debian: apt-get install g++)"
  "$python" -c 'import scikit_build_core' 2>/dev/null ||
    die "scikit-build-core is missing and no package registry gave it: install it for $python"
  command -v cmake >/dev/null || die "no cmake: install 3.24 or newer (PyPI and Debian: cmake)"
  say "building the library$([[ $cuda == OFF ]] || echo ", CUDA $cuda")"
  rm -f "$stamp"
  export SKBUILD_CMAKE_DEFINE="EP_A2A_CUDA=$cuda"
  if [[ -n $site_deps ]]; then
    rm -rf "$new"
    PIP_USER=0 "$python" -m pip install "${options[@]}" --target "$new" "$root"
    rm -rf "$root/build/site"
    mv "$new" "$root/build/site"
  else
    "$python" -m pip install "${options[@]}" "$root"
  fi
  printf '%s\n' "$now" >"$stamp"
}

# build/activate.sh gives a shell what these scripts have
write_activate() {
  {
    if [[ -z $site_deps ]]; then
      printf 'export PATH=%q:"$PATH"\n' "$root/.venv/bin"
    else
      printf 'export PATH=%q:%q:"$PATH"\nexport PYTHONPATH=%q\n' "$site_deps/bin" "$site_deps/local/bin" "$PYTHONPATH"
    fi
    [[ -z ${MPI4PY_LIBMPI:-} ]] || printf 'export MPI4PY_LIBMPI=%q\n' "$MPI4PY_LIBMPI"
  } >"$root/build/activate.sh"
}

setup() {
  mkdir -p "$root/build"
  if command -v flock >/dev/null; then # one at a time
    exec 9>"$root/build/lock"
    flock 9
  fi
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks and tests are processes already
  choose_python
  install_packages "$@"
  choose_cuda
  install_library
  write_activate
  exec 9>&-
}

# cmake as a module where there is one: its script does not survive a moved .venv
run_cmake() {
  if "$python" -c 'import cmake' 2>/dev/null; then "$python" -m cmake "$@"; else cmake "$@"; fi
}

# build_native NAME [-DOPTION=VALUE...]: the executables of tests/native, by a build folder of that name
build_native() {
  local folder=$root/build/cmake-$1
  shift
  run_cmake -S "$root" -B "$folder" -G Ninja -DEP_A2A_NATIVE_TESTS=ON -DEP_A2A_WERROR=ON "$@" >"$root/build/cmake.log" ||
    { cat "$root/build/cmake.log" >&2 && return 1; }
  run_cmake --build "$folder" --target native_tests
}
