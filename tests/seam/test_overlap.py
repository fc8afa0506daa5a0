"""`Report.overlap`: first units gather inside `optimizer.step`; losses and parameters stay equal to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.seam.launch import Job, Outcome, Place, run, values
from tests.seam.models import BF16_FP32, FP32, Net, sharded
from tide_comm import TideConfig, attach
from tide_comm.errors import TideError

STEPS = 5
KINDS = {
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "sgd loop": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=False),
}
MODELS = {
    "fp32": lambda: sharded(Net(), FP32),
    "bf16 parameters": lambda: sharded(Net().to(torch.bfloat16), BF16_FP32),
    "root reshards": lambda: sharded(Net(), BF16_FP32, reshard_after_forward=True),
}


def groups_of(model: nn.Module, kind: str) -> Any:
    """Two parameter groups, so that both have to be narrowed and restored."""
    some = list(model.parameters())
    return KINDS[kind]([{"params": some[::2], "weight_decay": 0.0}, {"params": some[1::2]}])


def train(
    place: Place, build: str, kind: str, comm: str, evaluate: bool = False
) -> tuple[list[torch.Tensor], dict[str, int]]:
    from tests.seam.harness import local, sum_by_reference

    torch.manual_seed(0)
    model = MODELS[build]()
    report = attach(model, TideConfig(comm=comm))
    sum_by_reference(model)
    optimizer = groups_of(model, kind)
    held = [list(group["params"]) for group in optimizer.param_groups]
    if comm == "tide":
        report.overlap(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    hooks = []
    optimizer.register_step_post_hook(lambda *unused: hooks.append("after"))
    optimizer.register_step_pre_hook(lambda *unused: hooks.append("before"))
    seen = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + place.rank)
        x = torch.randn(5, 6, generator=generator)
        if evaluate:
            with torch.no_grad():
                seen.append(model(x).sum())
        loss = model(x).float().pow(2).sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    seen += [local(p).detach().clone() for p in model.parameters()]
    assert hooks == ["before", "after"] * STEPS
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [[id(p) for p in g] for g in held]
    stats = dict(report.stats())
    report.detach()
    assert not any(
        m._get_fsdp_state()._fsdp_param_groups[0]._all_gather_result
        for m in model.modules()
        if isinstance(m, FSDPModule)
    )
    return seen, stats


def compare(place: Place, build: str, kind: str, evaluate: bool = False) -> tuple[bool, dict[str, int], dict[str, int]]:
    want, _ = train(place, build, kind, "stock", evaluate)
    got, stats = train(place, build, kind, "tide", evaluate)
    return all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), stats, {}


def refused(place: Place) -> list[str]:
    found = []
    model = sharded(Net(), FP32)
    report = attach(model, TideConfig())
    for optimizer in (
        torch.optim.LBFGS(list(model.parameters())),
        type("Mine", (torch.optim.SGD,), {})(model.parameters(), lr=0.1),
    ):
        try:
            report.overlap(optimizer)
        except TideError as error:
            found.append(str(error))
    report.detach()
    return found


CASES = [(b, k, False) for b, k in zip(MODELS, KINDS, strict=True)] + [("fp32", "adamw foreach", True)]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    here = "tests.seam.test_overlap"
    jobs = [
        Job(f"{b} {k} {e}", f"{here}:compare", {"build": b, "kind": k, "evaluate": e}, {"TIDE_POISON": "1"})
        for b, k, e in CASES
    ]
    return run(2, [*jobs, Job("refused", f"{here}:refused")])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_stock(case: tuple[str, str, bool], outcomes: dict[str, list[Outcome]]) -> None:
    for equal, stats, _ in values(outcomes[" ".join(map(str, case))]):
        assert equal
        # Forward has shown its order before the first step, so every step gathers two units ahead.
        assert stats["gathered_ahead"] == 2 * STEPS
        assert stats.get("all_gathers_stock", 0) == 0


def test_optimizers_that_look_at_several_parameters_are_refused(outcomes: dict[str, list[Outcome]]) -> None:
    for texts in values(outcomes["refused"]):
        assert len(texts) == 2
        assert "got LBFGS" in texts[0] and "got Mine" in texts[1]
