#!/usr/bin/env bash
# The loss protocol: Qwen3-30B-A3B from scratch, 1,000 steps: stock, stock again, TIDE. docs/parity.md.
# Published: TIDE within 0.73% of the first stock run over steps 500 to 1,000, the second stock run within 1.12%.
#
#   scripts/reproduce/loss.sh [--debug] [options of tide parity] [--section.key=value ...]
#
# --debug: the small mixture of experts, on a CPU. The result stands in the tables of tide reproduce afterwards.
set -eu -o pipefail
# shellcheck source=scripts/reproduce/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
tide_prepare "$@"
config=train_configs/qwen3_30b_a3b.toml out=outputs/reproduce/parity
arguments=()
for arg in "$@"; do
  if [[ $arg == --debug ]]; then
    config=train_configs/qwen3_moe_debug.toml out=outputs/reproduce_debug/parity
  else
    arguments+=("$arg")
  fi
done
tide_run parity "$config" --out "$out" ${arguments[@]+"${arguments[@]}"}
