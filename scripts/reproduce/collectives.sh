#!/usr/bin/env bash
# The reduce-scatter by itself, to 32 MiB a GPU, and a multiply beside it. Published: 2 machines, 2.12 ms (TIDE) and 1.27 ms (symmetric memory); 8
# machines, the multiply slowed by 69% beside NCCL, 2.7% beside NCCL with 4 blocks, 2.9% beside TIDE.
#
#   scripts/reproduce/collectives.sh [--debug] [options of scripts/bench/reduce_scatter.py]
#
# The result stands in the tables of tide reproduce afterwards.
#
# On several machines, started on each of them: NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT as for scripts/train.sh. NGPU: ranks a machine.
set -eu -o pipefail
# shellcheck source=scripts/reproduce/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
tide_prepare "$@"
ranks=${NGPU:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')}
out=outputs/reproduce/collectives.json
[[ " $* " == *" --debug "* ]] && out=outputs/reproduce_debug/collectives.json
launch=(--standalone)
if [[ ${NNODES:-1} != 1 ]]; then
  launch=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
export PYTHONPATH=$TIDE_ROOT${PYTHONPATH:+:$PYTHONPATH}
"$PYTHON" -m torch.distributed.run "${launch[@]}" --nproc-per-node "$ranks" scripts/bench/reduce_scatter.py --out "$out" "$@"
