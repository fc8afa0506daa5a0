"""The CUDA engine against the layout and `reference_sum`, to the bit: random layouts, rings, dtypes, delays, poison (cuda_ranks.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def torchrun(world: int, *arguments: str, **env: str) -> str:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        *arguments,
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("connections", ["32", "1"])
def test_two_gpus(connections: str) -> None:
    assert "ENGINE ok" in torchrun(2, "tests/engine/cuda_ranks.py", "24", CUDA_DEVICE_MAX_CONNECTIONS=connections)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_gpus(world: int) -> None:
    assert "ENGINE ok" in torchrun(world, "tests/engine/cuda_ranks.py", "12")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("world", [2, 3])
def test_failures_on_gpus(world: int) -> None:
    """Timeouts, killed peers, peers that leave early, ranks that disagree: one message on every survivor, no hang."""
    command = [sys.executable, "tests/engine/cuda_failures.py", "--world", str(world)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_shared_by_cuda_ipc() -> None:
    """What all ranks fall back to where one cannot map another's cuMemCreate allocation; here because one of them is told to."""
    said = torchrun(2, "tests/engine/cuda_ranks.py", "6", TIDE_MEMORY="ipc")
    assert "ENGINE ok" in said and "memory: CUDA IPC (rank 0: TIDE_MEMORY=ipc)" in said


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("world", [2, 4])
def test_fsdp2_on_gpus(world: int) -> None:
    """Every scenario of the seam against stock FSDP2, to the bit."""
    command = [sys.executable, "-m", "tests.seam.cuda_ranks", "--world", str(world), "--budget", "1700"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
