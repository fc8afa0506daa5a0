"""What is run when: microbatches, all-gathers, recomputation, compilation, and steps that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.seam import steps
from tests.seam.harness import Run
from tests.seam.launch import Place
from tests.seam.models import BF16_BF16, BF16_FP32, FP32, Net, sharded
from tests.seam.scenarios.registry import device, under

add = under("Accumulation")
ROW = "`set_requires_gradient_sync(False)` for all microbatches but the last"
add(ROW, "accumulate", core=True, step=steps.accumulate, copies=False)
add(ROW, "accumulate fp32", lambda place: sharded(policy=FP32), step=steps.accumulate, copies=None)
ROW = "Every microbatch reduced; `set_is_last_backward`"
add(ROW, "accumulate synced", step=steps.accumulate_synced)
add(ROW, "accumulate synced bf16", lambda place: sharded(policy=BF16_BF16), step=steps.accumulate_synced)


def last_backward(run: Run, step: int) -> None:
    for k in range(3):
        run.model.set_is_last_backward(k == 2)
        loss = steps.loss_of(run, step, k)
        loss.backward()
        run.note_loss(step, loss, k)
    steps.update(run, step)


add(ROW, "last backward", step=last_backward, steps=8)
add("Two forwards before one backward", "two forwards", step=steps.two_forwards)

add = under("Order of all-gathers")


def prefetching(depth: int) -> Callable[[Place], nn.Module]:
    def build(place: Place) -> nn.Module:
        model = sharded(Net(blocks=5))
        blocks = list(model.blocks)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + depth])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - depth) : i][::-1])
        return model

    return build


ROW = "`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`"
add(ROW, "prefetch two", prefetching(2), core=True)
add(
    "Prefetching deeper than `slots` allows",
    "prefetch three, two slots",
    prefetching(3),
    config={"slots": 2},
    stock_all_gathers=True,
    why="those that find all slots taken run on stock",
    copies=None,
)
add(
    ROW,
    "prefetch in vain",
    prefetching(1),
    step=steps.prefetch_in_vain,
    config={"slots": 5},
    copies=None,
)
ROW = "`unshard()` and `reshard()` by hand, with and without `async_op`; `_set_unshard_async_op`"
add(ROW, "unshard by hand", step=steps.unshard_api, copies=None)


def unshard_on_compute(place: Place) -> nn.Module:
    model = prefetching(1)(place)
    model._set_unshard_async_op(True)
    return model


add(ROW, "async unshard", unshard_on_compute, steps=8)


def inputs_apart(place: Place) -> nn.Module:
    """The first layer in a unit of its own, whose parameters backward does not need."""
    model = Net()
    fully_shard(model.inp, mp_policy=BF16_FP32)
    model.inp.set_unshard_in_backward(False)
    return sharded(model)


add("`set_unshard_in_backward(False)`", "not in backward", inputs_apart, copies=None, steps=8)


def other_method(place: Place) -> nn.Module:
    model = Net()
    for block in model.blocks:
        block.other = block.forward
    sharded(model)
    for block in model.blocks:
        register_fsdp_forward_method(block, "other")
    return model


def call_other_method(run: Run, step: int) -> None:
    x = run.batch(step)
    model = run.model
    y = model(x).float()
    z = torch.zeros(5, 8, dtype=torch.bfloat16, device=y.device) + y.mean().to(torch.bfloat16)
    for block in model.blocks[:2]:
        z = block.other(z)
    loss = (y - x.mean(dim=1, keepdim=True)).square().mean() + z.float().square().mean()
    loss.backward()
    run.note_loss(step, loss)
    steps.update(run, step)


add("`register_fsdp_forward_method`", "other method", other_method, step=call_other_method, copies=None, steps=8)

add = under("Recomputation and compilation")
ROW = "Activation checkpointing, inside units or around them, whole or selective"
add(ROW, "recompute inside", lambda place: sharded(Net(recompute="inside")))
add(ROW, "recompute outside", lambda place: sharded(Net(recompute="outside")))


def keep_products(*unused: Any) -> Any:
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    calls = {"n": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # As TorchTitan does: every other product is kept.
        calls["n"] += op in kept
        return CheckpointPolicy.MUST_SAVE if op in kept and calls["n"] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Selective(nn.Module):
    """A block recomputed but for every other product."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False, context_fn=keep_products)


def selectively(place: Place) -> nn.Module:
    model = Net()
    model.blocks = nn.ModuleList(Selective(block) for block in model.blocks)
    return sharded(model)


def selectively_around(place: Place) -> nn.Module:
    model = sharded()
    model.blocks = nn.ModuleList(Selective(block) for block in model.blocks)
    return model


add(ROW, "recompute selectively", selectively, steps=8)
add(ROW, "recompute selectively outside", selectively_around, steps=8)


def compiled(wrap: Callable[[nn.Module], nn.Module], in_place: bool = False) -> Callable[[Place], nn.Module]:
    """Blocks compiled as TorchTitan does: after recomputation, before `fully_shard`."""

    def build(place: Place) -> nn.Module:
        torch._dynamo.reset()
        backend = "inductor" if device() == "cuda" else "aot_eager"
        model = Net(blocks=2)
        model.blocks = nn.ModuleList(wrap(block) for block in model.blocks)
        if in_place:
            for block in model.blocks:
                block.compile(backend=backend)
        else:
            model.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in model.blocks)
        return sharded(model)

    return build


ROW = "`torch.compile` on blocks, also with selective recomputation"
add(ROW, "compiled", compiled(lambda block: block), steps=6)
add(ROW, "compiled in place, recomputed", compiled(Selective, in_place=True), steps=6)

add = under("Steps that fail")


class Planted(Exception):
    pass


def fail(*unused: Any) -> None:
    raise Planted


def failing(run: Run, step: int) -> None:
    """Steps 1 and 3 fail in forward, 2 and 5 in backward, at other blocks; each is repeated after the reset."""
    if step in (1, 3):
        handle = run.model.blocks[step % 2 + 1].register_forward_hook(fail)
        expect(lambda: steps.loss_of(run, step))
        handle.remove()
    elif step in (2, 5):
        at = run.model.blocks[step % 2]
        handle = at.down.register_full_backward_pre_hook(fail)
        loss = steps.loss_of(run, step, 3)
        expect(loss.backward)
        handle.remove()
    if step in (1, 2, 3, 5):
        run.model.reset_iter_state()
        run.note_grads(step, "grad of the failed step")
        run.optim.zero_grad()
    steps.plain(run, step)


def expect(function: Callable[[], Any]) -> None:
    try:
        function()
    except Planted:
        return
    raise AssertionError("the planted error did not come")


ROW = "An exception in forward or backward, then `reset_iter_state()`"
add(ROW, "reset", step=failing, copies=None, steps=8)
add(
    ROW,
    "reset fp32, no reshard",
    lambda place: sharded(policy=FP32, reshard_after_forward=False),
    step=failing,
    copies=None,
    steps=8,
)
