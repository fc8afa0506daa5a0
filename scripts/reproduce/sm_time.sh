#!/usr/bin/env bash
# What communication takes of the SMs in a step of Llama at 8K tokens a GPU, and how long FSDP2's copies between layouts run.
# Published: 78 SM s with stock, 3.8 with TIDE; a communication kernel resident 89% and 8% of the step; copies 0.33 s, 6.4%.
#
#   scripts/reproduce/sm_time.sh [options of tide reproduce] [--section.key=value ...]
set -eu -o pipefail
# shellcheck source=scripts/reproduce/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
tide_prepare "$@"
tide_run reproduce --tables sm_time "$@"
