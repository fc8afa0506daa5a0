"""What the CUDA engine costs by itself: the host's time a launch, and the rates of its two kernels. Ranks may share a GPU.

PYTHONPATH=. torchrun --nproc-per-node 2 scripts/bench/engine.py

A group is a Llama-70B-shaped block (855.6 M parameters, fp32, gathered and reduced as bf16). Kernels run on rank 0 alone.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tide_comm.engine.base import ArenaSpec, Buffers, Launched
from tide_comm.engine.cuda.engine import CudaEngine
from tide_comm.plan import names
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import Area, Cast, Part, Program, Record, Reduce, Region, Segment
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.slices import StageSpec, shard_elements
from tide_comm.plan.topology import Topology

DIM, HIDDEN = 8192, 28672
SHAPES = [(DIM,), (DIM,), (DIM, DIM), (DIM // 4, DIM), (DIM, DIM), (HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN)]
PIECE_BYTES, RING, ROUNDS = 64 << 20, 4, 12
UNIT = 256 << 20
"""Bytes of one bf16 copy in the kernels' rows."""


def exchange(mine: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def microseconds(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call(*arguments)
    return (time.perf_counter() - started) * 1e6, result


def host_times(engine: CudaEngine, layout: GroupLayout, rank: int, idle: bool) -> None:
    """Median host time of each launch and where it goes: by kind of driver call, the rest is binding in Python.

    `idle`: with the GPU idle and the ranks together before each round, so that launches find cold caches; else one round after another.
    """
    topology, device, indices = engine.spec.topology, engine.device, list(range(len(SHAPES)))
    gather, free = all_gather(layout, topology, rank), vacate(topology, rank)
    reduce = reduce_scatter(layout, topology, rank, engine.spec.stage, indices, "bfloat16", "float32", blocks=16)
    masters = [torch.randn(p.chunk, device=device) for p in layout.params]
    grads = [torch.randn(p.shape, device=device).bfloat16() for p in layout.params]
    out = torch.empty(shard_elements(layout, indices), device=device)
    times: dict[str, list[float]] = {"all-gather": [], "vacate": [], "reduce-scatter": []}
    costs: dict[str, dict[str, float]] = {name: defaultdict(float) for name in times}
    calls: dict[str, Counter[str]] = {name: Counter() for name in times}

    def launch(name: str, step: int, *arguments: Any) -> Launched:
        engine.host_costs(True)
        took, launched = microseconds(engine.launch, *arguments)
        if step > 1:  # the first two compile, a slot each
            for kind, (count, spent) in engine.host_costs(False).items():
                costs[name][kind] += spent
                calls[name][kind] += count
        times[name].append(took)
        return launched

    for step in range(ROUNDS):
        if idle or step < 2:
            torch.cuda.synchronize()
            dist.barrier()
        launch("all-gather", step, gather, step % 2, Buffers(params=masters), step).wait("arrived")
        launch("vacate", step, free, step % 2)
        launch("reduce-scatter", step, reduce, -1, Buffers(grads=list(grads), out=out, scale=0.5), step).wait("done")
    torch.cuda.synchronize()
    want = (grads[2][: DIM // 2] if rank == 0 else grads[2][DIM // 2 :]).float().sum()
    assert out.isfinite().all() and want.isfinite()
    if rank == 0:
        print("the GPU idle before each round" if idle else "one round after another")
        for name, values in times.items():
            each = len(values) - 2
            driver = sum(costs[name].values()) / each
            by_kind = ", ".join(
                f"{kind} {calls[name][kind] / each:g} x {spent / calls[name][kind]:.1f}"
                for kind, spent in sorted(costs[name].items(), key=lambda item: -item[1])
            )
            print(f"host time of {name}: first {values[0]:.0f} us, then median {statistics.median(values[2:]):.0f} us")
            print(f"  driver {driver:.0f} us in {sum(calls[name].values()) / each:g} calls: {by_kind}")


def kernel_times(engine: CudaEngine) -> None:
    """Sums and casts of one unit, by number of blocks."""
    device, count = engine.device, UNIT // 2
    a, b = (torch.randn(count, device=device).bfloat16() for _ in range(2))
    master, narrow, out = torch.randn(count, device=device), torch.empty_like(a), torch.empty(count, device=device)
    stream = torch.cuda.ExternalStream(engine.stream_handle(names.SUM), device=device)

    def timed(program: Program, buffers: Buffers) -> float:
        times = []
        for _ in range(7):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            engine.launch(program, -1, buffers)
            end.record(stream)
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times[2:])

    points = {"done": names.DONE}
    for blocks in (16, 64, 132, 264):
        sources = (Region(Area.GRAD, 0, UNIT, index=0), Region(Area.GRAD, 0, UNIT, index=1))
        segment = Segment(sources, Region(Area.OUT, 0, 2 * UNIT))
        op = Reduce(names.SUM, (segment,), "bfloat16", "float32", scaled=True, blocks=blocks)
        took = timed(
            Program("sum", engine.rank, (op, Record(names.SUM, names.DONE)), points),
            Buffers(grads=[a, b], out=out, scale=0.5),
        )
        assert torch.equal(out, (a.float() + b.float()) * 0.5)
        print(f"sum of two copies of 256 MiB, {blocks} blocks: {took:.0f} us, {4 * UNIT / took / 1e3:.0f} GB/s")
    for dtype, source in (("float32", master), ("bfloat16", a)):
        nbytes = source.nbytes
        part = Part(Region(Area.PARAM, 0, nbytes, index=0), Region(Area.GRAD, 0, UNIT, index=0), dtype, "bfloat16")
        program = Program("cast", engine.rank, (Cast(names.SUM, (part,)), Record(names.SUM, names.DONE)), points)
        took = timed(program, Buffers(params=[source], grads=[narrow]))
        assert torch.equal(narrow, source.bfloat16())
        print(f"{dtype} to 256 MiB of bfloat16: {took:.0f} us, {(nbytes + UNIT) / took / 1e3:.0f} GB/s")


def main() -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    params = tuple(ParamLayout(f"p{i}", shape, "float32", "bfloat16", world) for i, shape in enumerate(SHAPES))
    layout = GroupLayout("block", params, world)
    topology = Topology.regular(1, world)
    spec = ArenaSpec(topology, layout.shard_bytes, layout.slot_bytes, 2, StageSpec(PIECE_BYTES, RING, world))
    engine = CudaEngine(spec, rank, exchange, 60.0, device)
    for idle in (True, False):
        host_times(engine, layout, rank, idle)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        kernel_times(engine)
    dist.barrier()
    engine.close()


if __name__ == "__main__":
    main()
