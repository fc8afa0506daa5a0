#!/usr/bin/env bash
# Step times of three models, by tokens a GPU: stock FSDP2, over PyTorch's symmetric memory, TIDE.
# Published: up to 27.1% less than stock; Llama 32K 3.1%, Wan 31.2K 1.4%; Qwen3 4.3% to 6.0% less than symmetric memory.
#
#   scripts/reproduce/step_time.sh [options of tide reproduce] [--section.key=value ...]        --debug: small models on a CPU
#
# docs/reproduce.md says what it needs, and how it runs on several machines.
set -eu -o pipefail
# shellcheck source=scripts/reproduce/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
tide_prepare "$@"
tide_run reproduce --tables step_time "$@"
