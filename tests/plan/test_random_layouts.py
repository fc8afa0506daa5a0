"""Random groups, rank tables, rings and pieces: whatever the layout, the generated sequences are accepted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.sequence import Plans, check_training
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology


@st.composite
def params(draw: st.DrawFn, world: int, name: str) -> ParamLayout:
    dims = draw(st.integers(0, 3))
    shape = [draw(st.integers(1, 5)) for _ in range(dims)]
    dim = draw(st.integers(0, dims - 1)) if dims else 0
    if dims:
        shape[dim] = world * draw(st.integers(1, 2)) if dim else draw(st.integers(0, 3 * world))
    return ParamLayout(name, tuple(shape), draw(st.sampled_from(["float32", "bfloat16"])), "bfloat16", world, dim)


@st.composite
def random_plans(draw: st.DrawFn) -> Plans:
    world = draw(st.sampled_from([1, 2, 2, 3, 4, 5]))
    groups = [
        GroupLayout(f"g{g}", tuple(draw(params(world, f"g{g}p{p}")) for p in range(draw(st.integers(1, 3)))), world)
        for g in range(3)
    ]
    stage = StageSpec(draw(st.integers(16, 96)), draw(st.integers(1, 4)), world)
    ranks = draw(st.permutations(range(world)))
    mode = draw(st.sampled_from(["in_place", "slot_reuse"]))
    grad_dtype = "bfloat16" if mode == "slot_reuse" else draw(st.sampled_from(["bfloat16", "float32"]))
    return Plans(
        groups, Topology((tuple(ranks),)), stage, mode, grad_dtype, draw(st.sampled_from(["float32", "bfloat16"]))
    )


@settings(max_examples=40, deadline=None)
@given(random_plans(), st.integers(0, 2), st.integers(0, 1))
def test_random_layouts_are_accepted(plans: Plans, prefetch: int, spare_slots: int) -> None:
    check_training(plans, steps=2, slots=prefetch + 1 + spare_slots, prefetch=prefetch)
