"""Ranks of the CUDA engine, started by torchrun; they share GPUs where there are fewer. Checked against layout and `reference_sum`.

torchrun --nproc-per-node 2 tests/engine/cuda_ranks.py CASES
torchrun --nproc-per-node 8 tests/engine/cuda_ranks.py CASES --multicast

With --multicast every case writes to all lanes of a machine at one address, and reads their sum there. It ends with status 3 and the
reason, before any object is made, where the probe says no; sums of a switch, which has no order, are compared within their rounding.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import peer_sums
import torch
import torch.distributed as dist

from tide_comm.engine.base import ArenaSpec, Buffers
from tide_comm.engine.cuda.engine import CudaEngine
from tide_comm.engine.cuda.multicast import decide_together
from tide_comm.engine.timing import Timings
from tide_comm.errors import TideError
from tide_comm.plan import portions
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import Area, CopyAll, LaneSum, Program, Reduce
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.reference import reference_sum
from tide_comm.plan.slices import InboxSpec, StageSpec, seat_bytes_of, shard_elements
from tide_comm.plan.topology import Topology

STEPS = 4
NO_MULTICAST = 3
"""Exit status."""
AT_ONCE, DIVIDED = (portions.LEAST_BYTES, portions.ALIGN_BYTES), (0, 16)
"""From how many bytes on casts go in portions, and at multiples of what they are cut."""


@dataclass(frozen=True)
class Case:
    layout: GroupLayout
    topology: Topology
    ring: int
    piece_bytes: int
    reuse: bool
    grad_dtype: str
    reduce_dtype: str
    head_bytes: int
    inbox_batch: int
    multicast: bool = False
    """Programs write to all lanes at once, and read their sum."""

    @property
    def multicast_bytes(self) -> int:
        return 4 << 20 if self.multicast else 0


def widened(case: Case) -> Case:
    """The same with most pieces at 16 bytes, by programs for multicast."""
    params = tuple(replace(p, shape=(*p.shape[:-1], 8 * p.shape[-1])) for p in case.layout.params)
    return replace(case, layout=replace(case.layout, params=params), multicast=True)


def is_large(seed: int) -> bool:
    """Every fourth: half of them on one machine, half on several."""
    return seed % 8 in (2, 5)


def how_of(seed: int) -> tuple[bool, bool]:
    """(whether there are random delays, whether casts go in portions): both meet each other and large cases (test_gpu_cases.py)."""
    return bool((seed // 8 + seed // 2) % 2), bool(seed // 2 % 4)


def random_case(seed: int, world: int, lanes: int = 0) -> Case:
    """The same on every rank. Large ones have several tiles a segment, several pieces, odd sizes. Where casts go in portions, something is
    cast.

    `lanes`: of the machines that are emulated; 0: one machine or several, by the seed.
    """
    rnd = random.Random(seed)
    large = is_large(seed)
    order = list(range(world))
    rnd.shuffle(order)
    divided = how_of(seed)[1]
    comm = rnd.choice(["bfloat16", "bfloat16", "float32" if not divided else "bfloat16"])
    params = []
    for i in range(rnd.randint(1, 4)):
        dim = rnd.choice([0, 0, 1]) if i or not (divided and large) else 0
        shape = [rnd.randint(1, 9), rnd.randint(1, 5)]
        if large:
            shape = [rnd.randint(1, 700), rnd.choice([64, 256, 1000, 777])]
        if dim:
            shape[1] *= world
        dtype = rnd.choice(["float32", comm])
        if divided and not i:
            dtype = "float32"
        params.append(ParamLayout(f"p{i}", tuple(shape), dtype, comm, world, dim))
    reuse = rnd.random() < 0.5
    grad = comm if reuse else rnd.choice([comm, "float32", "float16"])
    piece = rnd.choice([16 << 10, 100 << 10]) if large else 16 * rnd.randint(1, 20)
    out = rnd.choice(["float32", "float32", "bfloat16"])
    # Emulated machines of 1, 2, ... lanes, every other case; a piece takes one element of each lane's block at least.
    if not lanes:
        lanes = rnd.choice([n for n in range(1, world) if world % n == 0]) if seed % 2 and world > 1 else world
    table = tuple(tuple(order[m : m + lanes]) for m in range(0, world, lanes))
    head, batch = rnd.choice([0, 16, 64, 8 << 20]), rnd.choice([1, 2, 8])
    layout = GroupLayout("g", tuple(params), world)
    piece = max(piece, 4 * lanes)
    return Case(layout, Topology(table), rnd.randint(1, 4), piece, reuse, grad, out, head, batch)


def multicast_case(seed: int, world: int) -> Case:
    """Machines of 8, 4, 2, ... lanes in turn: never of one, which has nobody to write to."""
    lanes = [n for n in range(world, 1, -1) if world % n == 0]
    return widened(random_case(seed, world, lanes[seed % len(lanes)]))


def spec_of(case: Case) -> ArenaSpec:
    layout, topology = case.layout, case.topology
    inbox = None
    if topology.machines > 1:
        batch = min(case.inbox_batch, topology.lanes) if case.multicast else case.inbox_batch
        inbox = InboxSpec(seat_bytes_of([layout], topology), batch, topology.lanes, case.multicast)
    stage = StageSpec(case.piece_bytes, case.ring, topology.lanes)
    return ArenaSpec(topology, layout.shard_bytes, layout.slot_bytes, 2, stage, inbox)


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def chunk_of(param: ParamLayout, full: torch.Tensor, rank: int) -> torch.Tensor:
    """FSDP2's padded chunk of a full tensor, flat."""
    size = list(param.shape)
    size[param.dim] = param.chunk_dim
    padded = torch.zeros(size, dtype=full.dtype, device=full.device)
    length = max(0, min(param.chunk_dim, full.size(param.dim) - rank * param.chunk_dim))
    if length:
        padded.narrow(param.dim, 0, length).copy_(full.narrow(param.dim, rank * param.chunk_dim, length))
    return padded.reshape(-1)


def exchange(mine: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def random_tensor(seed: int, shape: tuple[int, ...], dtype: str, on: torch.device) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator(on).manual_seed(seed), device=on)
    return made.to(dtype_of(dtype))


CPU = torch.device("cpu")


def at_once(*programs: Program) -> tuple[int, int]:
    """(copies to all lanes, sums of the switch) that programs ask for."""
    ops = [op for program in programs for op in program.ops]
    segments = [segment for op in ops if isinstance(op, Reduce) for segment in op.segments]
    switched = sum(isinstance(source, LaneSum) for segment in segments for source in segment.sources)
    return sum(isinstance(op, CopyAll) for op in ops), switched


def agrees(got: torch.Tensor, want: torch.Tensor, parts: list[torch.Tensor], scale: float, switched: bool) -> bool:
    """To the bit; where a switch adds, within what another order of adding `parts` in fp32, and rounding that, may change."""
    if not switched:
        return torch.equal(got, want)
    rounded = torch.finfo(want.dtype).eps * want.abs().float()
    most = sum(part.abs().float() for part in parts) * scale * len(parts) * torch.finfo(torch.float32).eps + rounded
    return bool(((got.float() - want.float()).abs() <= most).all())


def play(
    case: Case,
    seed: int,
    rank: int,
    device: torch.device,
    rail: str = "loopback",
    on: torch.device = CPU,
    multicast: bool = False,
) -> tuple[int, int]:
    """A few steps of all-gather, vacating and reduce-scatter; everything is compared at the end only, so that steps overlap.

    `on`: where inputs are made and results compared; large cases take minutes on a CPU. `multicast`: machines' arenas must lie at one
    address. Returns how many copies went to it and how many sums came from it.
    """
    layout, topology = case.layout, case.topology
    world, indices = layout.world, list(range(len(layout.params)))
    spec = spec_of(case)
    stage, inbox = spec.stage, spec.inbox
    full = [random_tensor(seed * 1000 + p, q.shape, q.param_dtype, on) for p, q in enumerate(layout.params)]
    grads = [
        [
            random_tensor(seed * 1000 + 100 + 10 * r + p, q.shape, case.grad_dtype, on)
            for p, q in enumerate(layout.params)
        ]
        for r in range(world)
    ]
    engine = CudaEngine(spec, rank, exchange, 60.0, device, rail, multicast)
    assert bool(engine.together) is multicast, f"lane by lane: {engine.apart}"
    gathered = all_gather(layout, topology, rank, 0, case.head_bytes, case.multicast_bytes)
    scattered = reduce_scatter(
        layout, topology, rank, stage, indices, case.grad_dtype, case.reduce_dtype, from_slot=case.reuse, inbox=inbox
    )
    freed, freed_reduced = vacate(topology, rank), vacate(topology, rank, reduced_from=True)
    masters = [chunk_of(p, f, rank).to(device) for p, f in zip(layout.params, full, strict=True)]
    for p, param in enumerate(layout.params):
        if param.in_shard and param.chunk:
            region = layout.shard(p, 0)
            window = engine.window(Area.SHARD, -1, region.offset, region.nbytes)
            torch.empty(0, dtype=masters[p].dtype, device=device).set_(window, 0, masters[p].shape).copy_(masters[p])
    item = ITEM_BYTES[layout.params[0].comm_dtype]
    seen: list[torch.Tensor] = []
    outs: list[torch.Tensor] = []
    timed = seed % 4 == 1
    for step in range(STEPS):
        slot = step % 2
        engine.time_launches(timed)
        engine.launch(gathered, slot, Buffers(params=masters), tag=step).wait("arrived")
        for p, param in enumerate(layout.params):
            window = engine.window(Area.SLOT, slot, layout.slot_offsets[p], param.slot_bytes)
            flat = torch.empty(0, dtype=dtype_of(param.comm_dtype), device=device)
            flat.set_(window, 0, (param.slot_bytes // item,))
            seen.append(flat[: param.numel].view(param.shape).clone())
        out = torch.full(
            (shard_elements(layout, indices),), float("nan"), dtype=dtype_of(case.reduce_dtype), device=device
        )
        if not case.reuse:
            engine.launch(freed, slot)
        held: list[torch.Tensor | None] = [g.to(device) * (step + 1) for g in grads[rank]]
        reduced = engine.launch(
            scattered, slot if case.reuse else -1, Buffers(grads=held, out=out, scale=1 / 3), tag=step
        )
        if case.reuse:
            engine.launch(freed_reduced, slot)
        reduced.wait("grads_read")
        assert held == [], "gradients must be let go at grads_read"
        reduced.wait("done")
        outs.append(out.clone())
        engine.backward_ended()
    torch.cuda.synchronize()
    check_times(engine.timings(), timed)
    for step in range(STEPS):
        for p, param in enumerate(layout.params):
            got = seen[step * len(indices) + p].to(on)
            assert torch.equal(got, full[p].to(dtype_of(param.comm_dtype))), f"step {step}, parameter {p}"
        offset = 0
        for p, param in enumerate(layout.params):
            parts = [chunk_of(param, g[p] * (step + 1), rank) for g in grads]
            want = (reference_sum(parts, topology, topology.machine_of(rank)) * (1 / 3)).to(dtype_of(case.reduce_dtype))
            valid = param.valid(rank) if not param.dim else param.chunk
            got = outs[step][offset : offset + valid].to(on)
            terms = [part[:valid] for part in parts]
            assert agrees(got, want[:valid], terms, 1 / 3, multicast and topology.machines > 1), (
                f"step {step}, gradient {p}: {(got != want[:valid]).sum()} of {valid} differ"
            )
            offset += param.chunk
    dist.barrier()
    engine.close()
    copies, sums = at_once(gathered, scattered) if multicast else (0, 0)
    return STEPS * copies, STEPS * sums


def check_times(found: Timings, timed: bool) -> None:
    """An all-gather and a reduce-scatter a step; the caller's waits for `arrived`, `grads_read` and at the end of backward."""
    assert (len(found.launches), len(found.waits)) == ((2 * STEPS, 3 * STEPS) if timed else (0, 0)), found
    assert all(0 <= end - start < 60 for start, end in (*found.launches, *found.waits)), found
    assert not timed or 0 < found.communication_s < 60, found


def disagree(rank: int, device: torch.device) -> str:
    """Ranks that launch reduce-scatters with different tags: what the next launch raises after a while."""
    world = dist.get_world_size()
    topology = Topology.regular(1, world)
    layout = GroupLayout("g", (ParamLayout("w", (64, 8), "float32", "bfloat16", world, 0),), world)
    stage = StageSpec(4096, 2, world)
    engine = CudaEngine(ArenaSpec(topology, 0, 0, 0, stage), rank, exchange, 60.0, device)
    out = torch.zeros(layout.params[0].chunk, device=device)
    program = reduce_scatter(layout, topology, rank, stage, [0], "bfloat16", "float32")
    held: list[torch.Tensor | None] = [torch.ones(64, 8, dtype=torch.bfloat16, device=device)]
    engine.launch(program, -1, Buffers(grads=held, out=out), tag=rank)
    torch.cuda.synchronize()
    message = ""
    for _ in range(50):
        time.sleep(0.1)
        try:
            engine.raise_if_failed()
        except Exception as error:
            message = str(error)
            break
    assert out.abs().sum().item() == 0, "a sum that disagrees must write nothing"
    dist.barrier()
    engine.close()
    return message


def disagree_on_groups(rank: int, device: torch.device) -> str:
    """Ranks that gather different groups into the same slot: what they raise. Streams stay stuck, so nothing on the GPU comes after it."""
    world = dist.get_world_size()
    topology = Topology.regular(1, world)
    shape = (64 * world, 8) if rank == 1 else (96 * world, 4)
    layout = GroupLayout(f"g{rank == 1}", (ParamLayout("w", shape, "float32", "bfloat16", world, 0),), world)
    engine = CudaEngine(ArenaSpec(topology, 0, 1 << 20, 2, StageSpec(4096, 2, world)), rank, exchange, 5.0, device)
    masters = [torch.ones(layout.params[0].chunk, device=device)]
    launched = engine.launch(all_gather(layout, topology, rank), 1, Buffers(params=masters), tag=1 + (rank == 1))
    launched.wait("arrived")
    used = torch.cuda.Event()
    used.record()
    started = time.monotonic()
    try:
        while time.monotonic() - started < 20:
            assert not launched.reached("arrived") and not used.query(), "what disagrees must not be used"
            time.sleep(0.01)
    except TideError as error:
        took = time.monotonic() - started
        # Where all streams share a hardware queue, tags may be unreadable behind the stuck one: then the timeout ends it.
        if os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and "timeout_s" in str(error):
            return (
                f"{error} (in slot 1 ranks disagree: rank 1 (machine 0, lane 1) runs something else here than rank 0)"
            )
        assert took < 2.0, f"noticed after {took:.1f} s only: {error}"
        return str(error)
    return ""


def sums_of_peers(rank: int, world: int, device: torch.device) -> str:
    """Sums over every rank's memory, read where it is. Returns what the arena's memory is."""
    engine = CudaEngine(peer_sums.arena(world), rank, exchange, 60.0, device)

    def together() -> None:
        torch.cuda.synchronize()
        dist.barrier()

    for seed, case in enumerate(peer_sums.cases(world)):
        peer_sums.play(case, seed, engine, rank, device, together)
    how = engine.memory_how
    engine.close()
    return how


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=int)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("--multicast", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    if args.multicast and not (found := decide_together("auto", device.index, exchange)).allowed:
        print(f"rank {rank}: no multicast: {found.reason}", flush=True)
        sys.exit(NO_MULTICAST)
    started = time.monotonic()
    copies = sums = 0
    for seed in range(args.first, args.first + args.cases):
        os.environ["TIDE_POISON"] = str(int(seed % 3 > 0))
        os.environ.pop("TIDE_DELAYS", None)
        delays, divided = how_of(seed)
        if delays:
            os.environ["TIDE_DELAYS"] = str(seed)
        portions.LEAST_BYTES, portions.ALIGN_BYTES = DIVIDED if divided else AT_ONCE
        case = multicast_case(seed, world) if args.multicast else random_case(seed, world)
        # Without a multicast address programs for multicast go lane by lane.
        case = widened(case) if seed % 4 == 1 and not args.multicast else case
        try:
            went, came = play(case, seed, rank, device, multicast=args.multicast)
            copies, sums = copies + went, sums + came
        except BaseException:
            print(f"rank {rank}: case {seed} failed: {case}", flush=True)
            raise
    os.environ.pop("TIDE_DELAYS", None)
    how = sums_of_peers(rank, world, device)
    message = disagree(rank, device)
    assert "disagree" in message, message
    message = disagree_on_groups(rank, device)
    for part in ("disagree", "in slot 1", "rank 1 (machine 0, lane 1)", "runs something else here than rank"):
        assert part in message, (part, message)
    if rank == 0:
        took = time.monotonic() - started
        print(
            f"ENGINE ok: {args.cases} cases, {world} ranks on {torch.cuda.device_count()} GPUs, {took:.1f} s, memory: {how}; "
            f"rank 0 made {copies} copies to all lanes at once and read {sums} sums of a switch",
            flush=True,
        )
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # an ordinary end might wait for the stuck streams


if __name__ == "__main__":
    main()
