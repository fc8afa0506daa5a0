"""Reduce-scatters over machines: who owns which slice, where it lands, how much is sent."""

from __future__ import annotations

import pytest

from tests.plan.test_all_gather import group
from tide_comm.plan import names
from tide_comm.plan.program import Area, Copy, Program, Put, Reduce, Remote, Signal
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.slices import InboxSpec, StageSpec, seat_bytes_of
from tide_comm.plan.topology import Topology


def program_of(machines: int, lanes: int, rank: int, batch: int = 8, rows: int = 0) -> Program:
    topology = Topology.regular(machines, lanes)
    layout = group("g", machines * lanes, ((rows or 8 * lanes * machines * lanes, 4), "bfloat16", 0))
    inbox = InboxSpec(seat_bytes_of([layout], topology), batch, lanes) if machines > 1 else None
    stage = StageSpec(1 << 20, 2, lanes)
    return reduce_scatter(layout, topology, rank, stage, [0], "bfloat16", "float32", inbox=inbox)


@pytest.mark.parametrize("machines", range(2, 40, 3))
@pytest.mark.parametrize("lanes", range(1, 9))
def test_latin_square(machines: int, lanes: int) -> None:
    """Each machine has one owner for each slice, and each wave of L sources puts slice s on L different lanes."""
    for s in range(lanes):
        where = [(s - c) % lanes for c in range(machines)]
        for wave in range(0, machines - lanes + 1, lanes):
            assert sorted(where[wave : wave + lanes]) == list(range(lanes))
    for c in range(machines):
        assert sorted((lane + c) % lanes for lane in range(lanes)) == list(range(lanes))


def test_the_seeds_example() -> None:
    """4 lanes, destination D = machine 0: slice 0 of machines D, A, B, C (c = 0, 1, 2, 3) sits on lanes 0, 3, 2, 1, at one address."""
    lanes = 4
    for lane in range(lanes):
        last = next(op for op in program_of(4, lanes, lane).ops if isinstance(op, Reduce) and op.stream == names.FINAL)
        sources = [source for source in last.segments[0].sources if isinstance(source, Remote)]
        assert [source.rank for source in sources] == [0, 3, 2, 1]
        assert len({source.region for source in sources}) == 1
    # And who puts it there: machine A = 3 is c = 1 before machine 0, and its lane 3 owns slice 0.
    for machine, lane in ((3, 3), (2, 2), (1, 1)):
        rank = machine * lanes + lane
        (put,) = (op for op in program_of(4, lanes, rank).ops if isinstance(op, Put) and op.peer == lane)
        assert put.dst.area is Area.INBOX and put.dst.offset == 0


@pytest.mark.parametrize("machines, lanes", [(2, 2), (3, 4), (8, 8), (17, 2)])
def test_bytes(machines: int, lanes: int) -> None:
    """2/L of the raw bf16 bytes between machines (a quarter at L = 8), (L-1)/L of them inside one."""
    raw = 8 * lanes * machines * lanes * 4 * 2  # a rank's gradients in bf16
    sent = sum(op.src.nbytes for op in program_of(machines, lanes, 0).ops if isinstance(op, Put))
    assert sent == raw * (machines - 1) // machines * 2 // lanes
    pushed = sum(op.src.nbytes for op in program_of(machines, lanes, 0).ops if isinstance(op, Copy))
    assert pushed == raw * (lanes - 1) // lanes


def test_one_lane_puts_the_bf16_itself() -> None:
    program = program_of(4, 1, 0)
    raw = 8 * 4 * 4 * 2
    assert [op.src.nbytes for op in program.ops if isinstance(op, Put)] == [raw // 4] * 3
    sums = [op for op in program.ops if isinstance(op, Reduce)]
    assert {op.dst_dtype for op in sums if op.stream == names.SUM} == {"bfloat16"}
    assert [op.src_dtype for op in sums if op.stream == names.FINAL] == ["bfloat16"]


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_destinations_ascend_and_never_meet(lanes: int) -> None:
    """At each position every machine serves another destination."""
    machines = 7
    order = [
        [op.peer // lanes for op in program_of(machines, lanes, m * lanes).ops if isinstance(op, Put)]
        for m in range(machines)
    ]
    assert order[2] == [3, 4, 5, 6, 0, 1]
    for served in zip(*order, strict=True):
        assert sorted(served) == list(range(machines))


def test_inboxes_do_not_grow_with_machines() -> None:
    assert InboxSpec(1024, 8, 8).set_bytes == 8 * 1024
    for machines in (9, 17, 64):
        program = program_of(machines, 4, 0, batch=6)
        assert program.inbox_batches == -(-machines // 6)
        most = max(source.region.offset + source.region.nbytes for source in remotes(program))
        assert most <= InboxSpec(seat(machines), 6, 4).set_bytes


def seat(machines: int) -> int:
    topology = Topology.regular(machines, 4)
    return seat_bytes_of([group("g", machines * 4, ((8 * 4 * machines * 4, 4), "bfloat16", 0))], topology)


def remotes(program: Program) -> list[Remote]:
    return [
        source
        for op in program.ops
        if isinstance(op, Reduce)
        for segment in op.segments
        for source in segment.sources
        if isinstance(source, Remote)
    ]


def test_arrival_is_told_to_all_lanes_and_credit_goes_to_the_next_sources() -> None:
    program = program_of(5, 2, 0, batch=2)  # batches of machines c = 0 1, 2 3, 4
    told = [op.peer for op in program.ops if isinstance(op, Signal) and op.word.name == "seated"]
    assert told == [0, 1] * 3
    credits = [op.peer for op in program.ops if isinstance(op, Signal) and op.word.name == "credit"]
    # After batch 0 the set goes to batch 2 (machine -4), then to the next launch's batch 0 (machine -1), then to its batch 1.
    assert credits == [2, 8, 6, 4]


def test_a_row_a_lane_is_one_copy() -> None:
    """A block stands at one offset in each of D's L chunks: L rows, one copy a mate and destination."""
    copies = [op for op in program_of(8, 8, 0).ops if isinstance(op, Copy)]
    assert len(copies) == 8 * 7
    assert {op.src.rows for op in copies} == {8}
