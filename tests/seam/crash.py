"""A training script whose rank 1 is killed in the middle of a step: `python -m tests.seam.crash RANK WORLD STORE`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.seam import steps
from tests.seam.harness import Run
from tests.seam.launch import Place
from tests.seam.models import sharded
from tide_comm import TideConfig, attach


def main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    run = Run(Place(rank, world, Path(store).parent), "tide", sharded())
    run.report = attach(run.model, TideConfig(timeout_s=60.0))
    run.optim = steps.LocalAdam(run.model)
    steps.plain(run, 0)
    loss = steps.loss_of(run, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    print("never reached")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
