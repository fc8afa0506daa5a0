"""Programs of several machines on GPUs of one host, over either rail: random layouts, and the models' blocks scaled to fit.

python tests/engine/rail_ranks.py --rail nccl [--topologies 2x1 2x2 ...] [--random N] [--models llama qwen wan] [--budget SECONDS]

A topology MxL is M emulated machines of L lanes, a process a rank; ranks share GPUs where there are fewer. A line a case, checked to the
bit against the layout and `reference_sum`; the last line counts. Random cases cover both memory modes, pacing on and off, heads that split
pieces, batches smaller than M; half of all cases have random delays, two thirds poisoned memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from cuda_ranks import CPU, Case, play, random_case

from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.topology import Topology

ROOT = Path(__file__).parents[2]
TOPOLOGIES = ("2x1", "2x2", "2x4", "4x2", "8x1")
CASE_LIMIT_S = 120.0

# Blocks of Llama-70B, Qwen3-30B-A3B and Wan-14B: the proportions of their tensors, at a quarter of each width (Qwen: 16 of 128 experts).
_DIM, _FFN = 1280, 3456
MODELS = {
    "llama": [(2048, 2048), (256, 2048), (256, 2048), (2048, 2048), (7168, 2048), (2048, 7168), (7168, 2048)]
    + [(2048,)] * 2,
    "qwen": [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128,), (128,), (16, 768, 2048), (16, 2048, 768)]
    + [(16, 768, 2048), (128, 2048), (2048,), (2048,)],
    "wan": [(1, 6, _DIM)]
    + ([(_DIM, _DIM), (_DIM,)] * 4 + [(_DIM,)] * 2) * 2
    + [(_DIM,)] * 2
    + [(_FFN, _DIM), (_FFN,), (_DIM, _FFN), (_DIM,)],
}


def parse_topology(text: str) -> Topology:
    machines, lanes = map(int, text.split("x"))
    return Topology.regular(machines, lanes)


def model_case(model: str, topology: Topology, reuse: bool) -> Case:
    """fp32 masters, bf16 communication and gradients, fp32 sums; heads that split a piece, several batches from three machines on."""
    world = topology.world
    params = tuple(ParamLayout(f"{i}", tuple(s), "float32", "bfloat16", world) for i, s in enumerate(MODELS[model]))
    return Case(
        GroupLayout(model, params, world),
        topology,
        ring=2,
        piece_bytes=8 << 20,
        reuse=reuse,
        grad_dtype="bfloat16",
        reduce_dtype="float32",
        head_bytes=1 << 20,
        inbox_batch=max(1, topology.machines // 2),
    )


def cases(topology: Topology, random: int, models: list[str]) -> list[tuple[str, Case, bool]]:
    """(name, case, whether it is large) of each."""
    found = []
    for seed in range(random):
        case = random_case(seed, topology.world, topology.lanes)
        mode = "slot_reuse" if case.reuse else "in_place"
        found.append((f"random {seed}, {mode}, head {case.head_bytes}, batch {case.inbox_batch}", case, False))
    for model in models:
        for reuse in (False, True):
            case = model_case(model, topology, reuse)
            mode = "slot_reuse" if reuse else "in_place"
            found.append((f"{model} block, {mode}, {case.layout.bytes_unsharded / 2**20:.0f} MiB", case, True))
    return found


def rank_main(topology: Topology, rail: str, random: int, models: list[str], first: int) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    for seed, (name, case, large) in list(enumerate(cases(topology, random, models)))[first:]:
        os.environ["TIDE_POISON"] = str(int(seed % 3 > 0))
        os.environ.pop("TIDE_DELAYS", None)
        if seed % 4 in (1, 2):
            os.environ["TIDE_DELAYS"] = str(seed)
        started = time.monotonic()
        try:
            play(case, seed, rank, device, rail, device if large else CPU)
        except BaseException:
            os.write(1, f"error of rank {rank} in {name}: {case}\n{traceback.format_exc()}\n".encode())
            time.sleep(3)
            os._exit(1)
        torch.cuda.empty_cache()
        dist.barrier()
        if rank == 0:
            print(f"ok {seed} {name} ({time.monotonic() - started:.1f} s)", flush=True)
    dist.barrier()
    os._exit(0)


def driver(chosen: argparse.Namespace) -> int:
    """Launches each topology until its cases are through or the time is up; returns how many cases did not pass."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env.update(OMP_NUM_THREADS="2", NCCL_MULTI_RANK_GPU_ENABLE="1")
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    end, passed, all_cases = time.monotonic() + chosen.budget, 0, 0
    for text in chosen.topologies:
        topology = parse_topology(text)
        todo, done = len(cases(topology, chosen.random, chosen.models)), 0
        all_cases += todo
        while done < todo and time.monotonic() < end:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command += [str(topology.world), __file__, "--rail", chosen.rail, "--topologies", text]
            command += ["--random", str(chosen.random), "--models", *chosen.models, "--first", str(done)]
            log = Path(f"/tmp/tide_rail_{os.getpid()}_{text}.log")
            seen = 0
            with open(log, "w") as file:
                process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)
                patience = time.monotonic() + CASE_LIMIT_S
                while process.poll() is None and time.monotonic() < min(patience, end):
                    time.sleep(0.2)
                    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ok ")]
                    if len(lines) > seen:
                        patience = time.monotonic() + CASE_LIMIT_S
                    for line in lines[seen:]:
                        print(f"{chosen.rail} {text}: {line}", flush=True)
                    seen = max(seen, len(lines))
                hung = process.poll() is None
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ok ")]
            for line in lines[seen:]:
                print(f"{chosen.rail} {text}: {line}", flush=True)
            passed, done = passed + len(lines), done + len(lines)
            for line in dict.fromkeys(
                x for x in log.read_text(errors="replace").splitlines() if x.startswith("TIDE: ")
            ):
                print(f"{chosen.rail} {text}: {line}", flush=True)
            if done < todo:
                why = log.read_text(errors="replace")
                at = why.find("error of rank")
                why = why[at : at + 2500] if at >= 0 else why[-2500:]
                print(f"{chosen.rail} {text}: FAILED case {done} ({'hung' if hung else 'ended'}): {why}", flush=True)
                done += 1
    print(
        f"RAIL {'ok' if passed == all_cases else 'FAILED'}: {passed} of {all_cases} cases, rail {chosen.rail}",
        flush=True,
    )
    return all_cases - passed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rail", choices=("nccl", "loopback"), default="loopback")
    parser.add_argument("--topologies", nargs="*", default=list(TOPOLOGIES))
    parser.add_argument("--random", type=int, default=12, help="random cases a topology")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds")
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        topology = parse_topology(chosen.topologies[0])
        rank_main(topology, chosen.rail, chosen.random, chosen.models, chosen.first)
    else:
        sys.exit(driver(chosen) > 0)


if __name__ == "__main__":
    main()
