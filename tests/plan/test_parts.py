"""Reduce-scatters in parts (`early_reduce`): which parts, and the checker over whole steps of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.test_all_gather import group
from tide_comm.plan.checker import CheckError
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.parts import parts_of
from tide_comm.plan.program import Program
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.sequence import Plans, check_training
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology


def block(world: int, name: str = "block") -> GroupLayout:
    """A block's tensors in TorchTitan's order: attention, feed-forward, norms; one chunk is ragged."""
    shapes = ((10, 8), (2, 8), (2, 8), (10, 8), (27, 8), (8, 27), (27, 8), (1,), (1,))
    return group(name, world, *((shape, "bfloat16", 0) for shape in shapes))


def test_parts_go_backwards_through_the_block_and_norms_gate_nothing() -> None:
    layout = block(2)
    assert parts_of(layout, tuple(range(9)), 300) == ((6,), (5,), (4,), (0, 1, 2, 3, 7, 8))
    assert parts_of(layout, tuple(range(9)), 150) == ((6,), (5,), (4,), (3,), (0, 1, 2, 7, 8))
    # What is left over, attention's 384 bytes, joins the part before.
    assert parts_of(layout, tuple(range(9)), 400) == ((6,), (5,), (0, 1, 2, 3, 4, 7, 8))
    assert parts_of(layout, tuple(range(9)), 700) == ((5, 6), (0, 1, 2, 3, 4, 7, 8))


def test_one_part_is_none() -> None:
    assert parts_of(block(2), tuple(range(9)), 10_000) == ()
    assert parts_of(block(2), (), 1) == ()
    assert parts_of(block(2), (4, 6), 400) == ((6,), (4,))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 300), st.data())
def test_every_trainable_parameter_is_in_one_part(rows: list[int], least: int, data: st.DataObject) -> None:
    layout = group("g", 2, *(((n, 3), "bfloat16", 0) for n in rows))
    trainable = tuple(p for p in range(len(rows)) if data.draw(st.booleans()))
    parts = parts_of(layout, trainable, least)
    if parts:
        assert len(parts) > 1
        assert sorted(p for part in parts for p in part) == list(trainable)
        assert all(list(part) == sorted(part) for part in parts)
        sizes = [sum(layout.params[p].numel * 2 for p in part) for part in parts]
        assert all(size >= least for size in sizes)


TOPOLOGIES = [
    Topology.regular(1, 2),
    Topology.regular(1, 3),
    Topology(((1, 0),)),
    Topology.regular(2, 2),
    Topology.regular(3, 1),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_in_parts(topology: Topology, dtype: str) -> None:
    world = topology.world
    layouts = [block(world, "first"), block(world, "second")]
    plans = Plans(layouts, topology, StageSpec(96, 2, topology.lanes), reduce_dtype=dtype, early_bytes=300)
    assert [len(plans.parts(g)) for g in (0, 1)] == [4, 4]
    check_training(plans, micro_steps=2, recompute=True)


def test_a_part_in_anothers_place_is_rejected() -> None:
    topology = Topology.regular(1, 2)
    plans = Plans([block(2)], topology, StageSpec(96, 2, 2), early_bytes=300)

    def programs(kind: str, group: int, rank: int) -> Program:
        if kind != "reduce_scatter/1":
            return plans(kind, group, rank)
        # OUT as if there were this part alone: it lands on the first parameter's shard.
        return reduce_scatter(plans.layouts[0], topology, rank, plans.stage, plans.parts(0)[1], "bfloat16", "float32")

    check_training(plans)
    with pytest.raises(CheckError):
        check_training(plans, programs=programs)


def test_out_without_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="OUT holds parameters"):
        reduce_scatter(
            block(2), Topology.regular(1, 2), 0, StageSpec(96, 2, 2), [1, 2], "bfloat16", "float32", out_params=[0, 1]
        )
