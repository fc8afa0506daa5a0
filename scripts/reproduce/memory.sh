#!/usr/bin/env bash
# Peak memory by memory mode: Llama at 24K tokens a GPU, Wan at 31.2K.
# Published: Llama In-Place 4.7 GiB below symmetric memory and 1.9 above stock; Wan Slot-Reuse 1.0 to 1.4 GiB below stock.
#
#   scripts/reproduce/memory.sh [options of tide reproduce] [--section.key=value ...]
set -eu -o pipefail
# shellcheck source=scripts/reproduce/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
tide_prepare "$@"
tide_run reproduce --tables memory "$@"
