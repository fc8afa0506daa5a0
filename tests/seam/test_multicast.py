"""FSDP2 with programs that write to all lanes at once, on the host engine's stand-in for the switch: equal to stock, to the bit.

The last step over several machines adds in the order that `LaneSum` names, so the reference is `reference_sum`; a switch has no order.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.seam.launch import Job, once_a_world, values
from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import Copy, CopyAll
from tide_comm.plan.topology import Topology

ON: dict[str, Any] = {"multicast": "on", "multicast_max_bytes": 64, "head_bytes": 64, "inbox_batch": 2}
Case = tuple[str, str, int, int, int]
"""(scenario, memory mode, ranks, ranks a machine or 0 for all, seed of random delays or 0)."""


def cases() -> list[Any]:
    found = []
    for mode in ("in_place", "slot_reuse"):
        quick = [("fp32", mode, 4, 0, 0), ("reshard", mode, 4, 2, 3), ("uneven fp32", mode, 4, 2, 0)]
        slow = [("accumulate fp32", mode, 4, 2, 0), ("llama3 debug", mode, 2, 0, 0), ("llama3 debug", mode, 4, 2, 3)]
        slow += [("fp32", mode, 6, 2, 5), ("uneven fp32", mode, 6, 3, 0)]
        found += [pytest.param(case, id=name_of(case)) for case in quick]
        found += [pytest.param(case, id=name_of(case), marks=pytest.mark.slow) for case in slow]
    return found


def name_of(case: Case) -> str:
    scenario, mode, world, gpus, _ = case
    return f"{scenario} {mode} {world // (gpus or world)}x{gpus or world}".replace(" ", "-")


def job(case: Case) -> Job:
    scenario, mode, _, gpus, delays = case
    env = {"TIDE_POISON": "1"} | ({"TIDE_DELAYS": str(delays)} if delays else {})
    # Batches of one source leave a seat on each of two lanes that must be cleared.
    config = ON | ({"inbox_batch": 1} if scenario == "uneven fp32" else {})
    kwargs = {"scenario": scenario, "mode": mode, "gpus": gpus, "config": config, "steps": 4}
    return Job(name_of(case), "tests.seam.harness:compare", kwargs, env, timeout_s=180.0)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Any:
    return once_a_world(request, lambda case: case[2], job)


@pytest.mark.parametrize("case", cases())
def test_equal_to_stock(case: Case, results: Any) -> None:
    for rank, value in enumerate(values(results(case))):
        assert value["difference"] == "", f"rank {rank}: {value['difference']}"
        assert "multicast: yes (host engine: a copy to every lane" in value["printed"]
        assert value["stats"]["all_gathers"] > 0 and value["stats"]["reduce_scatters"] > 0
        assert all(comm == "tide" for _, comm, _, _ in value["rows"]), value["rows"]


def test_pieces_of_these_models_go_both_ways() -> None:
    """Of `models.Net` in fp32 on 4 ranks: 48 and 16 bytes go to all lanes at once; 128 are too many, 8 are off 16 bytes."""
    for shape, kind in (((8, 6), CopyAll), ((16,), CopyAll), ((16, 8), Copy), ((8,), Copy)):
        layout = GroupLayout("g", (ParamLayout("p", shape, "float32", "float32", 4),), 4)
        ops = all_gather(layout, Topology.regular(2, 2), 0, multicast_bytes=ON["multicast_max_bytes"]).ops
        assert {type(op) for op in ops if isinstance(op, (Copy, CopyAll))} == {kind}
