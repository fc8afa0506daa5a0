"""All-gathers that write once to all lanes: what they send, that sequences of them are accepted, and mutants that must not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.plan.mutants import cached, changed, edit, recounted, rejection, survivors
from tests.plan.test_machine_mutants import PACING
from tests.plan.test_mutants import COVERED, drop
from tide_comm.plan import names
from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import After, Area, Cast, Copy, CopyAll, Op, Put, Region, Wait
from tide_comm.plan.render import render
from tide_comm.plan.sequence import Plans, check_training
from tide_comm.plan.shape import shape_of
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology

MODES = ("in_place", "slot_reuse")
MOST = 64
"""Largest piece that goes to all lanes, in bytes."""


def layouts(world: int) -> tuple[GroupLayout, ...]:
    """Pieces of 32 to 64 bytes, cast or not, by columns or not; one that is too large (96), one off 16 bytes (12), one with padding."""

    def param(name: str, *shape: int, dtype: str = "bfloat16", dim: int = 0) -> ParamLayout:
        return ParamLayout(name, shape, dtype, "bfloat16", world, dim)

    return (
        GroupLayout("first", (param("a", 2 * world, 8), param("b", 3 * world, 8)), world),
        GroupLayout("second", (param("c", 2 * world, 8, dtype="float32"), param("d", 3 * world, 2)), world),
        GroupLayout("third", (param("e", 2, 8 * world, dim=1), param("f", 6 * world, 8), param("g", world, 16)), world),
    )


def plans(mode: str, machines: int, lanes: int, head_bytes: int = 16, most: int = MOST) -> Plans:
    stage = StageSpec(64 * lanes, 2, lanes)
    topology = Topology.regular(machines, lanes)
    groups = layouts(topology.world)
    return Plans(groups, topology, stage, mode, inbox_batch=2, head_bytes=head_bytes, multicast_bytes=most)


SHAPES = [(1, 2), (1, 3), (1, 8), (2, 2), (3, 2), (2, 4)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("machines, lanes", SHAPES)
def test_sequences_are_accepted(mode: str, machines: int, lanes: int) -> None:
    check_training(plans(mode, machines, lanes), steps=2, prefetch=lanes % 3)


@pytest.mark.parametrize("machines, lanes", [(3, 2), (4, 4)])
def test_machine_0_alone_is_accepted(machines: int, lanes: int) -> None:
    check_training(plans("in_place", machines, lanes), steps=2, symmetric=True)


@pytest.mark.parametrize("machines, lanes", [*SHAPES, (3, 1)])
def test_what_is_sent(machines: int, lanes: int) -> None:
    """Each byte of each slot is written once, by whichever way; small aligned pieces leave once."""
    topology = Topology.regular(machines, lanes)
    world = topology.world
    for layout in layouts(world):
        written: Counter[tuple[int, int]] = Counter()
        for rank in range(world):
            program = all_gather(layout, topology, rank, 0, 48, MOST)
            ways: list[tuple[int, Region]] = []
            for op in program.ops:
                if isinstance(op, CopyAll):
                    assert op.dst.row_bytes % 16 == op.dst.offset % 16 == op.src.offset % 16 == 0
                    ways += [(lane, op.dst) for lane in op.lands(rank)]
                elif isinstance(op, (Copy, Put)):
                    ways.append((op.peer, op.dst))
                elif isinstance(op, Cast):
                    ways += [(rank, part.dst) for part in op.parts]
            for owner, region in ways:
                written.update((owner, byte) for start, end in region.spans() for byte in range(start, end))
            small = sum(p.chunk * 2 for p in layout.params if p.row * 2 % 16 == 0 and p.chunk * 2 <= MOST)
            shape = shape_of(program)
            assert shape.bytes_to_all == (machines * small if lanes > 1 else 0)
            sent = sum(p.chunk * 2 for p in layout.params) * machines
            assert shape.bytes_to_mates == dict.fromkeys(sorted(topology.mates(rank)), sent)
        wanted = {
            (rank, byte)
            for rank in range(world)
            for p, param in enumerate(layout.params)
            for byte in range(layout.slot_offsets[p], layout.slot_offsets[p] + param.slot_bytes)
        }
        assert set(written) == wanted and set(written.values()) == {1}


def test_shards_in_the_arena_need_no_kernel() -> None:
    """Only what is too large, off 16 bytes or cast is left to it."""
    topology = Topology.regular(1, 4)
    first, second, third = layouts(4)
    assert not any(isinstance(op, Cast) for op in all_gather(first, topology, 1, 0, 0, MOST).ops)
    for layout, params in ((second, ["c", "d"]), (third, ["f"])):
        (cast,) = (op for op in all_gather(layout, topology, 1, 0, 0, MOST).ops if isinstance(op, Cast))
        starts = {layout.slot_offsets[p]: param.name for p, param in enumerate(layout.params)}
        assert [starts[part.dst.offset // 512 * 512] for part in cast.parts] == params
    program = all_gather(second, topology, 1, 0, 0, MOST)
    (to_all,) = (op for op in program.ops if isinstance(op, CopyAll))
    assert to_all.src == to_all.dst and list(to_all.lands(1)) == [0, 2, 3]
    assert "CopyAll  SLOT[32+32] -> all of ranks [0, 1, 2, 3] SLOT[32+32]" in render(program)


def test_a_limit_of_0_changes_nothing() -> None:
    for layout in layouts(6):
        for rank in range(6):
            topology = Topology.regular(3, 2)
            assert all_gather(layout, topology, rank, 0, 48, 0) == all_gather(layout, topology, rank, 0, 48)


def to_all(change: Callable[[CopyAll], Op | None]) -> Callable[[Op], Op | None]:
    return lambda op: change(op) if isinstance(op, CopyAll) else op


def shifted(region: Region) -> Region:
    return replace(region, offset=region.offset + 16)


MUTANTS: dict[str, Callable[[Op], Op | None]] = {
    "written before a mate's slot is vacant": drop(Wait, names.PUSH, "vacant"),
    "used before the own write": drop(After, names.ARRIVE, "own_pushed"),
    "written before the cast": drop(After, names.PUSH, "own_done"),
    "written while the optimizer writes": drop(After, names.PUSH, "begin"),
    "not written": to_all(lambda op: None),
    "not to the own slot": to_all(lambda op: Copy(op.stream, op.src, op.dst, op.lanes[0])),
    "to a part of the machine": to_all(lambda op: replace(op, lanes=op.lanes[:-1])),
    "to a lane twice": to_all(lambda op: replace(op, lanes=(*op.lanes[:-1], op.lanes[0]))),
    "another piece's place": to_all(lambda op: replace(op, dst=shifted(op.dst))),
    "another source": to_all(lambda op: replace(op, src=shifted(op.src))),
    "into SHARD": to_all(lambda op: replace(op, dst=replace(op.dst, area=Area.SHARD))),
    "forwarded before the head arrived": drop(Wait, names.PUSH, "head"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name: str) -> None:
    """Alone on rank 0, and on all ranks."""
    base = cached(plans("in_place", 2, 2))
    for ranks in ([0], range(4)):
        mutant = changed(base, "all_gather", lambda program: edit(program, MUTANTS[name]), ranks)
        assert rejection(plans("in_place", 2, 2), recounted(mutant, 4)) is not None


def test_to_another_machine_is_rejected() -> None:
    base = cached(plans("in_place", 2, 2))
    elsewhere = to_all(lambda op: replace(op, lanes=(2, 3)))
    mutant = changed(base, "all_gather", lambda program: edit(program, elsewhere), [0])
    assert "a multicast address reaches all lanes" in (rejection(plans("in_place", 2, 2), mutant) or "accepted")


COVERED_HERE = {
    # As OWN's: BEGIN covers what the slot's last holder did on this rank.
    ("all_gather", ("push", "After", "vacated", 0)),
}


@pytest.mark.slow
def test_every_operation_is_needed() -> None:
    chosen = plans("in_place", 2, 2)
    found = survivors(chosen, chosen, ("all_gather", "vacate"))
    expected = {place for place in COVERED["in_place"] | PACING if place[0] != "reduce_scatter"}
    assert found == expected | COVERED_HERE
