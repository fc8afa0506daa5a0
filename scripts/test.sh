#!/usr/bin/env bash
# All that needs no GPU and no patience: ruff, mypy, pytest. Arguments go to pytest: scripts/test.sh -k layout
set -eu -o pipefail

if [[ ${1:-} == --help ]]; then
  cat <<'HELP'
usage: scripts/test.sh [pytest arguments]

Makes .venv and installs the project with its dev extra (again after a change to csrc), which compiles the CUDA engine where nvcc is found; then
runs ruff, mypy and the tests that need no GPU.
With a -m of your own all tests can be chosen, e.g. scripts/test.sh -m slow. TIDE_ENV=active, TIDE_PYTHON,
TIDE_CONSTRAINTS and TIDE_TORCH as in scripts/train.sh --help: TIDE_TORCH=2.14.1 scripts/test.sh tests/seam
HELP
  exit 0
fi

# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env "${TIDE_EXTRAS:+$TIDE_EXTRAS,}dev"
cd "$TIDE_ROOT"

tide_say "ruff"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
tide_say "mypy"
"$PYTHON" -m mypy
tide_say "pytest"
# Ranks started by tests share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m pytest -m "not gpu and not gpu2 and not slow" "$@"
