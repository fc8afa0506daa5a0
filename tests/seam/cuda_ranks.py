"""The seam's scenarios on GPUs: stock FSDP2 against TIDE on the CUDA engine, losses, gradients and parameters equal to the bit.

python -m tests.seam.cuda_ranks --world 2 [--gpus-per-machine 1 [--rail nccl]] [--only NAME ...]

Stock's collectives go over gloo through the CPU, summed as `reference_sum` does, so that ranks may share a GPU. Slots are poisoned; half of
the cases have random delays on all streams, half have casts in portions. A case that fails on any rank ends its launch; the next launch
goes on behind it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tide_comm.plan import portions

ROOT = Path(__file__).parents[2]
NEEDS_CPU = ("offload",)
"""Scenarios that name the CPU as their device."""
FIRST = (
    "reshard",
    "large",
    "large bf16 parameters",
    "large fp32",
    "uneven",
    "no reshard",
    "columns",
    "bf16 parameters",
)
CASE_LIMIT_S = 60.0
AT_ONCE, DIVIDED = (portions.LEAST_BYTES, portions.ALIGN_BYTES), (0, 16)
"""From how many bytes on casts go in portions, and at multiples of what they are cut."""
MACHINES = {"head_bytes": 64, "inbox_batch": 2}
"""Heads that split pieces, several batches from three machines on."""
EARLY = {"early_reduce": True, "early_part_bytes": 64}
"""Reduce-scatters in as many parts as these small models have."""


@dataclass(frozen=True)
class How:
    """Of all cases: ranks of an emulated machine (0: one machine), steps (0: each scenario's own), `early_reduce`, and the rail."""

    gpus: int
    steps: int
    early: bool
    rail: str


def cases(world: int, only: list[str]) -> list[tuple[str, str]]:
    from tests.seam.scenarios import SCENARIOS

    add_large()
    chosen = [
        s
        for s in SCENARIOS.values()
        if (s.name in only or not only) and (world in s.worlds or s.name in only) and not s.name.startswith(NEEDS_CPU)
    ]
    for s in chosen:
        SCENARIOS[s.name] = replace(s, build=partial(build_on_gpu, s.build))
    chosen.sort(key=lambda s: FIRST.index(s.name) if s.name in FIRST else len(FIRST))
    return [(s.name, mode) for s in chosen for mode in s.modes]


def build_on_gpu(build: Any, place: Any) -> torch.nn.Module:
    """FSDP2 moves what it shards; what it is told to ignore is moved here."""
    model = build(place)
    for p in model.parameters():
        if not isinstance(p, DTensor) and p.device.type == "cpu":
            p.data = p.data.cuda()
    return model


def add_large() -> None:
    """Widths that are no multiple of the ranks, and enough elements for vector accesses and several blocks."""
    from tests.seam.models import BF16_FP32, FP32, Net, sharded
    from tests.seam.scenarios import SCENARIOS, add

    if "large" in SCENARIOS:
        return
    net = partial(Net, dim=256, hidden=777, blocks=5)
    add("large", lambda place: sharded(net()), steps=20, worlds=(2, 3, 4))
    add("large fp32", lambda place: sharded(net(), FP32), steps=20, worlds=(2, 3, 4))
    add("large bf16 parameters", lambda place: sharded(net().to(torch.bfloat16), BF16_FP32), steps=20, worlds=(2, 3, 4))


def over_the_cpu() -> None:
    """Let stock's collectives and batches fit GPUs that ranks share."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    from tests.seam import harness

    def gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
        mine = tensor.cpu()
        everybody = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everybody, mine, group=group)
        return [x.to(tensor.device) for x in everybody]

    def all_gather(self: Any, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        output_tensor.copy_(torch.cat(gather(input_tensor, group)))

    def reduce_scatter(
        self: Any, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        world = group.size()
        mine = [x.view(world, -1)[group.rank()] for x in gather(input_tensor, group)]
        topology = harness.topology_of(group)
        total = harness.reference_sum(mine, topology, topology.machine_of(group.rank()))
        output_tensor.copy_(total * torch.tensor(harness.scale_of(op, world), dtype=torch.float32))

    replaced: Any = collectives
    replaced.DefaultAllGather.__call__ = all_gather
    replaced.DefaultReduceScatter.__call__ = reduce_scatter
    reference: Any = harness.ReferenceReduceScatter
    reference.__call__ = reduce_scatter
    batch = harness.Run.batch
    run: Any = harness.Run
    run.batch = lambda self, *args, **kwargs: batch(self, *args, **kwargs).cuda()


def rank_main(world: int, first: int, only: list[str], scratch: Path, how: How) -> None:
    """Run cases from `first` on; a line a case goes to the file of rank 0."""
    from tests.seam import harness
    from tests.seam.launch import Place
    from tests.seam.scenarios import SCENARIOS

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    over_the_cpu()
    place = Place(rank, world, scratch)
    config = ({**MACHINES, "rail": how.rail} if how.gpus else {}) | (EARLY if how.early else {})
    for number, (name, mode) in list(enumerate(cases(world, only)))[first:]:
        os.environ["TIDE_POISON"] = "1"
        os.environ.pop("TIDE_DELAYS", None)
        if number % 4 in (1, 2):
            os.environ["TIDE_DELAYS"] = str(number)
        # In both memory modes, with delays and without.
        portions.LEAST_BYTES, portions.ALIGN_BYTES = AT_ONCE if number // 4 % 2 else DIVIDED
        started = time.monotonic()
        try:
            value = harness.compare(place, name, mode, gpus=how.gpus, config=config, steps=how.steps)
        except BaseException:
            (scratch / f"error{rank}").write_text(traceback.format_exc())
            time.sleep(3)
            os._exit(1)
        stats = value["stats"] or value["out"] or {}  # a model that was detached keeps its counts there
        ran = stats.get("all_gathers", 0) + stats.get("reduce_scatters", 0)
        everybody: list[Any] = [None] * world
        dist.all_gather_object(everybody, (value["difference"], ran))
        verdict = next((f"rank {r}: {d}" for r, (d, _) in enumerate(everybody) if d), "")
        on_tide = ran > 0 or bool(SCENARIOS[name].stock)
        if not verdict and (not on_tide or len(set(value["losses"])) < 5):
            verdict = f"nothing ran on TIDE, or losses stand still: {stats}"
        if rank == 0:
            line = f"{number} {'FAILED' if verdict else 'ok'} {name}, {mode}: {verdict or f'{ran} collectives on TIDE'}"
            line += f", {stats['early_parts']} parts" if how.early and "early_parts" in stats else ""
            with open(scratch / "lines", "a") as file:
                file.write(f"{line} ({time.monotonic() - started:.1f} s)\n")
    dist.barrier()
    os._exit(0)  # FSDP2's device mesh has made a group for NCCL, whose end wants one GPU a rank


def driver(world: int, only: list[str], budget_s: float, first: int, how: How) -> int:
    """Launch until all cases have a line; returns how many failed."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env.update(CUBLAS_WORKSPACE_CONFIG=":4096:8", OMP_NUM_THREADS="1", CUDA_DEVICE_MAX_CONNECTIONS="32")
    env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    todo = cases(world, only)
    failed, end, shown = 0, time.monotonic() + budget_s, first
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        lines = scratch / "lines"
        lines.write_text("skipped\n" * first)
        while shown < len(todo) and time.monotonic() < end:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
            command += ["-m", "tests.seam.cuda_ranks", "--world", str(world), "--first", str(shown)]
            command += ["--gpus-per-machine", str(how.gpus), "--steps", str(how.steps), "--rail", how.rail]
            command += ["--early"] if how.early else []
            command += ["--scratch", folder, *(["--only", *only] if only else [])]
            with open(scratch / "log", "w") as log:
                process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
                patience = time.monotonic() + CASE_LIMIT_S
                while process.poll() is None and time.monotonic() < min(patience, end):
                    time.sleep(0.2)
                    if len(lines.read_text().splitlines()) > shown:
                        for line in lines.read_text().splitlines()[shown:]:
                            print(line, flush=True)
                            failed += " FAILED " in line
                            shown += 1
                        patience = time.monotonic() + CASE_LIMIT_S
                hung = process.poll() is None
                process.terminate()
                process.wait()
            for line in lines.read_text().splitlines()[shown:]:
                print(line, flush=True)
                failed += " FAILED " in line
                shown += 1
            if shown < len(todo) and time.monotonic() < end:
                errors = [p.read_text() for p in sorted(scratch.glob("error*"))]
                why = "hung" if hung else (errors[0] if errors else (scratch / "log").read_text())[-1500:]
                line = f"{shown} FAILED {', '.join(todo[shown])}: {why}"
                print(line, flush=True)
                with open(lines, "a") as file:
                    file.write(line.replace("\n", " ") + "\n")
                failed += 1
                shown += 1
                for p in scratch.glob("error*"):
                    p.unlink()
    verdict = "ok" if not failed and shown == len(todo) else "FAILED"
    machines = f", {how.gpus} ranks a machine, rail {how.rail}" if how.gpus else ""
    print(f"SEAM {verdict}: {shown - first - failed} of {len(todo) - first} cases, {world} ranks{machines}")
    return failed + len(todo) - shown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds")
    parser.add_argument("--gpus-per-machine", type=int, default=0, help="emulate machines of so many ranks")
    parser.add_argument("--rail", choices=("nccl", "loopback"), default="loopback", help="between emulated machines")
    parser.add_argument("--steps", type=int, default=0, help="instead of each scenario's own")
    parser.add_argument("--early", action="store_true", help="early_reduce, in parts of 64 bytes")
    parser.add_argument("--only", nargs="*", default=[])
    chosen = parser.parse_args()
    how = How(chosen.gpus_per_machine, chosen.steps, chosen.early, chosen.rail)
    if "RANK" in os.environ:
        rank_main(chosen.world, chosen.first, chosen.only, chosen.scratch, how)
    else:
        sys.exit(driver(chosen.world, chosen.only, chosen.budget, chosen.first, how) > 0)


if __name__ == "__main__":
    main()
