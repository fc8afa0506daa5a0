"""Generated reduce-scatters on one machine: pieces, bytes, order of summation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.test_all_gather import group, layouts
from tide_comm.plan.program import Area, Cast, Copy, Reduce, Remote, Wait
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.sequence import Plans, check_training
from tide_comm.plan.slices import Cutting, StageSpec, shard_elements
from tide_comm.plan.topology import Topology


@pytest.mark.parametrize("lanes", range(1, 9))
@pytest.mark.parametrize("mode", ["in_place", "slot_reuse"])
def test_many_small_pieces_through_the_ring(lanes: int, mode: str) -> None:
    """Three pieces and more a launch, so that every place is used again within it; fp32 sums go to a bf16 shard."""
    two = layouts(lanes)[1:]
    plans = Plans(two, Topology.regular(1, lanes), StageSpec(16, 2, lanes), mode, reduce_dtype="bfloat16")
    assert max(plans("reduce_scatter", g, 0).stage_pieces for g in range(2)) >= 2
    check_training(plans)


def test_fp32_gradients() -> None:
    check_training(Plans(layouts(2), Topology.regular(1, 2), StageSpec(24, 3, 2), grad_dtype="float32"))


@pytest.mark.parametrize("lanes", range(1, 9))
def test_bytes_sent(lanes: int) -> None:
    """Every lane pushes what is not its own shard, in the gradients' dtype: (L-1)/L of the group where it divides evenly."""
    topology = Topology.regular(1, lanes)
    for layout in layouts(lanes):
        params = range(len(layout.params))
        for rank in range(lanes):
            program = reduce_scatter(layout, topology, rank, StageSpec(32, 2, lanes), params, "bfloat16", "float32")
            sent = sum(op.dst.nbytes for op in program.ops if isinstance(op, Copy))
            own = sum(param.valid(rank) for param in layout.params)
            assert sent == 2 * (sum(param.numel for param in layout.params) - own)
    even = group("even", lanes, ((4 * lanes, 3), "bfloat16", 0))
    program = reduce_scatter(even, topology, 0, StageSpec(64, 2, lanes), [0], "bfloat16", "float32")
    assert sum(op.src.nbytes for op in program.ops if isinstance(op, Copy)) == 2 * 12 * (lanes - 1)


def test_in_place_reads_gradients_where_they_are() -> None:
    program = reduce_scatter(
        layouts(3)[0], Topology.regular(1, 3), 1, StageSpec(64, 2, 3), [0, 1], "bfloat16", "float32"
    )
    assert {op.src.area for op in program.ops if isinstance(op, Copy)} == {Area.GRAD}
    assert not any(isinstance(op, Cast) for op in program.ops)


def test_sums_run_over_lanes_from_0_up() -> None:
    program = reduce_scatter(layouts(3)[0], Topology(((1, 2, 0),)), 2, StageSpec(64, 2, 3), [0], "bfloat16", "float32")
    (reduce,) = (op for op in program.ops if isinstance(op, Reduce))
    assert reduce.scaled
    for segment in reduce.segments:
        # Rank 2 is lane 1: its mates are lane 2 (rank 0) at place 0 and lane 0 (rank 1) at place 1.
        assert not any(isinstance(source, Remote) for source in segment.sources)
        assert [s.area for s in segment.sources if not isinstance(s, Remote)] == [Area.STAGE, Area.GRAD, Area.STAGE]
        offsets = [s.offset for s in segment.sources if not isinstance(s, Remote)]
        assert offsets[0] >= 64 > offsets[2]


def test_only_parameters_with_gradients_are_reduced() -> None:
    layout = layouts(2)[0]
    program = reduce_scatter(layout, Topology.regular(1, 2), 0, StageSpec(64, 2, 2), [1], "bfloat16", "float32")
    assert {op.src.index for op in program.ops if isinstance(op, Copy)} == {1}
    (reduce,) = (op for op in program.ops if isinstance(op, Reduce))
    assert reduce.segments[0].dst.offset == 0


def test_nothing_to_reduce_still_keeps_the_ring_in_step() -> None:
    layout = layouts(2)[0]
    programs = [
        reduce_scatter(layout, Topology.regular(1, 2), r, StageSpec(64, 2, 2), [], "bfloat16", "float32")
        for r in (0, 1)
    ]
    assert [program.stage_pieces for program in programs] == [1, 1]
    assert all(any(isinstance(op, Wait) for op in program.ops) for program in programs)


def test_slot_reuse_needs_the_slots_dtype() -> None:
    with pytest.raises(ValueError, match="Slot-Reuse takes gradients in the slot's dtype; got float32"):
        reduce_scatter(
            layouts(2)[0], Topology.regular(1, 2), 0, StageSpec(64, 2, 2), [0], "float32", "float32", from_slot=True
        )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5), st.integers(1, 3), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([2, 4]),
    st.integers(16, 80),
)
def test_pieces_cover_each_element_once(shapes: list[tuple], lanes: int, item: int, piece_bytes: int) -> None:
    params = [
        ((rows, lanes * k, n), "float32", 1) if second else ((rows, n), "float32", 0) for rows, n, k, second in shapes
    ]
    layout = group("g", lanes, *[p for p in params if not (p[2] and not p[0][0])] or [((1,), "float32", 0)])
    order = tuple(range(len(layout.params)))
    cutting = Cutting(layout, Topology.regular(1, lanes), order, item, piece_bytes)
    covered: list[int] = []
    base = {p: sum(layout.params[q].chunk for q in order[:p]) for p in order}
    for i in range(cutting.pieces):
        used = 0
        for cut in cutting.piece(0, i):
            assert used <= cut.at and (cut.at * item % 16 == 0 or piece_bytes < 8 * item)
            used = cut.at + cut.end - cut.start
            assert used * item <= piece_bytes
            assert cut.out == base[cut.param] + cut.start
            covered += range(cut.out, cut.out + cut.end - cut.start)
    assert covered == list(range(shard_elements(layout, order)))
