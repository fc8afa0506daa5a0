"""FSDP2 over machines that are emulated on one host (`gpus_per_machine`): equal to stock whose sums are `reference_sum`, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.seam.launch import Job, once_a_world, run, values

SMALL: dict[str, Any] = {"head_bytes": 64, "inbox_batch": 2}
"""Heads that split pieces, and several batches from three machines on."""
UNPACED: dict[str, Any] = {"head_bytes": 0, "inbox_batch": 1}
QUICK = ("reshard", "uneven", "fp32", "uneven fp32", "bf16 reduce", "accumulate fp32", "frozen", "two meshes")
"""Sums of a few bf16 values are mostly exact in fp32, whatever their order: fp32 gradients show a wrong order."""
Case = tuple[str, str, int, int, int]
"""(scenario, memory mode, ranks, ranks a machine, seed of random delays or 0)."""


def cases() -> list[Any]:
    found = []
    for mode in ("in_place", "slot_reuse"):
        found += [(name, mode, 4, 2, 0) for name in QUICK]
        found += [("uneven fp32", mode, 4, 1, 0), ("fp32", mode, 4, 2, 5), ("columns", mode, 4, 2, 0)]
        found += [("hybrid", mode, 4, 2, 0), ("hybrid", mode, 4, 1, 0)]
        found += [("uneven fp32", mode, 6, 2, 3)]
        found += [("reshard to two", mode, 4, 2, 0), ("hybrid, accumulated", mode, 4, 1, 0)]
    found += [("reset", "slot_reuse", 4, 2, 0), ("fp16 parameters", "slot_reuse", 4, 2, 0)]
    found += [("several groups", "in_place", 4, 1, 0), ("chunked loss", "in_place", 4, 2, 0)]
    slow = [
        (name, mode, world, gpus, delays)
        for mode in ("in_place", "slot_reuse")
        for world, gpus in ((6, 2), (8, 2), (8, 4), (8, 1))
        for name, delays in (("fp32", 0), ("uneven fp32", 7), ("accumulate", 0))
    ]
    slow += [
        (name, mode, 4, 2, 0)
        for mode in ("in_place", "slot_reuse")
        for name in ("unused by rank", "freeze by turns", "recompute selectively", "separate group", "last backward")
    ]
    marked = [pytest.param(case, id=name_of(case)) for case in found]
    return marked + [pytest.param(case, id=name_of(case), marks=pytest.mark.slow) for case in slow]


def name_of(case: Case) -> str:
    scenario, mode, world, gpus, delays = case
    return f"{scenario} {mode} {world // gpus}x{gpus}{' delays' if delays else ''}".replace(" ", "-").replace(",", "")


def job(case: Case) -> Job:
    scenario, mode, _, gpus, delays = case
    env = {"TIDE_POISON": "1"} | ({"TIDE_DELAYS": str(delays)} if delays else {})
    config = UNPACED if scenario == "bf16 reduce" else SMALL
    kwargs = {"scenario": scenario, "mode": mode, "gpus": gpus, "config": config, "steps": 6}
    return Job(name_of(case), "tests.seam.harness:compare", kwargs, env, timeout_s=180.0)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Any:
    return once_a_world(request, lambda case: case[2], job)


SHAPES = [(4, 2), (6, 2), (8, 2), (8, 4), (4, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "gpus"), SHAPES)
def test_llama_trains_as_on_one_machine(world: int, gpus: int) -> None:
    """In both memory modes equal to stock to the bit; and to one machine's run as far as fp32 sums in another order allow."""

    def llama(name: str, mode: str, gpus: int) -> Job:
        kwargs = {"scenario": "llama3 debug", "mode": mode, "gpus": gpus, "config": SMALL, "steps": 6}
        return Job(name, "tests.seam.harness:compare", kwargs, {"TIDE_POISON": "1"}, timeout_s=300.0)

    jobs = [llama("in_place", "in_place", gpus), llama("slot_reuse", "slot_reuse", gpus), llama("one", "in_place", 0)]
    outcomes = run(world, jobs)
    for name in ("in_place", "slot_reuse", "one"):
        for rank, value in enumerate(values(outcomes[name])):
            assert value["difference"] == "", f"{name}, rank {rank}: {value['difference']}"
            assert value["losses"][-1] < value["losses"][0] - 0.5
            assert all(comm == "tide" for _, comm, _, _ in value["rows"])
    for several, one in zip(values(outcomes["in_place"]), values(outcomes["one"]), strict=True):
        assert several["losses"] == pytest.approx(one["losses"], rel=2e-3)


def test_another_order_of_the_sum_is_noticed() -> None:
    """Stock summed machine by machine, TIDE on one machine: the comparison sees it."""
    kwargs = {"scenario": "fp32", "gpus": 2, "config": {"gpus_per_machine": 0}, "steps": 2}
    outcome = run(4, [Job("another order", "tests.seam.harness:compare", kwargs)])["another order"]
    assert any(".grad" in value["difference"] for value in values(outcome))


@pytest.mark.parametrize("case", cases())
def test_equal_to_stock(case: Case, results: Any) -> None:
    everybody = values(results(case))
    assert max(value["largest_grad"] for value in everybody) > 0
    for rank, value in enumerate(everybody):
        assert value["difference"] == "", f"rank {rank}: {value['difference']}"
        assert all(loss == loss for loss in value["losses"]) and len(set(value["losses"])) > 3
        assert value["stats"]["all_gathers"] > 0 and value["stats"]["reduce_scatters"] > 0
        assert all(comm == "tide" for _, comm, _, _ in value["rows"]), value["rows"]
