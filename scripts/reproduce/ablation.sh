#!/usr/bin/env bash
# One collective replaced at a time, Llama at 24K tokens a GPU.
# Published: the all-gather alone recovers 50% of the saving, the reduce-scatter alone 58%.
#
#   scripts/reproduce/ablation.sh [options of tide reproduce] [--section.key=value ...]
set -eu -o pipefail
# shellcheck source=scripts/reproduce/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
tide_prepare "$@"
tide_run reproduce --tables ablation "$@"
