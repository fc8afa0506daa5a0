"""Recursive doubling: how many pieces a round moves, that nothing arrives twice, and how heads are cut."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.test_all_gather import group
from tide_comm.plan import names
from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.program import Area, Copy, Put, Region, Signal, Wait
from tide_comm.plan.rounds import Entry, rounds, split
from tide_comm.plan.topology import Topology

TABLE = {2: [1], 3: [1, 1], 5: [1, 2, 1], 6: [1, 2, 2], 8: [1, 2, 4], 12: [1, 2, 4, 4]}
"""The table of the design: pieces that machine n sends in each round."""


@pytest.mark.parametrize("machines", TABLE)
def test_the_designs_table(machines: int) -> None:
    assert [r.count for r in rounds(Topology.regular(machines, 2), 1)] == TABLE[machines]


@pytest.mark.parametrize("machines", [*range(1, 40), 64, 127, 1024])
def test_every_piece_arrives_once_and_was_collected_before(machines: int) -> None:
    topology = Topology.regular(machines, 1)
    steps = [rounds(topology, m) for m in range(machines)]
    assert all(len(mine) == (math.ceil(math.log2(machines)) if machines > 1 else 0) for mine in steps)
    held = [[m] for m in range(machines)]
    for d in range(len(steps[0])):
        moves = [(steps[m][d], held[m][: steps[m][d].count]) for m in range(machines)]
        assert sorted(step.target for step, _ in moves) == list(range(machines)), "each moment is a permutation"
        for m, (step, pieces) in enumerate(moves):
            assert step.count == min(2**d, machines - 2**d) == len(pieces)
            assert steps[step.target][d].source == m
            held[step.target] = held[step.target] + pieces
    for m in range(machines):
        assert held[m] == [(m + k) % machines for k in range(machines)], "in order of machine number, each once"


@pytest.mark.parametrize("machines, lanes", [(2, 1), (3, 2), (5, 1), (4, 4), (8, 8), (6, 3)])
@pytest.mark.parametrize("head_bytes", [0, 64])
def test_puts_and_forwards(machines: int, lanes: int, head_bytes: int) -> None:
    topology = Topology.regular(machines, lanes)
    world = machines * lanes
    layout = group(
        "g", world, ((3 * world, 5), "bfloat16", 0), ((2, world), "bfloat16", 1), ((world + 1,), "float32", 0)
    )
    shard = sum(p.chunk * ITEM_BYTES[p.comm_dtype] for p in layout.params)
    for rank in (0, world - 1):
        ops = all_gather(layout, topology, rank, 0, head_bytes).ops
        puts = [op for op in ops if isinstance(op, Put)]
        assert sum(op.dst.nbytes for op in puts) == (machines - 1) * shard
        assert {topology.lane_of(op.peer) for op in puts} == {topology.lane_of(rank)}
        for step in rounds(topology, rank):
            sent = [op for op in puts if op.peer == step.target]
            assert sum(op.dst.nbytes for op in sent) == step.count * shard
            split_once = 1 if head_bytes and step.count * shard > head_bytes else 0
            assert step.count * 3 <= len(sent) <= step.count * 3 + split_once
        copies = [op for op in ops if isinstance(op, Copy)]
        assert sum(op.dst.nbytes for op in copies) == (lanes - 1) * machines * shard
        assert {topology.machine_of(op.peer) for op in copies} <= {topology.machine_of(rank)}
        paced = [op for op in ops if isinstance(op, (Signal, Wait)) and op.word.name == "confirmed"]
        assert len(paced) == (2 * len(rounds(topology, rank)) if head_bytes else 0)


def test_what_follows_one_another_is_forwarded_as_rows() -> None:
    """Machine by machine a lane's pieces of a parameter stand L pieces apart: one 2D copy a round and parameter."""
    layout = group("g", 64, ((64, 4), "bfloat16", 0), ((128, 3), "bfloat16", 0))
    ops = all_gather(layout, Topology.regular(8, 8), 0).ops
    forwards = [op for op in ops if isinstance(op, Copy) and op.peer == 1]
    assert [op.src.rows for op in forwards if op.src.area is Area.SLOT] == [1, 1, 2, 2, 4, 4]
    assert len([op for op in ops if isinstance(op, Copy)]) == 7 * (2 + 6)


def test_the_next_round_starts_behind_the_confirmation_and_its_data() -> None:
    layout = group("g", 4, ((64, 4), "bfloat16", 0))
    ops = all_gather(layout, Topology.regular(4, 1), 0, 0, 32).ops
    rail = [op for op in ops if op.stream == names.RAIL and isinstance(op, (Wait, Put))]
    text = [f"{op.word.name} {op.word.key if isinstance(op, Wait) else op.peer}" for op in rail]
    assert text == [
        *("confirmed 2", "vacant 3", "head 3", "tail 3"),
        # Own pieces first; what round 0 brought from machine 1 only when it is all there.
        *("confirmed 3", "vacant 2", "head 2", "tail 2", "head 1", "tail 1", "tail 2"),
    ]


def whole(entries: list[Entry]) -> list[tuple[int, int]]:
    return [span for entry in entries for span in entry.pair[0].spans()]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), min_size=1, max_size=6),
    st.integers(1, 400),
)
def test_heads(sizes: list[tuple[int, int]], head_bytes: int) -> None:
    entries, at = [], 0
    for i, (width, rows) in enumerate(sizes):
        region = Region(Area.SLOT, at, 2 * width, rows, 4 * width if rows > 1 else 0)
        entries.append(Entry(0, i, (region, region)))
        at += 4 * width * rows
    head, tail = split(entries, head_bytes)
    assert head, "never empty"
    assert len(head) + len(tail) <= len(entries) + 1, "at most one piece is split"
    joined: list[tuple[int, int]] = []
    for start, end in whole(head + tail):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    want: list[tuple[int, int]] = []
    for start, end in whole(entries):
        if want and want[-1][1] == start:
            want[-1] = (want[-1][0], end)
        else:
            want.append((start, end))
    assert joined == want, "the same bytes in the same order"
    first = entries[0].pair[0]
    assert sum(e.pair[0].nbytes for e in head) <= max(head_bytes, 16, first.row_bytes)
    assert split(entries, 0) == ([], entries)


def test_layout_without_elements_still_keeps_step() -> None:
    layout = GroupLayout("g", group("g", 4, ((0, 3), "bfloat16", 0)).params, 4)
    program = all_gather(layout, Topology.regular(4, 1), 0, 0, 64)
    assert not any(isinstance(op, Put) for op in program.ops)
    assert {word.name for word in program.arrivals} == {"confirmed"}
