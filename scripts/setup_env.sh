# Sourced by train.sh and test.sh: an environment with this project in it, made once.
#
#   setup_env EXTRAS     EXTRAS: "" or a list of extras such as "dev"
#
# Sets PYTHON. Reads TIDE_ENV (active: use the active environment), TIDE_PYTHON (the interpreter that makes .venv),
# TIDE_CONSTRAINTS (file of pinned versions; empty: none), TIDE_TORCH (another version of PyTorch, in .venv-torch-VERSION).
# Installing compiles the CUDA engine where nvcc is found; a change to it or another nvcc installs again.
# shellcheck shell=bash

TIDE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

tide_say() { printf '[tide] %s\n' "$*" >&2; }

tide_fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

tide_check_python() {
  command -v "$1" >/dev/null || tide_fail "$1: not found; install Python 3.10 or newer, or set TIDE_PYTHON"
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    tide_fail "$1 is $("$1" -V 2>&1); takes Python 3.10 or newer (set TIDE_PYTHON)"
}

# pip with its own progress bars on a terminal; elsewhere a line now and then, because it may be silent for minutes.
tide_pip() {
  if [[ -t 2 ]]; then
    "$PYTHON" -m pip "$@" >&2
    return
  fi
  local status=0 teller
  tide_tell_still "$SECONDS" $$ &
  teller=$!
  "$PYTHON" -m pip "$1" --quiet "${@:2}" || status=$?
  kill "$teller" 2>/dev/null || true
  wait "$teller" 2>/dev/null || true
  return $status
}

# Ends with the script, which may be interrupted. Its sleep outlives it for a moment and must not hold a pipe open that somebody reads.
tide_tell_still() {
  local passed every=30 next=30
  while sleep 1 </dev/null >/dev/null 2>&1 && kill -0 "$2" 2>/dev/null; do
    passed=$((SECONDS - $1))
    if ((passed >= next)); then
      next=$((next + every))
      tide_say "$(printf 'still installing (%d:%02d)' $((passed / 60)) $((passed % 60)))"
    fi
  done
}

setup_env() {
  local extras=$1 constraints=${TIDE_CONSTRAINTS-$TIDE_ROOT/constraints.txt} stamp_dir target=$TIDE_ROOT
  local name=.venv${TIDE_TORCH:+-torch-$TIDE_TORCH} text
  [[ -z ${TIDE_ENV:-} || -z ${TIDE_TORCH:-} ]] || tide_fail "TIDE_TORCH takes an environment of its own: unset TIDE_ENV"
  [[ ${TIDE_TORCH:-} =~ ^([0-9]+(\.[0-9]+)+)?$ ]] || tide_fail "TIDE_TORCH=$TIDE_TORCH: takes a version such as 2.14.1"
  if [[ ${TIDE_ENV:-} == active ]]; then
    PYTHON=python3
    [[ -n ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} ]] && PYTHON=python
    tide_check_python "$PYTHON"
  elif [[ -n ${TIDE_ENV:-} ]]; then
    tide_fail "TIDE_ENV=$TIDE_ENV: takes \"active\", or nothing (then .venv is used)"
  else
    PYTHON=$TIDE_ROOT/$name/bin/python
    if [[ ! -x $PYTHON ]] || ! "$PYTHON" -c 'import pip' 2>/dev/null; then
      local maker=${TIDE_PYTHON:-python3}
      tide_check_python "$maker"
      tide_say "making $name with $("$maker" -V 2>&1)"
      "$maker" -m venv --clear "$TIDE_ROOT/$name" ||
        tide_fail "$maker -m venv failed; install the venv module (Debian: python3-venv), or set TIDE_ENV=active"
    fi
  fi

  local wanted
  [[ -z $constraints || -f $constraints ]] || tide_fail "TIDE_CONSTRAINTS=$constraints: no such file"
  if [[ -n ${TIDE_TORCH:-} ]]; then
    # Each PyTorch asks for a Triton of its own.
    text=$([[ -z $constraints ]] || grep -vE '^(torch|triton)==' "$constraints")
    constraints=$TIDE_ROOT/$name/constraints.txt
    printf '%s\n' "torch==$TIDE_TORCH" "$text" >"$constraints"
  fi
  [[ -n $extras ]] && target="$TIDE_ROOT[$extras]"
  wanted=$({
    cat "$TIDE_ROOT/pyproject.toml" "$TIDE_ROOT/cmake/CMakeLists.txt" "$TIDE_ROOT"/tide_comm/csrc/*.* ${constraints:+"$constraints"}
    echo "$(command -v nvcc) ${CUDACXX:-} ${CUDA_HOME:-} ${ARCHS:-} ${CMAKE_ARGS:-}"
  } | sha256sum | cut -d' ' -f1)
  stamp_dir=$("$PYTHON" -c 'import sys; print(sys.prefix)')/share/torchtitan-tide
  local stamp="$stamp_dir/installed-${extras:-base}"
  local built=$TIDE_ROOT/tide_comm/engine/cuda
  if [[ ! -f $stamp || $(<"$stamp") != "$wanted $TIDE_ROOT" ]] ||
    { ! compgen -G "$built/_cuda.*.so" >/dev/null && [[ ! -f $built/_not_built.txt ]]; }; then
    tide_say "installing the project and its dependencies: pip install -e $target ${constraints:+-c $constraints}"
    tide_pip install --disable-pip-version-check ${constraints:+-c "$constraints"} -e "$target" ||
      tide_fail "pip could not install the project or its dependencies (its messages are above)"
    mkdir -p "$stamp_dir"
    printf '%s\n' "$wanted $TIDE_ROOT" >"$stamp"
    tide_say "environment ready: $PYTHON"
  fi
  tide_say "$(cd "$TIDE_ROOT" && "$PYTHON" -m tide_comm.engine.cuda.library)"
}
