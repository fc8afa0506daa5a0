#!/usr/bin/env bash
# Every table of `tide reproduce`, cells that tables share once; without the loss protocol (loss.sh) and single collectives (collectives.sh).
#
#   scripts/reproduce/all.sh [options of tide reproduce] [--section.key=value ...]        --debug: small models on a CPU, minutes
set -eu -o pipefail
# shellcheck source=scripts/reproduce/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
tide_prepare "$@"
tide_run reproduce "$@"
