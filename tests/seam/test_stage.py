"""`stage_bytes`: with a STAGE of a few elements reduce-scatters give the same bits; one that is too small is an error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.seam.launch import Job, Outcome, Place, run, values
from tests.seam.models import FP32, Net, sharded
from tide_comm import TideConfig, TideConfigError, attach

SCENARIOS = ("uneven fp32", "bf16 parameters", "accumulate fp32")
LEAST = {2: 3 * 16, 4: 2 * 16}
"""By ranks: of one machine, and of two with two lanes each."""


def job(name: str, mode: str, world: int, **config: Any) -> Job:
    kwargs = {"scenario": name, "mode": mode, "gpus": 2, "config": {"stage_bytes": LEAST[world], **config}, "steps": 4}
    env = {"TIDE_POISON": "1", "TIDE_DELAYS": "1"}
    return Job(f"{name} {mode}", "tests.seam.harness:compare", kwargs, env, timeout_s=120.0)


def attached(place: Place) -> dict[str, Any]:
    """What STAGE is as small as can be, the error one byte below, and whether the model can be attached after that."""
    gpus, least = 2, LEAST[place.world]
    model = sharded(Net(), FP32)
    error = ""
    try:
        attach(model, TideConfig(stage_bytes=least - 1, gpus_per_machine=gpus))
    except TideConfigError as raised:
        error = str(raised)
    report = attach(model, TideConfig(stage_bytes=least, gpus_per_machine=gpus))
    (stage,) = {group.tide.domain.spec.stage.total_bytes for group in report.groups if group.tide is not None}
    report.detach()
    return {"error": error, "stage": stage}


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    world = request.param
    jobs = [job(name, mode, world) for name in SCENARIOS for mode in ("in_place", "slot_reuse")]
    return run(world, [*jobs, Job("attached", "tests.seam.test_stage:attached")])


def test_equal_to_stock(results: dict[str, list[Outcome]]) -> None:
    for name in results.keys() - {"attached"}:
        for rank, value in enumerate(values(results[name])):
            assert value["difference"] == "", f"{name}, rank {rank}: {value['difference']}"
            assert value["stats"]["reduce_scatters"] > 0


def test_too_small_is_an_error_before_anything_is_made(results: dict[str, list[Outcome]]) -> None:
    everybody = values(results["attached"])
    least = LEAST[len(everybody)]
    for value in everybody:
        assert f"tide.stage_bytes = {least - 1}: takes 0 (a rule) or at least {least} with" in value["error"]
        assert value["stage"] == least
