"""`tide tune`: measures this cluster for a job's groups, and chooses `[tide]` values.

    tide tune CONFIG                                                                  all GPUs of this machine (4 ranks without)
    torchrun --nnodes 8 --nproc-per-node 8 ... -m torchtitan_tide.cli tune CONFIG     a cluster, on every machine

Each rank makes the job's model on the meta device over a fake process group, as `tide plan` does, for its groups' layouts; weights are
never made. Then ranks join over gloo and `tide_comm.tune` measures: largest groups first, with the memory of one group at a time. Rank 0
prints and writes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torchtitan_tide.check import ranks_per_machine, world_size_from_environment
from torchtitan_tide.errors import ConfigError
from torchtitan_tide.toml_file import read_toml
from torchtitan_tide.toml_write import check_target, with_values

if TYPE_CHECKING:
    from tide_comm.tune.groups import GroupCase, Ranks
    from tide_comm.tune.together import Tuning

JOIN_LIMIT = timedelta(seconds=300)
"""For the slowest rank to start, and between exchanges: a large group's memory takes a while to fill."""


def run(
    config: str,
    write: str | None,
    out: str | None,
    overrides: tuple[str, ...],
    environment: Mapping[str, str] | None = None,
) -> int:
    """Exit code: 0 measured, 2 not (one line on stderr). Outside of torchrun: starts this machine's ranks."""
    from tide_comm.doctor.together import under_torchrun

    environment = os.environ if environment is None else environment
    rank = int(environment.get("RANK", "0"))
    try:
        read_toml(config)  # a missing or malformed file is told at once, without importing torch
        if rank == 0:
            _check_files(config, write, out)
        if not under_torchrun(environment):
            return _start(config, write, out, overrides)
        tuning = tune_job(config, overrides)
        if rank == 0:
            _tell(tuning, config, write, out)
    except ConfigError as error:  # the same on all ranks, or rank 0's own
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check_files(config: str, write: str | None, out: str | None) -> None:
    if write is not None:
        check_target(config, write)
    if out is not None:
        folder = os.path.dirname(os.path.abspath(out))
        if os.path.isdir(out) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise ConfigError(f"--out {out}: takes a file in a folder that is there and can be written")


def _start(config: str, write: str | None, out: str | None, overrides: tuple[str, ...]) -> int:
    """This machine's ranks, by torchrun."""
    if os.environ.get("NNODES", "1") != "1":
        raise ConfigError(
            f"NNODES={os.environ['NNODES']}: tide tune starts one machine; on a cluster start on every machine "
            f"torchrun --nnodes {os.environ['NNODES']} --nproc-per-node GPUS ... -m torchtitan_tide.cli tune {config}"
        )
    from torchtitan_tide import job_check

    ranks = ranks_per_machine()
    _checked(job_check.check(config, list(overrides), ranks, here=False).config)
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not torch.cuda.is_available():
        # Ranks are processes on the same cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = [*(["--write", write] if write is not None else []), *(["--out", out] if out is not None else [])]
    # The rank that failed has said why; torchrun would add a page.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun.main(
            [
                "--standalone",
                "--nproc-per-node",
                str(ranks),
                "-m",
                "torchtitan_tide.cli",
                "tune",
                config,
                *options,
                *overrides,
            ]
        )
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != 2:
            print(f"error: rank {rank} ended with exit code {failure.exitcode}", file=sys.stderr)
        return 2
    return 0


def _checked(config: Any) -> Any:
    if config.tide.comm != "tide":
        raise ConfigError(
            f'tide.comm = "{config.tide.comm}": tide tune measures TIDE\'s collectives; takes "tide" (--tide.comm=tide)'
        )
    return config


def groups_of_job(config: Any, world_size: int, rank: int) -> dict[Ranks, list[GroupCase]]:
    """A rank's distinct groups, as plain data. Raises `ConfigError` for a model that TorchTitan cannot make so."""
    from tide_comm.tune.groups import cases_of
    from torchtitan_tide.plan import model_parts

    with model_parts(config, world_size, rank) as parts:
        return cases_of(parts)


def tune_job(config_file: str, overrides: tuple[str, ...]) -> Tuning:
    """Under torchrun, collective over its ranks. Raises `ConfigError` with what is wrong in one line; what only this rank knows of, it
    tells itself, and the process ends with exit code 2."""
    from torchtitan_tide import job_check

    world_size, rank = world_size_from_environment(), int(os.environ["RANK"])
    config = _checked(job_check.check(config_file, list(overrides), world_size, here=False).config)
    import torch
    import torch.distributed as dist

    from tide_comm.errors import TideError
    from tide_comm.tune.shard import AgreedError
    from tide_comm.tune.together import tune

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # Else a DeviceMesh takes the device that LOCAL_RANK names, which is not there where ranks share one.
        torch.cuda.init()
    groups = groups_of_job(config, world_size, rank)

    def say(text: str) -> None:
        if rank == 0:
            print(f"[tide] {text}", file=sys.stderr, flush=True)

    try:
        dist.init_process_group("gloo", timeout=JOIN_LIMIT)
        tuning = tune(groups, config.tide, device, say)
        dist.destroy_process_group()
    except AgreedError as error:
        raise ConfigError(str(error)) from error
    except (TideError, RuntimeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        # What gloo raises: a rank that is gone, or that did not come in time.
        lost = "" if isinstance(error, (TideError, ValueError)) else "lost the other ranks (their messages say why): "
        print(f"error: rank {rank}: {lost}{first}", file=sys.stderr, flush=True)
        # Threads and streams that wait for a peer that is gone must not keep the process.
        os._exit(2)
    return tuning


def _tell(tuning: Tuning, config: str, write: str | None, out: str | None) -> None:
    from tide_comm.tune.show import as_data, fragment, render

    print(f"{config} on {tuning.ranks} ranks ({tuning.device})")
    print(render(tuning))
    print(f"\n{fragment(tuning)}", flush=True)
    if out is not None:
        try:
            with open(out, "w") as file:
                json.dump(as_data(tuning), file, indent=1)
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    if write is not None:
        with_values(config, write, "tide", tuning.values)
        print(f"\nwritten to {write}")
