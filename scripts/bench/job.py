"""What the benchmarks of several ranks share: joining, agreeing on errors, and where figures go.

Ranks talk over gloo, so that only what is measured is on the GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120
"""Longest wait for another rank."""


def join(debug: bool) -> torch.device:
    """Join the job that torchrun started; returns this rank's device. `debug`: the CPU, and gloo for everything."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    if debug:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
    return device


def exchange(mine: Any) -> list[Any]:
    """Everybody's, in rank order; collective."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def meet(device: torch.device) -> None:
    """This rank's GPU is idle and all ranks are here."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    exchange(None)


def agreed(work: Callable[[], Any]) -> tuple[Any, str]:
    """(what `work` returned, "") if it succeeded on all ranks, else (None, the first rank's error). Collective.

    A rank that fails within a collective of `work` leaves the others waiting in it: then it is their time limit that ends the job.
    """
    result, error = None, ""
    try:
        result = work()
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
        print(f"rank {dist.get_rank()}: {traceback.format_exc()}", file=sys.stderr, flush=True)
    errors = exchange(error)
    first = next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), "")
    return (None, first[:2000]) if first else (result, "")


def say(*what: Any) -> None:
    """Print on rank 0, with the seconds since the process started to measure."""
    if dist.get_rank() == 0:
        print(f"[{time.perf_counter() - _started:5.1f} s]", *what, flush=True)


_started = time.perf_counter()


def nccl_version() -> int | None:
    """Of the library in use (23102 for 2.31.2); `torch.cuda.nccl.version` tells the one that PyTorch was built with."""
    try:
        found = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
        return found.value
    except OSError:
        return None


def about(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Where and how figures were made."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "machine": torch.cuda.get_device_name(device) if cuda else "CPU",
        "gpus": min(torch.cuda.device_count(), dist.get_world_size()) if cuda else 0,
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "nccl": nccl_version() if cuda else None,
        "env": {
            k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_SYMM", "TIDE_", "CUDA_DEVICE_MAX"))
        },
    }


def write(path: Path | None, found: dict[str, Any]) -> None:
    """Rank 0's figures so far, so that a failure later loses none."""
    if path is None or dist.get_rank():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)


def zero_cta_group(device: torch.device) -> dist.ProcessGroup:
    """All ranks again, on an NCCL communicator whose policy lets copy engines gather (PyTorch: "Copy Engine Collectives"). Collective."""
    if device.type != "cuda":
        raise RuntimeError("symmetric memory takes GPUs")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(ranks, backend="nccl", pg_options=options)
    assert group is not None
    dist.all_reduce(torch.ones(1, device=device), group=group)  # makes the communicator
    torch.cuda.synchronize()
    return group


def leave(device: torch.device, abruptly: bool = False) -> None:
    """End of the job. `abruptly`: without taking NCCL's groups down, which may hang where ranks share a GPU and warns of windows of
    symmetric memory."""
    meet(device)
    sys.stdout.flush()
    sys.stderr.flush()
    if abruptly or (device.type == "cuda" and torch.cuda.device_count() < dist.get_world_size()):
        os._exit(0)
    dist.destroy_process_group()
