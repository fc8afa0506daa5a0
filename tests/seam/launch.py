"""Runs jobs on W processes joined by gloo. Starting processes is slow, so one launch carries out a whole list of jobs.

A job that raises, dies or hangs on any rank spoils its launch: what the ranks did is reported, they are ended, and a new
launch goes on with the next job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

HOOKS = ("TIDE_POISON", "TIDE_DELAYS")
"""Environment variables that a job may set; a job that does not runs without them."""
START_S = 120.0
GRACE_S = 10.0
"""How long the other ranks may take to report after one has failed."""


@dataclass(frozen=True)
class Job:
    """One call of `function` ("module:name") on every rank, as `function(place, **kwargs)`."""

    name: str
    function: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Place:
    """Where a job runs."""

    rank: int
    world: int
    scratch: Path
    """A folder that all ranks of the launch share."""


@dataclass(frozen=True)
class Outcome:
    """What one rank made of one job: a value, or the error in words."""

    value: Any = None
    error: str = ""
    cpu_s: float = 0.0


def run(world: int, jobs: Sequence[Job]) -> dict[str, list[Outcome]]:
    """Carry out `jobs` in order on `world` ranks; every job has an outcome a rank."""
    results: dict[str, list[Outcome]] = {}
    left = list(jobs)
    while left:
        done = _launch(world, left)
        assert done, "a launch reports at least one job"
        results.update(done)
        left = [job for job in left if job.name not in results]
    return results


def once_a_world(
    request: pytest.FixtureRequest, world_of: Callable[[Any], int], job_of: Callable[[Any], Job]
) -> Callable[[Any], list[Outcome]]:
    """For a module's fixture: outcomes of the selected tests' parameters `case`, all of a world size in one launch."""
    cases = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and "case" in getattr(getattr(item, "callspec", None), "params", ())
    ]
    done: dict[int, dict[str, list[Outcome]]] = {}

    def of(case: Any) -> list[Outcome]:
        world = world_of(case)
        if world not in done:
            done[world] = run(world, [job_of(c) for c in cases if world_of(c) == world])
        return done[world][job_of(case).name]

    return of


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """The ranks' values; fails with every rank's error if there is one."""
    errors = [f"--- rank {rank}: {o.error}" for rank, o in enumerate(outcomes) if o.error]
    assert not errors, "\n".join(errors)
    return [o.value for o in outcomes]


def _launch(world: int, jobs: Sequence[Job]) -> dict[str, list[Outcome]]:
    # The fork server has imported torch once; its children start in milliseconds and have no threads of the test process.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"])
    with tempfile.TemporaryDirectory(prefix="seam") as scratch:
        pipes, ranks = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            place = Place(rank, world, Path(scratch))
            process = context.Process(target=_rank_main, args=(place, list(jobs), theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        try:
            return _collect(jobs, pipes, ranks, Path(scratch))
        finally:
            for process in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(jobs: Sequence[Job], pipes: list[Connection], ranks: list[Any], scratch: Path) -> dict[str, list[Outcome]]:
    results: dict[str, list[Outcome]] = {}
    for pipe in pipes:
        assert pipe.poll(START_S), "a rank did not start"
        pipe.recv()
    for job in jobs:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + job.timeout_s
        while len(outcomes) < len(ranks):
            open_pipes = [p for rank, p in enumerate(pipes) if rank not in outcomes]
            ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.index(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    ranks[rank].join(timeout=5)
                    outcomes[rank] = Outcome(error=f"the process ended with exit code {ranks[rank].exitcode}")
                if outcomes[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank, process in enumerate(ranks):
            if rank not in outcomes:
                outcomes[rank] = Outcome(
                    error=f"hung, ended by the test:\n{_stacks(process, scratch / f'stack{rank}')}"
                )
        results[job.name] = [outcomes[rank] for rank in range(len(ranks))]
        if any(o.error for o in outcomes.values()):
            for process in ranks:
                process.kill()
            break
    return results


def _stacks(process: Any, path: Path) -> str:
    """Where a process hangs, all threads."""
    if process.is_alive():
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
    return path.read_text() if path.exists() else "(no stack)"


def _rank_main(place: Place, jobs: list[Job], pipe: Connection) -> None:
    faulthandler.register(signal.SIGUSR1, file=open(place.scratch / f"stack{place.rank}", "w"), all_threads=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for job in jobs:
        with contextlib.suppress(Exception):  # which the job itself will raise
            importlib.import_module(job.function.partition(":")[0])
    # Jobs collect their garbage; without this each would look through all that has been imported, half a second of a job's two.
    gc.freeze()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place.scratch}/store",
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=60),
    )
    pipe.send(Outcome())  # ready: the first job's time starts now
    for job in jobs:
        started = time.process_time()
        for name in HOOKS:
            os.environ.pop(name, None)
        os.environ.update(job.env)
        try:
            module, function = job.function.split(":")
            value = getattr(importlib.import_module(module), function)(place, **job.kwargs)
            outcome = Outcome(value=value, cpu_s=time.process_time() - started)
        except Exception:
            outcome = Outcome(error=traceback.format_exc(), cpu_s=time.process_time() - started)
        pipe.send(outcome)
        if outcome.error:
            # Others may be in the middle of a collective with this rank: it must not vanish before they have reported.
            time.sleep(GRACE_S)
            os._exit(1)
    dist.destroy_process_group()
    pipe.close()
    sys.stdout.flush()
