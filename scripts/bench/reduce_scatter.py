"""The reduce-scatter by itself and beside a multiply: NCCL, NCCL with few blocks, PyTorch's symmetric memory, TIDE.

PYTHONPATH=. torchrun --nproc-per-node 8 scripts/bench/reduce_scatter.py [--mib 32] [--rounds 20] [--out FILE.json]
... --debug: tiny, on the CPU

Every rank ends with `--mib` MiB of fp32 sums. NCCL's rows read one fp32 buffer of all ranks' parts, as FSDP2 packs it; TIDE reads bf16
gradients where they are. Published, with 32 MiB outputs: 2 machines 2.12 ms (TIDE) and 1.27 ms (symmetric memory); 8 machines 6.75 ms
(NCCL), 26.35 ms (NCCL with 4 blocks) and 6.96 ms (TIDE), a multiply of 256 x 8192 x 8192 beside it slowed by 69%, 2.7% and 2.9%.

columns
  alone ms     median, over rounds, of the slowest rank's time from launch to result, ranks together before each
  multiply us  median time of a multiply that lies wholly within a collective; slowed: against the same alone (both rank 0's)

On several hosts TIDE's row goes over the nccl rail (NCCL 2.31.2 or newer), with a batch of all machines up to 8: not run there yet.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter, SymmMemReduceScatter

from tide_comm.config import MAX_BATCH
from tide_comm.engine.base import ArenaSpec, Buffers
from tide_comm.fsdp.domain import inbox_for, make_engine, stage_for
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.topology import Topology

MIB = 1024 * 1024
FEW_BLOCKS = 4
MULTIPLY = (256, 8192, 8192)
MULTIPLIES = 400
"""Enough to cover any of the collectives."""

Collective = Callable[[], Any]
"""Launches; calling what it returns orders the caller's stream behind the result."""


def everybody(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


class Row:
    """One kind of communication: `launch` starts a reduce-scatter, `check` compares what came out, `close` frees what is not PyTorch's."""

    def __init__(self, launch: Collective, check: Callable[[], None], close: Callable[[], None] = lambda: None) -> None:
        self.launch, self.check, self.close = launch, check, close


def gradient(elements: int, rank: int, device: torch.device) -> torch.Tensor:
    """Small whole numbers, exact in bf16 and in any order of sums."""
    return ((torch.arange(elements, device=device) + rank) % 5).bfloat16()


def expect(out: torch.Tensor, elements: int, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    want = sum(gradient(elements * world, r, device).view(world, -1)[rank].float() for r in range(world))
    if not torch.equal(out, torch.as_tensor(want)):
        raise SystemExit("the sums are wrong")


def nccl_row(elements: int, device: torch.device, group: dist.ProcessGroup, symmetric: bool) -> Row:
    world = dist.get_world_size()
    comm = SymmMemReduceScatter(group, "NCCL") if symmetric else DefaultReduceScatter()
    given = comm.allocate((elements * world,), dtype=torch.float32, device=device)
    out = comm.allocate((elements,), dtype=torch.float32, device=device)
    given.copy_(gradient(elements * world, dist.get_rank(), device))

    def launch() -> Any:
        work = comm(out, given, group, dist.ReduceOp.SUM, async_op=True)
        return work.wait if work is not None else lambda: None

    return Row(launch, lambda: expect(out, elements, device))


def tide_row(elements: int, device: torch.device) -> Row:
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = GroupLayout("g", (ParamLayout("p", (elements * world,), "float32", "bfloat16", world),), world)
    topology = Topology.from_hosts(everybody(socket.gethostname()))
    spec = ArenaSpec(topology, 0, 0, 0, stage_for([layout], topology), inbox_for([layout], topology, MAX_BATCH))
    rail = "nccl" if topology.machines > 1 else "loopback"
    engine = make_engine(spec, rank, dist.group.WORLD, 60.0, device, rail)  # type: ignore[arg-type]
    program = reduce_scatter(
        layout, topology, rank, spec.stage, [0], "bfloat16", "float32", blocks=16, final_blocks=4, inbox=spec.inbox
    )
    given = gradient(elements * world, rank, device)
    out = torch.empty(elements, device=device)

    def launch() -> Any:
        launched = engine.launch(program, -1, Buffers(grads=[given], out=out))
        return lambda: launched.wait("done")

    return Row(launch, lambda: expect(out, elements, device), engine.close)


def together(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    everybody(None)


def alone_ms(row: Row, rounds: int, device: torch.device) -> float:
    """Median of the slowest rank's times."""
    times = []
    for i in range(rounds + 3):
        together(device)
        began = time.perf_counter()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            row.launch()()
            end.record()
            end.synchronize()
            took = start.elapsed_time(end)
        else:
            row.launch()()
            took = (time.perf_counter() - began) * 1e3
        if i >= 3:
            times.append(took)
    row.check()
    return statistics.median(max(each) for each in zip(*everybody(times), strict=True))


def multiply_us(row: Row | None, device: torch.device) -> tuple[float, int]:
    """Median time of the multiplies within one collective (None: of all, without one), and how many those are. On GPUs."""
    m, k, n = MULTIPLY
    a, b = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    side = torch.cuda.Stream(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(MULTIPLIES + 1)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first round warms up
        together(device)
        zero = torch.cuda.Event(enable_timing=True)
        zero.record()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            start.record()
            if row is not None:
                row.launch()()
            end.record()
        for i in range(MULTIPLIES):
            events[i].record()
            torch.mm(a, b, out=out)
        events[-1].record()
        torch.cuda.synchronize()
    at = [zero.elapsed_time(event) for event in events]
    first, last = zero.elapsed_time(start), zero.elapsed_time(end)
    spans = [(s, e) for s, e in zip(at, at[1:], strict=False) if row is None or (s >= first and e <= last)]
    return (statistics.median(e - s for s, e in spans) * 1e3 if spans else float("nan")), len(spans)


def rows_of(options: argparse.Namespace, elements: int, device: torch.device) -> dict[str, Callable[[], Row]]:
    """Makers, by name: each is made, measured and closed before the next."""
    world = dist.group.WORLD
    assert world is not None
    found: dict[str, Callable[[], Row]] = {"stock": lambda: nccl_row(elements, device, world, symmetric=False)}
    if device.type == "cuda":

        def few() -> Row:
            settings = dist.ProcessGroupNCCL.Options()
            settings.config.min_ctas, settings.config.max_ctas = 1, FEW_BLOCKS
            return nccl_row(elements, device, dist.new_group(backend="nccl", pg_options=settings), symmetric=False)

        found[f"stock, {FEW_BLOCKS} blocks"] = few
        found["symm_mem"] = lambda: nccl_row(elements, device, world, symmetric=True)
    found["tide"] = lambda: tide_row(elements, device)
    return {
        name: make for name, make in found.items() if not options.rows or name.split(",")[0] in options.rows.split(",")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=32.0, help="a rank's sums")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", default="", help="of stock, symm_mem, tide; default all")
    parser.add_argument("--out", type=Path, help="where all figures go, as JSON")
    parser.add_argument("--debug", action="store_true", help="tiny, on the CPU, to see that it runs")
    options = parser.parse_args()
    if options.debug:
        options.mib, options.rounds = 0.125, 3
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    elements = int(options.mib * MIB) // 4
    results: dict[str, dict[str, float]] = {}
    quiet_us = multiply_us(None, device)[0] if device.type == "cuda" else None
    for name, make in rows_of(options, elements, device).items():
        row = make()
        results[name] = {"alone_ms": alone_ms(row, options.rounds, device)}
        if quiet_us is not None:
            beside_us, count = multiply_us(row, device)
            results[name] |= {"multiply_us": beside_us, "slowed": beside_us / quiet_us - 1, "multiplies": count}
        together(device)
        row.close()
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        alone = f", a multiply alone {quiet_us:.1f} us" if quiet_us is not None else ""
        table = Table(
            title=f"reduce-scatter to {options.mib:g} MiB, {world} ranks, {machine}{alone}", title_justify="left"
        )
        for column in ("row", "alone ms", "multiply us", "slowed"):
            table.add_column(column, justify="left" if column == "row" else "right")
        for name, found in results.items():
            beside = (f"{found['multiply_us']:.1f}", f"{found['slowed']:+.1%}") if "slowed" in found else ("n/a", "n/a")
            table.add_row(name, f"{found['alone_ms']:.3f}", *beside)
        Console(width=None if sys.stdout.isatty() else 140).print(table)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            about = {"machine": machine, "ranks": world, "torch": torch.__version__, "mib": options.mib}
            options.out.write_text(
                json.dumps({**about, "multiply_alone_us": quiet_us, "rows": results}, indent=1) + "\n"
            )
    together(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
