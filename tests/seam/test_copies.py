"""Copies of what TIDE holds, and calls that FSDP2 refuses once it does: as on stock, without sharing anything."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.seam import steps
from tests.seam.harness import Run, local, sum_by_reference
from tests.seam.launch import Job, Outcome, Place, run, values
from tests.seam.models import FP32, sharded
from tests.seam.refusals import REFUSALS
from tide_comm import TideConfig, TideError, attach

HERE = "tests.seam.test_copies"


def made(place: Place, side: str) -> Run:
    """Trained for a step. With fp32 shards live in the arena: what is copied is arena memory."""
    torch.manual_seed(0)
    run = Run(place, side, sharded(policy=FP32))
    if side == "tide":
        run.report = attach(run.model, TideConfig())
    else:
        sum_by_reference(run.model)
    run.optim = steps.LocalAdam(run.model)
    steps.plain(run, 0)
    return run


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except (AssertionError, TideError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def copies(place: Place) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for side in ("stock", "tide"):
        run = made(place, side)
        model = run.model
        seen[side] = {
            "model": raised(lambda model=model: copy.deepcopy(model)),
            "unit": raised(lambda model=model: copy.deepcopy(model.blocks[0])),
        }
        model.reshard()
        layer, parameter = copy.deepcopy(model.blocks[0].up), copy.deepcopy(model.scale)
        state = copy.deepcopy(model.state_dict())
        saved = io.BytesIO()
        torch.save({name: local(t) for name, t in model.state_dict().items()}, saved)
        seen[side]["saved bytes"] = saved.getbuffer().nbytes
        equal = torch.equal(local(layer.weight), local(model.blocks[0].up.weight))
        equal &= all(torch.equal(local(state[name]), local(p)) for name, p in model.named_parameters())
        assert equal and type(parameter) is type(model.scale)
        kept = {name: local(t).clone() for name, t in state.items()}
        weight = local(layer.weight).clone()
        for step in (1, 2):
            steps.plain(run, step)
        model.reshard()
        apart = all(torch.equal(local(state[name]), t) for name, t in kept.items())
        assert apart and torch.equal(local(layer.weight), weight), "a copy follows training"
        assert not torch.equal(local(model.blocks[0].up.weight), weight)
        if run.report is not None:
            # The copies outlive the arena.
            run.report.detach()
            assert all(torch.equal(local(state[name]), t) for name, t in kept.items())
        seen[side]["trained"] = {name: local(p).detach().clone() for name, p in model.named_parameters()}
    trained = [seen[side].pop("trained") for side in ("stock", "tide")]
    seen["differ"] = [name for name in trained[0] if not torch.equal(trained[0][name], trained[1][name])]
    return seen


def refused(place: Place) -> dict[str, str]:
    run = made(place, "tide")
    model = run.model
    seen = {
        "symm_mem": raised(lambda: model.set_symm_mem_for_comm()),
        "process group": raised(lambda: model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)),
    }
    steps.plain(run, 1)
    run.model = nn.Module.bfloat16(model)
    seen["dtype"] = raised(lambda: steps.loss_of(run, 2))
    return seen


@pytest.fixture(scope="module")
def results() -> dict[str, list[Outcome]]:
    return run(2, [Job(name, f"{HERE}:{name}", env={"TIDE_POISON": "1"}) for name in ("copies", "refused")])


def test_copies_are_apart_and_units_are_refused(results: dict[str, list[Outcome]]) -> None:
    for value in values(results["copies"]):
        assert value["tide"] == value["stock"]
        REFUSALS["deepcopy"].check(value["tide"]["model"])
        REFUSALS["deepcopy"].check(value["tide"]["unit"])
        assert value["differ"] == []


def test_calls_that_come_too_late(results: dict[str, list[Outcome]]) -> None:
    for value in values(results["refused"]):
        for name in ("symm_mem", "process group"):
            assert value[name].startswith("AssertionError")
            REFUSALS["setters"].check(value[name])
        assert value["dtype"].startswith("TideError")
        REFUSALS["dtype"].check(value["dtype"])
