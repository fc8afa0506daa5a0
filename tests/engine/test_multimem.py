"""What the last step computes where a switch adds, in the order that engines without one keep: `reference_sum`, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_machines import expect_sums, reduced, spec_for

from tide_comm.engine.base import ArenaSpec
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import Clear, Program
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
