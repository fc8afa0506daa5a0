"""What programs cost: counts of small ones by hand, and those of the three models' blocks against their limits."""

from __future__ import annotations

import pytest

from tests.plan import programs_2x2 as hand
from tests.plan.blocks import BLOCKS, block
from tests.plan.test_programs_2x2 import LAYOUTS
from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.layout import GroupLayout, ParamLayout, align
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.shape import ProgramShape, RoundShape, round_shapes, shape_of
from tide_comm.plan.slices import InboxSpec, StageSpec, seat_bytes_of
from tide_comm.plan.topology import Topology

GROUP = LAYOUTS[1]
"""Chunks of 12 bytes (bf16) and of 4 bytes (fp32 masters, bf16 on the way); the head of 10 bytes splits the first."""


def test_all_gather_by_hand() -> None:
    program = hand.all_gather(GROUP, 0, 0, 0)
    assert shape_of(program) == ProgramShape(
        operations=34,
        streams=("compute", "own", "push", "rail", "confirm", "arrive"),
        copies=5,  # two own pieces; of the rail peer's the head, the rest of that piece, and the other
        copies_2d=0,
        copy_batches=3,
        copies_to_all=0,
        puts=3,
        signals=3,
        waits=9,
        events=11,
        tags=2,
        casts=1,
        cast_segments=2,
        sums=0,
        sum_segments=0,
        clears=0,
        bytes_to_mates={1: 32},
        bytes_to_all=0,
        bytes_read_from_mates={},
        bytes_on_rail=16,
        rail_peers=1,
        stage_pieces=0,
        inbox_batches=0,
    )
    assert round_shapes(program, GROUP, hand.TOPOLOGY) == (RoundShape(1, 2, 3, 1, 16, 10),)


def test_reduce_scatter_by_hand() -> None:
    """Shards of 8 elements in halves of 4; the second half has cuts of both parameters."""
    shape = shape_of(hand.reduce_scatter(GROUP, 0, 0, from_slot=False))
    assert (shape.copies, shape.copies_2d, shape.copy_batches, shape.puts) == (6, 0, 2, 2)
    assert (shape.casts, shape.sums, shape.sum_segments, shape.kernels) == (0, 5, 8, 5)
    assert shape.bytes_to_mates == {1: 2 * 8 * 2} and shape.link_bytes == 32
    assert (
        shape.bytes_read_from_mates == {1: 2 * 4 * 4} and shape.link_read_bytes == 32
    )  # two blocks, the other two are its own
    assert shape.bytes_on_rail == 8 * 4 and shape.rail_peers == 1
    assert (shape.stage_pieces, shape.inbox_batches) == (2, 1)
    copied = shape_of(hand.reduce_scatter(GROUP, 0, 0, from_slot=True))
    assert (copied.casts, copied.cast_segments, copied.kernels) == (1, 2, 6)


def test_what_stands_on_other_streams_does_not_part_a_batch() -> None:
    program = hand.all_gather(GROUP, 0, 0, 0)
    copies = [i for i, op in enumerate(program.ops) if op.stream == "push" and type(op).__name__ == "Copy"]
    between = program.ops[: copies[0] + 1] + program.ops[:1] + program.ops[copies[0] + 1 :]
    assert shape_of(type(program)("x", 0, between)).copy_batches == 3


def test_generated_rounds() -> None:
    """Six machines: 1 + 2 + 2 machines' pieces. A head of 20 bytes takes a piece of 12 and splits the next in the first round."""
    topology = Topology.regular(6, 2)
    group = GroupLayout("g", tuple(ParamLayout(n, (72,), "bfloat16", "bfloat16", 12) for n in "ab"), 12)
    program = all_gather(group, topology, 3, head_bytes=20)
    assert round_shapes(program, group, topology) == (
        RoundShape(1, 2, 2, 1, 24, 12),  # 8 bytes of room are less than the 16 at which pieces are cut
        RoundShape(2, 4, 4, 1, 48, 12),
        RoundShape(2, 4, 4, 1, 48, 12),
    )
    shape = shape_of(program)
    assert shape.bytes_on_rail == 5 * 24 and shape.rail_peers == 3
    assert shape.bytes_to_mates == {2: 6 * 24}
    one = Topology.regular(1, 12)
    assert round_shapes(all_gather(group, one, 0), group, one) == ()
    assert set(shape_of(all_gather(group, one, 0)).bytes_to_mates) == set(range(1, 12))


MACHINES = LANES = 8


def reduced(layout: GroupLayout, topology: Topology, rank: int, mode: str) -> ProgramShape:
    """As an arena for this group alone would run it."""
    inbox = InboxSpec(align(seat_bytes_of([layout], topology)), min(8, topology.machines), topology.lanes)
    stage = StageSpec(64 * 2**20, 2, topology.lanes)
    params = range(len(layout.params))
    program = reduce_scatter(
        layout, topology, rank, stage, params, "bfloat16", "float32", mode == "slot_reuse", inbox=inbox
    )
    return shape_of(program)


@pytest.mark.parametrize("mode", ["in_place", "slot_reuse"])
@pytest.mark.parametrize(("model", "most", "found"), [("llama", 128, 112), ("qwen3", 152, 133), ("wan", 272, 232)])
def test_copies_of_a_reduce_scatter_at_8_x_8(model: str, most: int, found: int, mode: str) -> None:
    """The design's limits, and what the generator needs on the worst of all lanes."""
    topology = Topology.regular(MACHINES, LANES)
    layout = block(model, topology.world)
    shapes = [reduced(layout, topology, rank, mode) for rank in range(topology.world)]
    worst = max(shape.copies for shape in shapes)
    assert worst <= most
    assert worst == found, "better or worse than it was: say so in docs/log.md"
    for shape in shapes:
        assert (shape.puts, shape.sums, shape.inbox_batches) == (7, 9, 1)
        assert shape.casts == (mode == "slot_reuse")


@pytest.mark.parametrize(("model", "found"), [("llama", (336, 66)), ("qwen3", (455, 87)), ("wan", (1092, 192))])
def test_copies_and_puts_of_an_all_gather_at_8_x_8(model: str, found: tuple[int, int]) -> None:
    """On the worst lane. Machines that run past the last one in a round take a second copy of rows."""
    topology = Topology.regular(MACHINES, LANES)
    layout = block(model, topology.world)
    shapes = [shape_of(all_gather(layout, topology, rank, head_bytes=8 * 2**20)) for rank in range(topology.world)]
    assert (max(shape.copies for shape in shapes), max(shape.puts for shape in shapes)) == found
    assert {(shape.kernels, shape.copy_batches) for shape in shapes} == {(1, 13)}


@pytest.mark.parametrize("model", BLOCKS)
def test_bytes_at_8_x_8(model: str) -> None:
    """All-gather: each lane puts its chunks to 7 machines, and pushes what its rail collected to each mate. Reduce-scatter: a mate gets
    its slice of 8 machines in bf16, the rail 7 fp32 slices (2/L of raw bf16); slices are padded to whole blocks."""
    topology = Topology.regular(MACHINES, LANES)
    layout = block(model, topology.world)
    chunks = sum(param.chunk for param in layout.params)
    gathered = shape_of(all_gather(layout, topology, 0, head_bytes=8 * 2**20))
    assert gathered.bytes_on_rail == (MACHINES - 1) * chunks * 2
    assert gathered.bytes_to_mates == dict.fromkeys(range(1, LANES), MACHINES * chunks * 2)
    assert gathered.kernels == 1
    shape = reduced(layout, topology, 0, "in_place")
    assert shape.bytes_on_rail == pytest.approx((MACHINES - 1) * chunks * 4, rel=1e-4)
    # Wan's modulation is rank 0's alone: the others' chunks of it are padding, which nobody pushes.
    assert shape.link_bytes == pytest.approx(MACHINES * chunks * 2, rel=0.01)
    assert shape.link_read_bytes == pytest.approx(MACHINES * chunks * 4 / LANES, rel=0.01)


@pytest.mark.parametrize(
    ("model", "blocks", "gathers_gib", "partials_gib"),
    [("llama", 80, 28.5, 28.8), ("qwen3", 48, 12.4, 12.4), ("wan", 40, 5.8, 5.9)],
)
def test_blocks_make_up_most_of_a_step_on_the_rail(
    model: str, blocks: int, gathers_gib: float, partials_gib: float
) -> None:
    """Of a network line's bytes a step (embeddings and heads included) as computed from the models' sizes alone."""
    topology = Topology.regular(MACHINES, LANES)
    layout = block(model, topology.world)
    gathered = 2 * blocks * shape_of(all_gather(layout, topology, 0)).bytes_on_rail / 2**30
    partials = blocks * reduced(layout, topology, 0, "in_place").bytes_on_rail / 2**30
    assert 0.95 * gathers_gib < gathered <= 1.02 * gathers_gib
    assert 0.95 * partials_gib < partials <= 1.02 * partials_gib
