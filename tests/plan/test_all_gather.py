"""Generated all-gathers on one machine: what they send, and that sequences of them are accepted."""

from __future__ import annotations

import pytest

from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import Area, Cast, Copy, Copy2D, Record
from tide_comm.plan.sequence import Plans, check_training
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology


def group(name: str, lanes: int, *params: tuple) -> GroupLayout:
    """`params`: (shape, dtype of the sharded parameter, sharded dimension)."""
    made = tuple(ParamLayout(f"{name}{i}", s, d, "bfloat16", lanes, dim) for i, (s, d, dim) in enumerate(params))
    return GroupLayout(name, made, lanes)


def layouts(lanes: int) -> tuple[GroupLayout, ...]:
    """Cast and uncast, uneven, empty shards, a scalar, no elements, and a second dimension sharded."""
    return (
        group("first", lanes, ((2 * lanes, 3), "bfloat16", 0), ((2 * lanes + 1,), "bfloat16", 0)),
        group("second", lanes, ((5, 2), "float32", 0), ((3, 2 * lanes, 2), "bfloat16", 1), ((), "float32", 0)),
        group("third", lanes, ((2, 3, lanes), "float32", 2), ((0, 4), "bfloat16", 0), ((1, 7), "bfloat16", 0)),
    )


@pytest.mark.parametrize("lanes", range(1, 9))
@pytest.mark.parametrize("mode", ["in_place", "slot_reuse"])
def test_sequences_are_accepted(lanes: int, mode: str) -> None:
    plans = Plans(layouts(lanes), Topology.regular(1, lanes), StageSpec(32, 2, lanes), mode)
    check_training(plans, steps=2, prefetch=lanes % 3)


@pytest.mark.parametrize("lanes", range(1, 9))
def test_bytes_copies_and_kernels(lanes: int) -> None:
    topology = Topology.regular(1, lanes)
    for layout in layouts(lanes):
        chunks = sum(param.chunk * ITEM_BYTES[param.comm_dtype] for param in layout.params)
        for rank in range(lanes):
            ops = all_gather(layout, topology, rank).ops
            copies = [op for op in ops if isinstance(op, Copy)]
            assert sum(op.dst.nbytes for op in copies) == (lanes - 1) * chunks
            assert len(copies) <= (lanes - 1) * len(layout.params)
            assert sum(isinstance(op, Cast) for op in ops) == 1
            assert all(op.peer != rank and op.dst.area is Area.SLOT for op in copies)


def test_fp32_masters_are_pushed_from_the_slot_and_others_from_shard() -> None:
    layout = group("g", 2, ((4,), "float32", 0), ((4,), "bfloat16", 0))
    copies = [op for op in all_gather(layout, Topology.regular(1, 2), 1, shard_base=1024).ops if isinstance(op, Copy)]
    assert [(op.src.area, op.src.offset) for op in copies] == [(Area.SHARD, 1024), (Area.SLOT, 4)]
    assert [op.dst.offset for op in copies] == [512 + 4, 4]


def test_rows_at_a_pitch_are_one_copy() -> None:
    (copy,) = (
        op
        for op in all_gather(group("g", 2, ((3, 4), "bfloat16", 1)), Topology.regular(1, 2), 1).ops
        if isinstance(op, Copy)
    )
    assert isinstance(copy, Copy2D)
    assert (copy.src.rows, copy.src.pitch) == (3, 4)
    assert (copy.dst.rows, copy.dst.pitch, copy.dst.offset) == (3, 8, 4)


def test_points_are_recorded_and_ranks_in_any_order_work() -> None:
    plans = Plans(layouts(3), Topology(((2, 0, 1),)), StageSpec(32, 2, 3))
    check_training(plans)
    program = plans("all_gather", 0, 2)
    recorded = {op.event for op in program.ops if isinstance(op, Record)}
    assert set(program.points) == {"sent", "arrived"}
    assert set(program.points.values()) <= recorded
    assert "all_gather first, rank 2" in str(program)
