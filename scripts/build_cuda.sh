#!/usr/bin/env bash
# Compiles the CUDA engine beside its Python files, without pip and without a network. See --help.
set -eu -o pipefail

usage() {
  cat <<'HELP'
usage: scripts/build_cuda.sh

Compiles tide_comm/csrc to tide_comm/engine/cuda/_cuda.*.so, for use from this folder. pip does the same when it installs the project; this is the
quick way after a change to csrc, and the way on a machine without a package index. Needs nvcc 13, CMake 3.24, a C++17 compiler, Python's headers
and nanobind; uses ninja where it is there. Compiles again only what changed (in build/cuda).

  PYTHON=...        the interpreter that will import the module (default: .venv's if there is one and no other is active, else python3)
  NANOBIND_DIR=DIR  where nanobind is, if that Python has no nanobind: a folder with nanobind's wheel (nanobind-*.whl, as `pip download
                    --no-deps nanobind -d DIR` leaves it), with the unpacked wheel, or the unpacked package itself
  ARCHS="90 100"    compute capabilities (default: "90-real 100-real 120"; "90" takes half the time)
  CMAKE_ARGS=...    more arguments for CMake, split at spaces
HELP
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  usage
  exit 0
fi
if [[ $# != 0 ]]; then
  usage >&2
  exit 2
fi

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -n ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} || ! -x $root/.venv/bin/python ]] || PYTHON=$root/.venv/bin/python
fi
python=$("$PYTHON" -c 'import sys; print(sys.executable)') || fail "PYTHON=$PYTHON does not run"
[[ -z ${NANOBIND_DIR:-} ]] || NANOBIND_DIR=$(cd "$NANOBIND_DIR" && pwd) || fail "NANOBIND_DIR: no such folder"
cd "$root"
build=build/cuda-$("$python" -c 'import sys; print(sys.implementation.cache_tag)')

if [[ -n ${NANOBIND_DIR:-} ]]; then
  wheels=("$NANOBIND_DIR"/nanobind-*.whl)
  if [[ -f ${wheels[0]} ]]; then
    [[ ${#wheels[@]} == 1 ]] || fail "several wheels: ${wheels[*]}"
    NANOBIND_DIR=$PWD/build/$(basename "${wheels[0]}" .whl)
    [[ -d $NANOBIND_DIR ]] || "$python" -m zipfile -e "${wheels[0]}" "$NANOBIND_DIR"
  fi
  [[ ! -d $NANOBIND_DIR/nanobind ]] || NANOBIND_DIR=$NANOBIND_DIR/nanobind
  cmake=$NANOBIND_DIR/cmake
else
  cmake=$("$python" -m nanobind --cmake_dir 2>/dev/null) || cmake=
fi
[[ -f $cmake/nanobind-config.cmake ]] ||
  fail "no nanobind${NANOBIND_DIR:+ in $NANOBIND_DIR}: pip install nanobind, or set NANOBIND_DIR (--help)"

generator=()
[[ -f $build/CMakeCache.txt ]] || ! command -v ninja >/dev/null || generator=(-G Ninja)
read -r -a more <<<"${CMAKE_ARGS:-}"
cmake -S cmake -B "$build" ${generator[@]+"${generator[@]}"} -DCMAKE_BUILD_TYPE=Release -DTIDE_CUDA=ON -DTIDE_IN_PLACE=ON \
  -DPython_EXECUTABLE="$python" -Dnanobind_DIR="$cmake" ${more[@]+"${more[@]}"}
cmake --build "$build" --parallel
