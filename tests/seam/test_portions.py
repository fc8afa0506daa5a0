"""Casts in portions, however little there is to cast: the same bits as stock FSDP2, with random delays."""

from __future__ import annotations

from typing import Any

import pytest

from tests.seam import harness
from tests.seam.launch import Job, Outcome, Place, once_a_world, values
from tide_comm.plan import portions
from tide_comm.plan.program import Cast

CASES = [
    (name, mode, world)
    for name in ("uneven", "columns", "accumulate", "no reshard")
    for mode in ("in_place", "slot_reuse")
    for world in (2, 4)
    if world == 2 or name == "uneven"
]
"""(scenario, memory mode, ranks)."""


def in_portions(place: Place, **kwargs: Any) -> dict[str, Any]:
    """`harness.compare`, and how many kernels cast in the all-gather with most."""
    from tide_comm.fsdp import group

    before, make = (portions.LEAST_BYTES, portions.ALIGN_BYTES), group.all_gather
    casts = 0

    def counted(*args: Any) -> Any:
        nonlocal casts
        program = make(*args)
        casts = max(casts, sum(isinstance(op, Cast) for op in program.ops))
        return program

    (portions.LEAST_BYTES, portions.ALIGN_BYTES), group.all_gather = (0, 16), counted
    try:
        return {**harness.compare(place, **kwargs), "casts": casts}
    finally:
        (portions.LEAST_BYTES, portions.ALIGN_BYTES), group.all_gather = before, make


def job(case: tuple[str, str, int]) -> Job:
    name, mode, world = case
    kwargs = {"scenario": name, "mode": mode, "steps": 4}
    env = {"TIDE_POISON": "1", "TIDE_DELAYS": str(world)}
    return Job(f"{name} {mode}", "tests.seam.test_portions:in_portions", kwargs, env, timeout_s=120.0)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Any:
    return once_a_world(request, lambda case: case[2], job)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_stock(case: tuple[str, str, int], outcomes: Any) -> None:
    found: list[Outcome] = outcomes(case)
    for rank, value in enumerate(values(found)):
        assert value["difference"] == "", f"rank {rank}: {value['difference']}"
        assert value["casts"] > 1 and value["stats"]["all_gathers"] > 0
