"""Sums whose sources lie in all lanes' memory at one address: the last step of a reduce-scatter between machines, on any engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tide_comm.engine.base import ArenaSpec, Buffers, Engine
from tide_comm.plan import names
from tide_comm.plan.program import COMPUTE, After, Area, Op, Program, Record, Reduce, Region, Remote, Segment
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology

BLOCK = 60000
"""Elements that each lane reads; lane j's block is the j-th."""
SCALE = 1 / 3
# (first element in the block, rows, width, pitch, first element in OUT): several tiles and an odd end; rows; rows off 16 bytes.
PIECES = ((0, 1, 40001, 40001, 0), (40004, 3, 4000, 6000, 40004), (59001, 5, 37, 64, 52007))
OUT_ELEMENTS = 52192


@dataclass(frozen=True)
class PeerSum:
    """`carry`: two sums, the second starts from what the first left and scales; else one."""

    area: Area
    order: tuple[int, ...]
    carry: bool
    dtype: str


def cases(world: int) -> list[PeerSum]:
    lanes = tuple(range(world))
    orders = (lanes, lanes[::-1], lanes[1:] + lanes[:1])
    kinds = ((False, "float32"), (True, "float32"), (False, "bfloat16"))
    return [
        PeerSum(area, order, carry, dtype)
        for area, order, (carry, dtype) in itertools.product((Area.SLOT, Area.STAGE), orders, kinds)
    ]


def arena(world: int) -> ArenaSpec:
    nbytes = world * BLOCK * 4
    return ArenaSpec(Topology.regular(1, world), 0, nbytes, 1, StageSpec(-(-nbytes // 512) * 512, 1, world))


def program(case: PeerSum, rank: int) -> Program:
    item = 2 if case.dtype == "bfloat16" else 4

    def sum_of(lanes: Sequence[int], carry: bool, scaled: bool) -> Reduce:
        segments = []
        for start, rows, width, pitch, out in PIECES:
            region = Region(case.area, (rank * BLOCK + start) * 4, width * 4, rows, pitch * 4)
            sources = tuple(Remote(lane, region) for lane in lanes)
            segments.append(Segment(sources, Region(Area.OUT, out * item, rows * width * item)))
        return Reduce(names.SUM, tuple(segments), "float32", case.dtype, scaled=scaled, carry=carry, blocks=3)

    half = max(1, len(case.order) // 2)
    sums: list[Op] = [sum_of(case.order, False, True)]
    if case.carry:
        sums = [sum_of(case.order[:half], False, False), sum_of(case.order[half:], True, True)]
    ops = (Record(COMPUTE, names.BEGIN), After(names.SUM, names.BEGIN), *sums, Record(names.SUM, names.DONE))
    return Program("peer sums", rank, ops, {"done": names.DONE})


def contents(seed: int, world: int, lane: int) -> torch.Tensor:
    """What `lane` holds: magnitudes differ, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed * 100 + lane)
    values = torch.randn(world * BLOCK, generator=generator)
    return values * 10.0 ** torch.randint(-3, 4, values.shape, generator=generator)


def expected(case: PeerSum, seed: int, world: int, rank: int) -> torch.Tensor:
    """OUT, with NaN where nothing is written."""
    held = [contents(seed, world, lane)[rank * BLOCK :] for lane in range(world)]
    out = torch.full((OUT_ELEMENTS,), float("nan"), dtype=getattr(torch, case.dtype))
    for start, rows, width, pitch, to in PIECES:
        parts = [
            held[lane].as_strided((rows, width), (pitch, 1), held[lane].storage_offset() + start) for lane in case.order
        ]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        out[to : to + rows * width] = (total * SCALE).to(out.dtype).reshape(-1)
    return out


def play(
    case: PeerSum, seed: int, engine: Engine, rank: int, device: torch.device, together: Callable[[], object]
) -> None:
    """One sum on every rank at once; raises where a bit differs. `together`: a barrier that is behind the device's work."""
    world = engine.spec.topology.world
    window = engine.window(case.area, 0 if case.area is Area.SLOT else -1, 0, world * BLOCK * 4)
    mine = torch.empty(0, device=device).set_(window, 0, (world * BLOCK,))
    mine.copy_(contents(seed, world, rank))
    together()
    out = torch.full((OUT_ELEMENTS,), float("nan"), dtype=getattr(torch, case.dtype), device=device)
    slot = 0 if case.area is Area.SLOT else -1
    engine.launch(program(case, rank), slot, Buffers(out=out, scale=SCALE)).wait("done")
    got, want = out.cpu(), expected(case, seed, world, rank)
    together()
    same = (got == want) | (got.isnan() & want.isnan())
    assert same.all(), f"{case}: {(~same).sum()} of {same.numel()} differ, first at {(~same).nonzero()[0].item()}"
