"""`early_reduce`: reduce-scatters in parts give the same bits, and what does not fit goes as a whole with its reason or is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.seam.launch import Job, Outcome, Place, run, values
from tests.seam.models import FP32, Net, sharded
from tide_comm import TideConfig, attach
from tide_comm.errors import TideError

EARLY: dict[str, Any] = {"early_reduce": True, "early_part_bytes": 64}
PARTS = (
    "uneven fp32",
    "bf16 parameters",
    "accumulate fp32",
    "unused",
    "recompute outside",
    "frozen",
    "reset",
    "fp16 parameters",
    "tied in a unit",
)
MACHINES = ("uneven fp32", "columns")
SLOW = (
    "hybrid",
    "compiled",
    "post-accumulate hooks",
    "two input buffers",
    "chunked loss",
    "optimizer in backward fp32",
)


def job(name: str, gpus: int = 0, delays: int = 0) -> Job:
    env = {"TIDE_POISON": "1"} | ({"TIDE_DELAYS": str(delays)} if delays else {})
    kwargs = {"scenario": name, "gpus": gpus, "config": EARLY, "steps": 6}
    return Job(f"{name} {gpus}", "tests.seam.harness:compare", kwargs, env, timeout_s=120.0)


def check(outcomes: list[Outcome]) -> None:
    for rank, value in enumerate(values(outcomes)):
        assert value["difference"] == "", f"rank {rank}: {value['difference']}"
        assert (value["stats"] or value["out"])["early_parts"] > 0


@pytest.fixture(scope="module")
def two() -> dict[str, list[Outcome]]:
    here = "tests.seam.test_early"
    jobs = [job(name, delays=i) for i, name in enumerate(PARTS)]
    return run(
        2,
        [
            *jobs,
            job("unused by rank"),
            Job("whole", f"{here}:whole"),
            Job("late gradient", f"{here}:late_gradient"),
            Job("twice", f"{here}:twice"),
        ],
    )


@pytest.mark.parametrize("name", PARTS)
def test_equal_to_stock(name: str, two: dict[str, list[Outcome]]) -> None:
    check(two[f"{name} 0"])


def test_units_whose_gradients_may_differ_by_rank_go_as_a_whole(two: dict[str, list[Outcome]]) -> None:
    """`set_reduce_scatter_unused_params`: one rank would send a part for which the other waits in vain."""
    for rank, value in enumerate(values(two["unused by rank 0"])):
        assert value["difference"] == "", f"rank {rank}: {value['difference']}"


def test_over_machines() -> None:
    for outcomes in run(4, [job(name, 2) for name in MACHINES]).values():
        check(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_other_ways(world: int) -> None:
    from tests.seam.scenarios import SCENARIOS

    for outcomes in run(world, [job(name) for name in SLOW if world in SCENARIOS[name].worlds]).values():
        check(outcomes)


def why(model: nn.Module, **config: Any) -> list[str]:
    report = attach(model, TideConfig(**config))
    reasons = [g.tide.early.why_whole for g in report.groups if g.tide is not None]
    text = str(report)
    report.detach()
    return [*reasons, text]


def whole(place: Place) -> dict[str, list[str]]:
    def net() -> nn.Module:
        return sharded(Net(), FP32)

    return {
        "off": why(net()),
        "on": why(net(), **EARLY),
        "large": why(net(), early_reduce=True),
        "reuse": why(net(), memory_mode="slot_reuse", **EARLY),
        "gathers": why(net(), reduce_scatter=False, **EARLY),
    }


def test_what_goes_as_a_whole_says_why(two: dict[str, list[Outcome]]) -> None:
    for found in values(two["whole"]):
        assert set(found["off"][:-1]) == {"early_reduce = false"}
        *blocks, text = found["on"]
        assert "" in blocks and "other units inside it" in blocks
        assert "other units inside it" in text and "start in parts" in text
        assert "less than two parts of early_part_bytes = 134217728" in found["large"]
        assert set(found["reuse"][:-1]) == {"Slot-Reuse: the slot still holds parameters"}
        assert set(found["gathers"][:-1]) == {"reduce_scatter = false"}
        assert "start in parts" not in found["off"][-1]


class Late(nn.Module):
    """Uses its first weight only in some steps: parts have gone when it turns out that the gradient does not come."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, all_of_it: bool) -> torch.Tensor:
        return self.third(self.second(self.first(x) if all_of_it else x))


def steps_of_late(place: Place, config: TideConfig) -> tuple[list[torch.Tensor], dict[str, int]]:
    from tests.seam.harness import local, sum_by_reference

    torch.manual_seed(0)
    model = fully_shard(Late(), mp_policy=FP32)
    report = attach(model, config)
    sum_by_reference(model)
    seen = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + place.rank)
        loss = model(torch.randn(4, 8, generator=generator), step % 2 == 0).pow(2).sum()
        loss.backward()
        seen += [torch.zeros(0) if p.grad is None else local(p.grad).clone() for p in model.parameters()]
        model.zero_grad()
    stats = dict(report.stats())
    report.detach()
    return seen, stats


def late_gradient(place: Place) -> tuple[bool, dict[str, int]]:
    want, _ = steps_of_late(place, TideConfig(comm="stock"))
    got, stats = steps_of_late(place, TideConfig(**EARLY))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(want, got, strict=True)), stats


def test_parts_have_gone_and_a_gradient_never_comes(two: dict[str, list[Outcome]]) -> None:
    for equal, stats in values(two["late gradient"]):
        assert equal
        assert stats["early_parts"] == 2 * 3 + 2 * 2 and stats["reduce_scatters"] == 4


class Twice(nn.Module):
    """A weight that gets a second gradient in the same backward, through a backward inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = checkpoint(self.second, self.first(x), use_reentrant=True)
        return checkpoint(self.second, x, use_reentrant=True)


def twice(place: Place) -> str:
    model = fully_shard(Twice(), mp_policy=FP32)
    attach(model, TideConfig(**EARLY))
    try:
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
    except TideError as error:
        return str(error)
    return ""


def test_a_second_gradient_is_an_error_that_says_what_to_do(two: dict[str, list[Outcome]]) -> None:
    for text in values(two["twice"]):
        assert "got a second gradient in one backward" in text and "Set early_reduce = false" in text
