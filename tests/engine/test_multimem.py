"""What the last step computes where a switch adds, in the order that engines without one keep: `reference_sum`, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_machines import expect_sums, reduced, spec_for

from tide_comm.engine.base import ArenaSpec
from tide_comm.engine.cuda import compile as compiled
from tide_comm.engine.cuda.compile import Compiled
from tide_comm.engine.cuda.numbers import BaseNumbers
from tide_comm.errors import TideError
from tide_comm.plan import names
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import (
    Area,
    Binding,
    Clear,
    LaneSum,
    Program,
    Reduce,
    Region,
    Remote,
    Segment,
    Source,
)
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.topology import Topology

SHAPES = [(2, 2, 2), (3, 2, 2), (3, 2, 1), (2, 4, 2), (3, 4, 4), (5, 3, 2), (7, 2, 2), (2, 8, 8)]
"""(machines, lanes, batch)."""


def case(machines: int, lanes: int, batch: int) -> tuple[GroupLayout, ArenaSpec]:
    world = machines * lanes
    params = ((5 * world, 3), (2 * world + 1, 7), (1,))
    layout = GroupLayout(
        "g", tuple(ParamLayout(f"p{i}", s, "float32", "float32", world) for i, s in enumerate(params)), world
    )
    spec = spec_for(layout, Topology.regular(machines, lanes), min(batch, machines))
    assert spec.inbox is not None
    return layout, replace(spec, inbox=replace(spec.inbox, multicast=True))


def gradients(layout: GroupLayout) -> list[list[torch.Tensor]]:
    """Magnitudes differ, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(7)

    def one(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        return values * 10.0 ** torch.randint(-3, 4, shape, generator=generator)

    return [[one(param.shape) for param in layout.params] for _ in range(layout.world)]


@pytest.mark.parametrize("machines, lanes, batch", SHAPES)
def test_sums_are_the_reference(machines: int, lanes: int, batch: int) -> None:
    """Memory begins as NaN, and launches follow one another: what is stale shows."""
    layout, spec = case(machines, lanes, batch)
    grads = gradients(layout)
    for launch, outs in enumerate(reduced(layout, spec.topology, grads, spec, 0.25)):
        expect_sums(layout, spec.topology, [[g * 2**launch for g in of_rank] for of_rank in grads], outs, 0.25)


def test_what_is_not_cleared_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_clears(*args: object, **kwargs: object) -> Program:
        program = reduce_scatter(*args, **kwargs)  # type: ignore[arg-type]
        return replace(program, ops=tuple(op for op in program.ops if not isinstance(op, Clear)))

    monkeypatch.setattr("test_machines.reduce_scatter", without_clears)
    layout, spec = case(2, 4, 2)
    grads = gradients(layout)
    (outs,) = reduced(layout, spec.topology, grads, spec, 0.25, launches=1)
    with pytest.raises(AssertionError, match="gradient"):
        expect_sums(layout, spec.topology, grads, outs, 0.25)


TOGETHER = LaneSum((0, 1), Region(Area.INBOX, 0, 64))


def lowered(source_dtype: str, *sources: Source, multicast: bool = True) -> list[dict[str, int]]:
    spec = case(2, 2, 2)[1]
    segment = Segment(sources, Region(Area.OUT, 0, 64))
    program = Program("last step", 0, (Reduce(names.FINAL, (segment,), source_dtype, "float32"),))
    made = Compiled(program, spec, lambda table: 0, lambda name: 0, False, multicast=multicast)
    return [fields for _, fields in made.rows]


def test_the_cuda_engine_takes_one_sum_of_lanes_a_segment() -> None:
    (row,) = lowered("float32", TOGETHER)
    assert (row["flags"], row["sources"]) == (compiled.MULTIMEM, 1)
    (row,) = lowered("float32", TOGETHER, multicast=False)
    assert (row["flags"], row["sources"]) == (0, 2)
    for dtype, sources in (
        ("float32", (TOGETHER, TOGETHER)),
        ("float32", (TOGETHER, Remote(1, TOGETHER.region))),
        ("bfloat16", (TOGETHER,)),
    ):
        with pytest.raises(TideError, match="one fp32 source a segment"):
            lowered(dtype, *sources)


def test_only_slots_and_inboxes_are_reached_together() -> None:
    with pytest.raises(TideError, match="no multicast address of Area.STAGE"):
        lowered("float32", LaneSum((0, 1), Region(Area.STAGE, 0, 64)))
    spec = case(2, 2, 2)[1]
    whole, part = BaseNumbers(spec, 1, True), BaseNumbers(spec, 1)
    assert whole.caller - part.caller == 3 and whole.callers == part.callers
    arenas, binding = [10 << 40, 11 << 40, 12 << 40, 13 << 40], Binding(1, 0, 1, {}, {})
    bases = whole.arena_part(arenas, binding, 99 << 40)
    assert len(bases) == whole.caller and bases[: part.caller] == part.arena_part(arenas, binding)
    slot, inbox = Region(Area.SLOT, 0, 4), [Region(Area.INBOX, 0, 4, index=k) for k in range(2)]
    assert bases[whole.of_all(slot)] - (99 << 40) == bases[whole.of(slot, 2)] - arenas[2] == spec.start(Area.SLOT, 1)
    for region in inbox:
        assert bases[whole.of_all(region)] - (99 << 40) == bases[whole.of(region, 1)] - arenas[1]
