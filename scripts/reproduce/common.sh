# Sourced by the scripts beside it: makes the environment, then `tide_run COMMAND ...` runs `tide COMMAND ...`.
# shellcheck shell=bash

# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../setup_env.sh"
cd "$TIDE_ROOT"

# tide_prepare [arguments of the script]: --help is the command's own.
tide_prepare() {
  local extras=plots,wan arg
  for arg in "$@"; do
    # The debug models need two photographs, not the Wan tools.
    [[ $arg == --debug ]] && extras=plots,photos
  done
  setup_env "$extras${TIDE_EXTRAS:+,$TIDE_EXTRAS}"
}

tide_run() { "$PYTHON" -m torchtitan_tide.cli "$@"; }
