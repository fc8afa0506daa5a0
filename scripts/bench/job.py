"""What the benchmarks of several ranks share: joining, agreeing on errors, and where figures go.

Ranks talk over gloo, so that only what is measured is on the GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120
"""Longest wait for another rank."""
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("NCCL_", "TORCH_SYMM", "TIDE_", "CUDA_DEVICE_MAX")
"""Environment variables that are kept with figures."""
SET_ELSEWHERE = ("NCCL_VERSION", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Of these the ones that no command line needs: the first is the container's, the second `join` sets."""


def common_options(parser: argparse.ArgumentParser) -> None:
    """What all benchmarks of several ranks take."""
    parser.add_argument("--out", type=Path, help="where all figures go, as JSON")
    parser.add_argument("--commit", default="", help="kept with the figures where this checkout has no git history")
    parser.add_argument("--debug", action="store_true", help="tiny sizes on the CPU, to see that it runs")


def sum_options(parser: argparse.ArgumentParser, blocks: str, rounds: int) -> None:
    """How TIDE's reduce-scatter is varied. `blocks`, `rounds`: the defaults."""
    parser.add_argument("--partial-blocks", default=blocks, help="thread blocks of TIDE's sums")
    parser.add_argument("--piece-mib", default="16,64", help="piece of TIDE's reduce-scatter")
    parser.add_argument("--ring", type=int, default=4, help="places for pieces")
    parser.add_argument("--rounds", type=int, default=rounds)


def lists(parser: argparse.ArgumentParser, options: argparse.Namespace, **known: Collection[str]) -> None:
    """Split what `sum_options` and `known` take as comma lists, in place; ends with an error for a word that is not `known`."""
    if options.debug:
        vars(options).update(partial_blocks="16", piece_mib="16", rounds=1)
    for name, words in known.items():
        vars(options)[name] = vars(options)[name].split(",")
        if unknown := [word for word in vars(options)[name] if word not in words]:
            parser.error(f"--{name.replace('_', '-')} takes {', '.join(words)}; got {', '.join(unknown)}")
    options.partial_blocks = [int(n) for n in options.partial_blocks.split(",")]
    options.piece_mib = [int(n) for n in options.piece_mib.split(",")]


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


def commit() -> str | None:
    """Of this checkout, with "-dirty" where tracked files differ from it; None without git or its history."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def command_line() -> str:
    """How this job was started, in the repository's root: settings, torchrun, script, arguments; files by their last name alone."""
    world, here = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    settings = [f"{k}={v}" for k, v in sorted(_settings().items()) if k not in SET_ELSEWHERE]
    nodes = [f"--nnodes={world // here}"] if world > here else []
    arguments = [Path(a).name if a.startswith("/") else a for word in sys.argv[1:] for a in word.split("=", 1)]
    script = f"scripts/bench/{Path(sys.argv[0]).name}"
    return shlex.join(
        ["PYTHONPATH=.", *settings, "torchrun", *nodes, "--nproc-per-node", str(here), script, *arguments]
    )


def _settings() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(SETTINGS)}


def about(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Where and how figures were made. Paths are kept by their last name."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": options.commit or commit(),
        "command": command_line(),
        "options": {k: v.name if isinstance(v, Path) else v for k, v in vars(options).items()},
        "machine": torch.cuda.get_device_name(device) if cuda else "CPU",
        "gpus": min(torch.cuda.device_count(), dist.get_world_size()) if cuda else 0,
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "nccl": nccl_version() if cuda else None,
        "env": _settings(),
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
