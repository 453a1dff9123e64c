#!/usr/bin/env bash
# Format, lint and types. Names of checks (ruff, format, mypy, clang-format) as arguments run only those.

# shellcheck source-path=SCRIPTDIR source=env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

setup build lint
cd "$root"

# skip_without MODULE: true, with a sentence, where a tool is not installed; never in CI
skip_without() {
  ! "$python" -c "import $1" 2>/dev/null || return 1
  [[ -z ${CI:-} ]] || die "$1 is not installed"
  say "skipped: $1 is not installed"
}

format_cpp() {
  local files=()
  mapfile -d '' -t files < <(find bench cuda tests/native -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp' | tr '\n' '\0')
  "$python" -c 'from clang_format import clang_format; clang_format()' --dry-run -Werror "${files[@]}"
}

(($#)) || set -- ruff format mypy clang-format
for check in "$@"; do
  case $check in
    ruff) skip_without ruff || "$python" -m ruff check . ;;
    format) skip_without ruff || "$python" -m ruff format --check . ;;
    mypy) skip_without mypy || "$python" -m mypy ;;
    clang-format) skip_without clang_format || format_cpp ;;
    *) die "no check named $check" ;;
  esac
done
