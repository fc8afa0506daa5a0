#!/usr/bin/env bash
# Train a TOML config with torchrun; sets up the environment first. See --help.
set -eu -o pipefail

usage() {
  cat <<'HELP'
usage: scripts/train.sh CONFIG.toml [--section.key=value ...]

Trains CONFIG with TorchTitan and TIDE. The first start makes .venv and installs the pinned dependencies; later
starts skip what is done. Overrides replace values of the TOML file, for example:

  scripts/train.sh train_configs/llama3_debug.toml --training.steps=50 --tide.comm=stock

A mistake in the file or in an override is told in one line before anything starts (exit code 2).

One machine
  NGPU=N            ranks here (default: the number of GPUs; 4 on a machine without)
  LOG_RANK=0,1      local ranks whose output is shown (default: 0)
A cluster: start the same line on every machine
  NNODES=N          machines (default: 1)
  NODE_RANK=I       number of this machine, 0 to N-1 (needed with NNODES > 1, unless RDZV_ENDPOINT is set)
  MASTER_ADDR=HOST  address of machine 0        (needed with NNODES > 1, unless RDZV_ENDPOINT is set)
  MASTER_PORT=P     free port there             (default: 29500)
  RDZV_ENDPOINT=HOST:PORT  rendezvous instead of MASTER_ADDR; also RDZV_BACKEND (default: c10d), RDZV_ID (default: tide)
  TORCHRUN_ARGS=... more torchrun arguments, split at spaces
Environment
  TIDE_ENV=active   use the active virtual environment or conda environment instead of .venv
  TIDE_PYTHON=...   interpreter that makes .venv (default: python3; needs 3.10 or newer)
  TIDE_CONSTRAINTS=FILE  pinned versions for pip (default: constraints.txt, the versions tested; empty: none)
  TIDE_TORCH=2.14.1 another version of PyTorch, in an environment of its own (.venv-torch-2.14.1)
  TIDE_EXTRAS=...   extras to install too: wandb, wan; a config's line "# extras: ..." adds its own
  OMP_NUM_THREADS   threads a rank (default without a GPU: 1)
  XDG_CACHE_HOME    where the Python manual's tokenizer is kept (default: ~/.cache)
HELP
}

for arg in "$@"; do
  if [[ $arg == --help || $arg == -h ]]; then
    usage
    exit 0
  fi
done
if [[ $# == 0 || $1 == -* ]]; then
  usage >&2
  exit 2
fi

# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
config=$1
shift
# Told before the set-up, which takes minutes the first time.
[[ -f $config ]] || tide_fail "$config: no such file; examples: $(cd "$TIDE_ROOT" && echo train_configs/*.toml)"

nnodes=${NNODES:-1}
launch=()
if [[ -n ${RDZV_ENDPOINT:-} ]]; then
  launch=(--nnodes "$nnodes" --rdzv-backend "${RDZV_BACKEND:-c10d}" --rdzv-endpoint "$RDZV_ENDPOINT"
    --rdzv-id "${RDZV_ID:-tide}")
elif [[ $nnodes == 1 ]]; then
  launch=(--standalone --nnodes 1)
else
  [[ -n ${NODE_RANK:-} && -n ${MASTER_ADDR:-} ]] ||
    tide_fail "NNODES=$nnodes: also needs NODE_RANK and MASTER_ADDR, or RDZV_ENDPOINT"
  launch=(--nnodes "$nnodes" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"
    --master-port "${MASTER_PORT:-29500}")
fi

# A config may need an extra, and says so in a line "# extras: NAME,NAME".
extras=$(sed -n 's/^# extras: *//p' "$config" | head -n 1)
setup_env "$extras${extras:+${TIDE_EXTRAS:+,}}${TIDE_EXTRAS:-}"

# Once here and not in every rank: a mistake ends in one line. Answers with the ranks of this machine.
checked=$(env -u WORLD_SIZE -u RANK -u LOCAL_RANK NNODES="$nnodes" "$PYTHON" -m torchtitan_tide.check "$config" "$@") ||
  exit $?
ngpu=${checked##*NGPU=}

if ! [[ $checked == *device=cuda* ]]; then
  # Each rank is a process on the same cores: more threads would only get in each other's way.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi

read -r -a more <<<"${TORCHRUN_ARGS:-}"
command=("$PYTHON" -m torch.distributed.run "${launch[@]}" --nproc-per-node "$ngpu"
  --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3 ${more[@]+"${more[@]}"}
  -m torchtitan_tide.train --job.config_file "$config" "$@")
tide_say "${command[*]}"
exec "${command[@]}"
