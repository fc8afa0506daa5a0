"""How large STAGE is: by the rule, and by `stage_bytes`."""

from __future__ import annotations

import pytest

from tests.plan.blocks import BLOCKS, block
from tide_comm.config import TideConfig, TideConfigError
from tide_comm.fsdp.domain import arena_spec, stage_for
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.slices import InboxSpec, StageSpec, seat_bytes_of
from tide_comm.plan.topology import Topology

MIB = 2**20


def small(world: int, elements: int) -> GroupLayout:
    """A group whose shards are `elements` long."""
    return GroupLayout("small", (ParamLayout("p", (elements * world,), "float32", "bfloat16", world),), world)


@pytest.mark.parametrize(
    ("model", "lanes", "piece_mib"),
    [("llama", 2, 128), ("qwen3", 2, 99), ("wan", 2, 56), ("llama", 8, 19), ("qwen3", 8, 14), ("wan", 8, 8)],
)
def test_a_quarter_of_the_widest_slot(model: str, lanes: int, piece_mib: int) -> None:
    topology, layout = Topology.regular(1, lanes), block(model, lanes)
    stage = stage_for([layout, small(lanes, 64)], topology)
    assert stage == StageSpec(piece_mib * MIB, 3, lanes)
    for gathers in (True, False):
        # Without an all-gather there are no slots, and STAGE is the same.
        spec = arena_spec(topology, TideConfig(all_gather=gathers, slots=2), [], [layout])
        assert spec.stage == stage and (spec.slot_bytes > 0) == gathers
        if gathers:
            assert stage.total_bytes <= spec.slot_bytes_aligned / 4


@pytest.mark.parametrize("lanes", [2, 8])
def test_where_nothing_is_reduced_it_is_next_to_nothing(lanes: int) -> None:
    """Nor is `stage_bytes` asked then."""
    topology, layout = Topology.regular(1, lanes), block("llama", lanes)
    for stage_bytes in (0, 16):
        config = TideConfig(reduce_scatter=False, slots=2, stage_bytes=stage_bytes)
        assert arena_spec(topology, config, [], [layout]).stage.total_bytes == 3 * 512 * (lanes - 1)
    with pytest.raises(TideConfigError, match="takes 0 .a rule. or at least"):
        arena_spec(topology, TideConfig(slots=2, stage_bytes=16), [], [layout])
    with pytest.raises(TideConfigError, match=r"stage_bytes = 15: takes 0 \(a rule\) or at least 16$"):
        TideConfig(stage_bytes=15)


def test_the_other_limits_hold() -> None:
    huge = 2**32
    assert stage_for([small(2, huge)], Topology.regular(1, 2)) == StageSpec(128 * MIB, 3, 2)
    assert stage_for([small(8, huge)], Topology.regular(1, 8)) == StageSpec(36 * MIB, 3, 8)


@pytest.mark.parametrize("lanes", [2, 3, 8])
def test_small_groups_have_a_mib_a_place_or_the_widest_slice(lanes: int) -> None:
    """A quarter of their slot would be next to nothing."""
    topology = Topology.regular(1, lanes)
    stage = stage_for([small(lanes, 2**19)], topology)
    assert MIB - 512 * lanes < stage.place_bytes <= MIB and stage.piece_bytes % 512 == 0
    assert stage_for([small(lanes, 128)], topology) == StageSpec(512, 3, lanes)


@pytest.mark.parametrize("model", BLOCKS)
def test_over_several_machines_pieces_are_slices(model: str) -> None:
    topology, layout = Topology.regular(8, 8), block(model, 64)
    assert stage_for([layout], topology) == StageSpec(
        min(64 * MIB, -(-seat_bytes_of([layout], topology) // 512) * 512), 2, 8
    )


def test_stage_bytes_is_the_limit_instead() -> None:
    for machines, lanes, ring in ((1, 2, 3), (1, 8, 3), (2, 2, 2), (8, 8, 2)):
        topology = Topology.regular(machines, lanes)
        layout = block("llama", topology.world)
        for nbytes in (4000, 1_000_000, 100 * MIB):
            stage = stage_for([layout], topology, nbytes)
            assert stage.ring == ring and nbytes - 512 * ring * lanes < stage.total_bytes <= nbytes
            assert stage.piece_bytes % 16 == 0
    pair, layout = Topology.regular(1, 2), block("llama", 2)
    assert stage_for([layout], pair, 768 * MIB) == StageSpec(256 * MIB, 3, 2), "more than the rule gives"
    assert stage_for([small(2, 128)], pair, 768 * MIB) == StageSpec(512, 3, 2), "not more than a slice"
    alone = Topology.regular(2, 1)
    assert stage_for([small(2, 128)], alone, 1) == stage_for([small(2, 128)], alone), "no other lane, no STAGE"


@pytest.mark.parametrize(
    ("machines", "lanes", "least"),
    [(1, 2, 3 * 16), (1, 8, 3 * 7 * 16), (2, 2, 2 * 16), (2, 4, 2 * 3 * 16), (2, 8, 2 * 7 * 32), (3, 5, 2 * 4 * 32)],
)
def test_the_least_that_plans_take(machines: int, lanes: int, least: int) -> None:
    """Gradients in fp32 are the widest that TIDE reduces."""
    topology = Topology.regular(machines, lanes)
    layout = small(topology.world, 128)
    stage = stage_for([layout], topology, least)
    assert stage.total_bytes == least
    inbox = InboxSpec(seat_bytes_of([layout], topology), 2, lanes) if machines > 1 else None
    for dtype in ("float32", "bfloat16"):
        assert reduce_scatter(layout, topology, 0, stage, [0], dtype, "float32", inbox=inbox).stage_pieces > machines
    with pytest.raises(TideConfigError) as error:
        stage_for([layout], topology, least - 1)
    found = f"tide.stage_bytes = {least - 1}: takes 0 (a rule) or at least {least} with {machines} x {lanes} GPUs: "
    assert str(error.value).startswith(found) and str(error.value).endswith("bytes. Set it higher, or to 0")


def test_numbers_that_are_none() -> None:
    with pytest.raises(TideConfigError, match="tide.stage_bytes = -1: takes a number >= 0"):
        TideConfig(stage_bytes=-1)
