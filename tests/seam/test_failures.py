"""When something goes wrong: one message on every surviving rank that names who, what and where; never a hang, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from torch import nn

from tests.seam import steps
from tests.seam.harness import Run
from tests.seam.launch import Job, Outcome, Place, run, values
from tests.seam.models import FP16_REDUCE, Net, sharded
from tests.seam.refusals import REFUSALS
from tide_comm import TideConfig, TideError, attach

HERE = "tests.seam.test_failures"
AT_ONCE_S = 5.0
"""A dead peer is noticed within this, on a busy machine."""


def made(place: Place, model: nn.Module | None = None, **config: Any) -> Run:
    run = Run(place, "tide", model or sharded())
    run.report = attach(run.model, TideConfig(**config))
    run.optim = steps.LocalAdam(run.model)
    return run


def what_is_raised(function: Any) -> dict[str, Any]:
    """The `TideError` in words, and how long it took."""
    started = time.monotonic()
    try:
        function()
    except TideError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    return {"error": "", "seconds": time.monotonic() - started}


def peer_dies(place: Place, where: str, mode: str = "in_place") -> dict[str, Any]:
    """Rank 1 is killed before its forward or its backward of step 2."""
    run = made(place, timeout_s=60.0, memory_mode=mode)
    for step in range(2):
        steps.plain(run, step)

    def rest() -> None:
        if place.rank == 1 and where == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = steps.loss_of(run, 2)
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()

    return what_is_raised(rest)


def peer_stalls(place: Place) -> dict[str, Any]:
    """Rank 1 sleeps for longer than timeout_s."""
    run = made(place, timeout_s=3.0)
    steps.plain(run, 0)

    def rest() -> None:
        if place.rank == 1:
            time.sleep(6.0)
        steps.plain(run, 1)
        steps.plain(run, 2)

    return what_is_raised(rest)


def other_parameters(
    place: Place, whole_unit: bool, others: tuple[int, ...] = (1,), gpus: int = 0, mode: str = "in_place"
) -> dict[str, Any]:
    """The ranks `others` leave out a layer, or a whole unit, that the rest uses. `gpus`: emulate machines of so many ranks."""
    run = made(place, sharded(Net(extra=True)), timeout_s=6.0, gpus_per_machine=gpus, memory_mode=mode)
    # A failed backward leaves unsharded parameters in the modules; the optimizer has the sharded ones.
    before = [p._local_tensor.clone() for p in run.optim.params]
    if whole_unit:
        run.model.skip = (1,) if place.rank in others else ()
    else:
        run.model.blocks[1].use_extra = 1 if place.rank in others else 2
    raised = what_is_raised(lambda: [steps.plain(run, step) for step in range(2)])
    after = [p._local_tensor for p in run.optim.params]
    raised["changed"] = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return raised


def no_backward(place: Place) -> dict[str, Any]:
    """Rank 1's first loss does not depend on the model: it reduces nothing and goes on to the next step."""
    run = made(place, timeout_s=3.0)

    def train() -> None:
        loss = steps.loss_of(run, 0)
        if place.rank != 1:
            loss.backward()
        steps.plain(run, 1)

    return what_is_raised(train)


def other_config(place: Place) -> dict[str, Any]:
    model = sharded()
    return what_is_raised(lambda: attach(model, TideConfig(max_group_params=255 + (place.rank == 1))))


def other_model(place: Place) -> dict[str, Any]:
    model = sharded(Net(hidden=24 if place.rank == 1 else 16))
    return what_is_raised(lambda: attach(model))


def fewer_blocks(place: Place) -> dict[str, Any]:
    model = sharded(Net(blocks=2 if place.rank == 1 else 3))
    return what_is_raised(lambda: attach(model))


def strict(place: Place) -> dict[str, Any]:
    """strict refuses; the model is untouched and trains on stock, and attaches without strict."""
    model = sharded(per_block=lambda i: {"mp_policy": FP16_REDUCE} if i == 1 else {})
    raised = what_is_raised(lambda: attach(model, TideConfig(strict=True)))
    run = Run(place, "tide", model, optim=steps.LocalAdam(model))
    steps.plain(run, 0)
    run.report = attach(model, TideConfig())
    steps.plain(run, 1)
    raised["comms"] = [g.comm for g in run.report.groups]
    return raised


def untested_version(place: Place) -> dict[str, Any]:
    torch.__version__ = "2.99.0"
    model = sharded()
    return what_is_raised(lambda: attach(model))


def without_a_gpu(place: Place) -> dict[str, Any]:
    model = sharded()
    return what_is_raised(lambda: attach(model, TideConfig(comm="symm_mem")))


ONE_LAUNCH = {
    "config": Job("config", f"{HERE}:other_config"),
    "model": Job("model", f"{HERE}:other_model"),
    "blocks": Job("blocks", f"{HERE}:fewer_blocks"),
    "strict": Job("strict", f"{HERE}:strict"),
    "symm_mem": Job("symm_mem", f"{HERE}:without_a_gpu"),
}


@pytest.fixture(scope="module")
def together() -> dict[str, list[Outcome]]:
    """Errors that leave the process group in order share a launch."""
    return run(3, list(ONE_LAUNCH.values()))


def alone(world: int, function: str, **kwargs: Any) -> list[Outcome]:
    """A launch of its own, for failures after which nothing can go on."""
    return run(world, [Job("it", f"{HERE}:{function}", kwargs)])["it"]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize(
    ("where", "mode"), [("forward", "in_place"), ("backward", "in_place"), ("backward", "slot_reuse")]
)
def test_survivors_name_the_dead(where: str, mode: str) -> None:
    before = shared_memory()
    outcomes = alone(3, "peer_dies", where=where, mode=mode)
    assert "exit code -9" in outcomes[1].error
    for rank in (0, 2):
        assert not outcomes[rank].error, outcomes[rank].error
        message, seconds = outcomes[rank].value["error"], outcomes[rank].value["seconds"]
        assert "rank 1 (machine 0, lane 1)" in message, message
        assert re.search(r"all-gather|reduce-scatter|all_gather|reduce_scatter", message), message
        assert "root" in message or "blocks." in message, message
        REFUSALS["dead"].check(message)
        assert seconds < AT_ONCE_S, f"{seconds} s: {message}"
    assert shared_memory() <= before


def test_a_stalled_rank_ends_in_the_timeout() -> None:
    outcomes = values(alone(2, "peer_stalls"))
    REFUSALS["stalled"].check(outcomes[0]["error"])
    assert "timeout_s = 3" in outcomes[0]["error"] and "rank 1" in outcomes[0]["error"], outcomes[0]
    assert 2.5 < outcomes[0]["seconds"] < 3 + AT_ONCE_S
    assert outcomes[1]["error"], "the rank that slept goes on alone"


MACHINES_DISAGREE = {"others": (2, 3), "gpus": 2}
"""Two machines of two ranks: within each all agree."""


@pytest.mark.parametrize("whole_unit", [False, True])
@pytest.mark.parametrize("machines", [False, True])
def test_ranks_with_other_gradients_all_raise(whole_unit: bool, machines: bool) -> None:
    world, chosen = (4, MACHINES_DISAGREE) if machines else (3, {})
    for value in values(alone(world, "other_parameters", whole_unit=whole_unit, **chosen)):
        REFUSALS["other parameters"].check(value["error"])
        assert value["changed"] == 0, "an optimizer stepped on wrong gradients"
        assert value["seconds"] < 6.0 + AT_ONCE_S


def test_a_rank_without_any_gradient_makes_all_raise() -> None:
    """It is in another collective, or in none until the others' time is up."""
    for rank, value in enumerate(values(alone(3, "no_backward"))):
        assert value["error"] and value["seconds"] < 3.0 + AT_ONCE_S, value
        if rank != 1:
            assert "rank 1 (machine 0, lane 1)" in value["error"], value


def test_other_config_names_rank_and_field(together: dict[str, list[Outcome]]) -> None:
    for value in values(together["config"]):
        REFUSALS["config"].check(value["error"])
        assert "max_group_params=256" in value["error"], value


@pytest.mark.parametrize("name", ["model", "blocks"])
def test_other_model_names_rank_and_difference(name: str, together: dict[str, list[Outcome]]) -> None:
    wanted = {"model": "24", "blocks": "no such group"}[name]
    for value in values(together[name]):
        REFUSALS["config"].check(value["error"])
        assert wanted in value["error"], value


def test_strict_names_group_and_reason(together: dict[str, list[Outcome]]) -> None:
    for value in values(together["strict"]):
        REFUSALS["strict"].check(value["error"])
        assert "blocks.1" in value["error"] and "float16" in value["error"], value
        assert sorted(value["comms"]) == ["stock", "tide", "tide", "tide"]


def test_symmetric_memory_without_a_gpu(together: dict[str, list[Outcome]]) -> None:
    for value in values(together["symm_mem"]):
        REFUSALS["symm_mem"].check(value["error"])
        assert "\n" not in value["error"]


def test_untested_version_is_one_clear_error() -> None:
    for value in values(alone(2, "untested_version")):
        REFUSALS["version"].check(value["error"])
        assert "2.99.0" in value["error"] and "2.13" in value["error"] and "\n" not in value["error"], value


def test_drift_names_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from tide_comm.fsdp import guard

    guard.check()
    with monkeypatch.context() as patch:
        patch.setattr(collectives, "foreach_all_gather", lambda params, group, new_argument: None)
        with pytest.raises(TideError, match=r"foreach_all_gather.*new_argument"):
            guard.check()
    with monkeypatch.context() as patch:
        patch.setattr(param_group.FSDPParamGroup, "post_backward", lambda self, *unused: None)
        with pytest.raises(TideError, match=r"post_backward"):
            guard.check()
    with monkeypatch.context() as patch:
        patch.delattr(collectives, "foreach_reduce_scatter_copy_in")
        with pytest.raises(TideError, match=r"foreach_reduce_scatter_copy_in"):
            guard.check()
    guard.check()


def test_a_model_without_fsdp() -> None:
    with pytest.raises(TideError) as raised:
        attach(nn.Linear(2, 2))
    REFUSALS["no unit"].check(str(raised.value))


def test_a_script_ends_non_zero_when_its_peer_is_killed(tmp_path: Path) -> None:
    before = shared_memory()
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.seam.crash", str(rank), "2", str(tmp_path / "store")],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[1].wait(timeout=60) == -signal.SIGKILL
        out, err = ranks[0].communicate(timeout=20)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[0].returncode == 1 and "never reached" not in out, (ranks[0].returncode, out)
    assert "TideError" in err and "rank 1 (machine 0, lane 1)" in err, err
    assert shared_memory() <= before
