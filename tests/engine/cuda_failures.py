"""Failures on GPUs: every surviving rank ends, with one message that says who, what and where. Ranks may share a GPU.

python tests/engine/cuda_failures.py [--world 2] [--only CASE ...]

Each case starts its own ranks, each of them a process; the driver fails a case whose ranks hang, end with status 0 or say too little.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from cuda_ranks import exchange

from tide_comm.engine.base import ArenaSpec, Buffers, Launched
from tide_comm.engine.cuda.engine import CudaEngine
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import Program
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.slices import StageSpec, shard_elements
from tide_comm.plan.topology import Topology

ROOT = Path(__file__).parents[2]
LIMIT_S = 90.0
TIMEOUT_S = 4.0
"""timeout_s of the engines in cases that wait for it."""


@dataclass(frozen=True)
class Case:
    says: tuple[str, ...]
    """In every survivor's last words."""
    dies: bool = False
    """Rank 1 is killed; it need not say anything."""
    stays: bool = True
    """Rank 1 has an error of its own to report (in whatever words)."""


VICTIM = "rank 1 (machine 0, lane 1)"
CASES = {
    "late all-gather": Case(
        (f"timeout_s = {TIMEOUT_S:g}", "all_gather block", "point 'arrived'", "word 'arrived'", VICTIM)
    ),
    "late reduce-scatter": Case((f"timeout_s = {TIMEOUT_S:g}", "reduce_scatter block", "word 'staged'", VICTIM)),
    "late, the caller is stuck": Case((f"timeout_s = {TIMEOUT_S:g}", "all_gather block", "word 'arrived'", VICTIM)),
    "killed before an all-gather": Case((f"{VICTIM} has died", "all_gather block", "last heard"), dies=True),
    "killed before a reduce-scatter": Case((f"{VICTIM} has died", "reduce_scatter block", "last heard"), dies=True),
    "killed, the caller is stuck": Case((f"{VICTIM} has died", "all_gather block"), dies=True),
    "leaves early": Case((f"{VICTIM} has left", "all_gather block"), stays=False),
    "other groups": Case(
        ("disagree", "in slot 1", VICTIM, "runs something else here than rank", "nothing that it gathered was used")
    ),
    "other gradients": Case(
        ("disagree", "reduce-scatter", VICTIM, "runs something else here than rank", "no gradient")
    ),
}


class Rank:
    """One rank with two groups of one arena."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        topology = Topology.regular(1, world)
        names = ("block", "other")
        shapes = ((64 * world, 8), (96 * world, 4))
        self.layouts = [
            GroupLayout(name, (ParamLayout("w", shape, "float32", "bfloat16", world, 0),), world)
            for name, shape in zip(names, shapes, strict=True)
        ]
        stage = StageSpec(4096, 4, world)
        spec = ArenaSpec(topology, 0, max(layout.slot_bytes for layout in self.layouts), 2, stage)
        self.engine = CudaEngine(spec, rank, exchange, TIMEOUT_S, device)
        self.gathers = [all_gather(layout, topology, rank) for layout in self.layouts]
        self.free = vacate(topology, rank)
        self.reduces: list[Program] = [
            reduce_scatter(layout, topology, rank, stage, [0], "bfloat16", "float32") for layout in self.layouts
        ]

    def gather(self, slot: int, group: int = 0, tag: int = 0) -> Launched:
        masters = [torch.ones(self.layouts[group].params[0].chunk, device=self.device)]
        launched = self.engine.launch(self.gathers[group], slot, Buffers(params=masters), tag)
        launched.wait("arrived")
        return launched

    def reduce(self, tag: int = 0) -> tuple[Launched, torch.Tensor]:
        layout = self.layouts[0]
        out = torch.zeros(shard_elements(layout, [0]), device=self.device)
        grads: list[torch.Tensor | None] = [
            torch.ones(layout.params[0].shape, dtype=torch.bfloat16, device=self.device)
        ]
        launched = self.engine.launch(self.reduces[0], -1, Buffers(grads=grads, out=out), tag)
        launched.wait("done")
        return launched, out

    def step(self, step: int) -> None:
        self.gather(step % 2, tag=step)
        self.engine.launch(self.free, step % 2)
        self.reduce(tag=step)

    def poll(self, launched: Launched, point: str) -> None:
        """As a caller that does not block on the GPU: raises what the engine has to say."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and not launched.reached(point):
            time.sleep(0.01)


def misbehave(it: Rank, case: str) -> None:
    victim = it.rank == 1
    for step in range(2):
        it.step(step)
    torch.cuda.synchronize()
    if victim and "killed" in case:
        os.kill(os.getpid(), signal.SIGKILL)
    if victim and case.startswith("late"):
        time.sleep(2 * TIMEOUT_S)
    if victim and case == "leaves early":
        it.engine.close()
        return
    if case == "other groups":
        it.poll(it.gather(1, group=int(victim), tag=100 + int(victim)), "arrived")
    elif case == "other gradients":
        launched, out = it.reduce(tag=100 + int(victim))
        torch.cuda.synchronize()
        assert not out.any(), "a sum that disagrees must write nothing"
        it.poll(launched, "done")
        time.sleep(1.0)
        it.engine.raise_if_failed()
    elif "reduce-scatter" in case:
        it.poll(it.reduce(tag=2)[0], "done")
    else:
        launched = it.gather(0, tag=2)
        if "stuck" in case:
            torch.cuda.synchronize()
        it.poll(launched, "arrived")
    print("never reached", flush=True)


def rank_main(case: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = os.environ["CASE_STORE"]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    misbehave(Rank(rank, world, device), case)


def play(name: str, world: int) -> str:
    """What is wrong with the case; "" if nothing is."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        ranks = []
        for rank in range(world):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "CASE_STORE": f"{folder}/store",
                "PYTHONPATH": path,
            }
            command = [sys.executable, __file__, "--rank-of", name]
            ranks.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        end, words = time.monotonic() + LIMIT_S, [""] * world
        problems = []
        for rank, process in enumerate(ranks):
            try:
                words[rank] = process.communicate(timeout=max(1.0, end - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                problems.append(f"rank {rank} hangs")
        for rank, process in enumerate(ranks):
            if process.poll() is None:
                process.kill()
                words[rank] = process.communicate()[0]
        for rank, process in enumerate(ranks):
            if rank == 1 and case.dies:
                problems += (
                    [] if process.returncode == -signal.SIGKILL else [f"the victim ended with {process.returncode}"]
                )
                continue
            if rank == 1 and not case.stays:
                continue
            if process.returncode == 0 or "never reached" in words[rank]:
                problems.append(f"rank {rank} ended with status {process.returncode}")
            # The victim of a timeout hears of it from the others.
            problems += [f"rank {rank} does not say {part!r}" for part in case.says if part not in words[rank]]
        if problems:
            problems += [
                f"--- rank {rank}, status {p.returncode}:\n{words[rank][-3000:]}" for rank, p in enumerate(ranks)
            ]
        return "\n".join(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rank-of", choices=list(CASES), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank_of:
        rank_main(chosen.rank_of)
        return
    failed = 0
    for name in chosen.only or list(CASES):
        started = time.monotonic()
        problem = play(name, chosen.world)
        failed += bool(problem)
        print(f"{'FAILED' if problem else 'ok'} {name} ({time.monotonic() - started:.1f} s) {problem}", flush=True)
    print(
        f"FAILURES {'FAILED' if failed else 'ok'}: {len(chosen.only) - failed} of {len(chosen.only)} cases, {chosen.world} ranks"
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
