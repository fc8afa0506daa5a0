"""The gate: hand-written programs for two machines of two lanes are accepted, and mutants of them are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.plan import programs_2x2 as hand
from tide_comm.plan import names
from tide_comm.plan.checker import CheckError
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import After, Area, Op, Program, Put, Record, Reduce, Region, Segment, Signal, Wait
from tide_comm.plan.reduce_scatter import StageSpec
from tide_comm.plan.sequence import Plans, Training

MODES = ("in_place", "slot_reuse")


def param(name: str, *shape: int, dtype: str = "bfloat16") -> ParamLayout:
    return ParamLayout(name, shape, dtype, "bfloat16", 4)


# Block boundaries inside a chunk (S = 8, 6+2), on one, and across three parameters; masters in the communicated dtype and in fp32.
LAYOUTS = (
    GroupLayout("first", (param("a", 8, 3), param("b", 8, dtype="float32")), 4),
    GroupLayout("second", (param("c", 16, 1), param("d", 4, 4)), 4),
    GroupLayout("third", (param("e", 4, 3, dtype="float32"), param("f", 8, 1), param("g", 4, 5)), 4),
)
MOST = max(hand.Slices(layout, False).shard for layout in LAYOUTS)


class HandPlans(Plans):
    def limits(self) -> dict[Area, int]:
        return super().limits() | {Area.INBOX: 2 * MOST * 4, Area.PARTIAL: MOST * 4, Area.STAGE: MOST * 2}


def plans(mode: str) -> Plans:
    return HandPlans(LAYOUTS, hand.TOPOLOGY, StageSpec(MOST * 2, hand.RING, 2), mode)


def programs(mode: str) -> Callable[[str, int, int], Program]:
    base = plans(mode)

    def make(kind: str, group: int, rank: int) -> Program:
        machine, lane = hand.TOPOLOGY.machine_of(rank), hand.TOPOLOGY.lane_of(rank)
        if kind == "all_gather":
            return hand.all_gather(LAYOUTS[group], base.shard_base(group), machine, lane)
        if kind == "reduce_scatter":
            return hand.reduce_scatter(LAYOUTS[group], machine, lane, mode == "slot_reuse")
        if kind == "prime":
            return hand.prime(machine, lane)
        return hand.vacate(machine, lane, kind == "vacate_reduced")

    return make


def run(mode: str, make: Callable[[str, int, int], Program], steps: int = 2, slots: int = 2, prefetch: int = 1) -> None:
    sequence = Training(plans(mode), slots, prefetch, make)
    for _ in range(steps):
        sequence.step()
    sequence.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("slots", "prefetch"), [(2, 1), (1, 0), (3, 2), (3, 1)])
def test_accepted(mode: str, slots: int, prefetch: int) -> None:
    run(mode, programs(mode), 2, slots, prefetch)
