"""What a scenario does with its model in one step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.seam.harness import Run, local


def adamw(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trainable, lr=1e-2, **kwargs)


class LocalAdam:
    """Adam on the local shards: DTensors make the step of a real one the slowest part of a tiny test."""

    def __init__(self, model: nn.Module) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.moments = [(torch.zeros_like(local(p)), torch.zeros_like(local(p))) for p in self.params]

    @torch.no_grad()
    def step(self) -> None:
        having = [(p, *m) for p, m in zip(self.params, self.moments, strict=True) if p.grad is not None]
        params, grads = [local(p) for p, _, _ in having], [local(p.grad) for p, _, _ in having]
        first, second = [m for _, m, _ in having], [v for _, _, v in having]
        torch._foreach_lerp_(first, grads, 0.1)
        torch._foreach_mul_(second, 0.99)
        torch._foreach_addcmul_(second, grads, grads, 0.01)
        root = torch._foreach_sqrt(second)
        torch._foreach_add_(root, 1e-6)
        torch._foreach_addcdiv_(params, first, root, -1e-2)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


def no_optimizer(model: nn.Module) -> None:
    """For scenarios whose optimizers run in backward."""


def loss_of(run: Run, step: int, k: int = 0) -> torch.Tensor:
    x = run.batch(step, k)
    return (run.model(x).float() - x.mean(dim=1, keepdim=True)).square().mean()


def update(run: Run, step: int) -> None:
    run.note_grads(step)
    run.optim.step()
    run.optim.zero_grad()


def next_token(run: Run, step: int) -> None:
    """A language model learns to count."""
    generator = torch.Generator().manual_seed(1000 * step + run.place.rank)
    start = torch.randint(0, 400, (2, 1), generator=generator)
    tokens = (start + torch.arange(65)) % 512
    tokens = tokens.to(next(run.model.parameters()).device)
    logits = run.model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    run.note_loss(step, loss)
    update(run, step)


def plain(run: Run, step: int) -> None:
    loss = loss_of(run, step)
    loss.backward()
    run.note_loss(step, loss)
    update(run, step)


def accumulate(run: Run, step: int) -> None:
    """Three backwards; gradients are reduced after the last only."""
    for k in range(3):
        run.model.set_requires_gradient_sync(k == 2)
        loss = loss_of(run, step, k)
        loss.backward()
        run.note_loss(step, loss, k)
    update(run, step)


def accumulate_synced(run: Run, step: int) -> None:
    """Two backwards, both reduced: the second is added to what is there."""
    for k in range(2):
        loss = loss_of(run, step, k)
        loss.backward()
        run.note_loss(step, loss, k)
        run.note_grads(step, f"grad after {k}")
    update(run, step)


def accumulate_unsharded(run: Run, step: int) -> None:
    """Two backwards; parameters stay unsharded between them."""
    for k in range(2):
        last = k == 1
        run.model.set_requires_gradient_sync(last)
        run.model.set_reshard_after_backward(last)
        loss = loss_of(run, step, k)
        loss.backward()
        run.note_loss(step, loss, k)
    update(run, step)


def reshard_by_hand(run: Run, step: int) -> None:
    """Parameters stay unsharded after backward, so they are resharded by hand before the optimizer."""
    loss = loss_of(run, step)
    loss.backward()
    run.note_loss(step, loss)
    for module in [*run.model.blocks, run.model]:
        module.reshard()
    update(run, step)


def two_forwards(run: Run, step: int) -> None:
    loss = loss_of(run, step, 0) + 0.5 * loss_of(run, step, 1)
    loss.backward()
    run.note_loss(step, loss)
    update(run, step)


def evaluate(run: Run, step: int, k: int = 7) -> None:
    run.model.eval()
    with torch.no_grad():
        run.note_loss(step, loss_of(run, step, k), k)
    run.model.train()


def ema(run: Run, step: int) -> None:
    """Averages beside the parameters; every third step they are swapped in, evaluated, and swapped out."""
    plain(run, step)
    params = list(run.model.parameters())
    if "ema" not in run.notes:
        run.notes["ema"] = [local(p).detach().clone() for p in params]
    averages = run.notes["ema"]
    with torch.no_grad():
        torch._foreach_lerp_(averages, [local(p) for p in params], 0.1)
    if step % 3:
        return
    evaluate(run, step, 7)
    for k in (8, 9):
        with torch.no_grad():
            for p, average in zip(params, averages, strict=True):
                kept = local(p).detach().clone()
                local(p).copy_(average)
                average.copy_(kept)
        evaluate(run, step, k)


def write_data(run: Run, step: int) -> None:
    """Parameters are written through `.data` right after a backward, and right after an evaluation."""
    plain(run, step)
    for p in run.model.parameters():
        p.data.mul_(0.97)
    evaluate(run, step)
    for p in run.model.parameters():
        local(p.data).add_(0.01)


def write_after_evaluation(run: Run, step: int) -> None:
    """Shards are written right after an evaluation whose forward leaves all units unsharded, by who kept the sharded parameters."""
    plain(run, step)
    shards = list(run.model.parameters())
    evaluate(run, step)
    with torch.no_grad():
        for p in shards:
            local(p).mul_(0.9)


def load(run: Run, step: int) -> None:
    """`load_state_dict` right after an evaluation's forward, which leaves the last group unsharded."""
    plain(run, step)
    if step % 3 == 1:
        state = {k: v.detach() * 0.75 for k, v in run.model.state_dict().items()}
        evaluate(run, step)
        run.model.load_state_dict(state)
        run.note_params(f"step {step}, loaded")


def load_assign(run: Run, step: int) -> None:
    """`load_state_dict(assign=True)` replaces the parameters, so the optimizer is made anew."""
    plain(run, step)
    if step % 4 == 1:
        state = {k: v.detach() * 0.75 for k, v in run.model.state_dict().items()}
        evaluate(run, step)
        run.model.load_state_dict(state, assign=True)
        run.optim = adamw(run.model)
        run.note_params(f"step {step}, loaded")


def save_and_load(run: Run, step: int) -> None:
    """Saved with the distributed checkpoint at step 3; at step 6 back to it, optimizer too."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    plain(run, step)
    folder = run.place.scratch / f"dcp {run.side} {run.notes['tag']}"
    if step == 3:
        model, optim = get_state_dict(run.model, run.optim)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    if step == 6:
        model, optim = get_state_dict(run.model, run.optim)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
        set_state_dict(run.model, run.optim, model_state_dict=model, optim_state_dict=optim)
        run.note_params(f"step {step}, loaded")


def clip(run: Run, step: int) -> None:
    loss = loss_of(run, step)
    loss.backward()
    run.note_loss(step, loss)
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
    run.trace.note(f"step {step}: norm", norm.full_tensor())
    update(run, step)


def unshard_api(run: Run, step: int) -> None:
    """Units are unsharded by hand: at step 0 before FSDP2's lazy initialisation, then with and without a handle."""
    blocks = run.model.blocks
    if step % 2 == 0:
        handles = [b.unshard(async_op=True) for b in blocks[:2]]
        for handle in handles:
            handle.wait()
    else:
        blocks[1].unshard()
    if step % 4 == 3:
        # Unsharded and not used: what was gathered is given back.
        blocks[1].reshard()
    plain(run, step)


def skip_by_turns(run: Run, step: int) -> None:
    """A whole unit that takes no part in every other step, and parts of units that some steps use, the same on all ranks."""
    run.model.skip = (1,) if step % 2 else ()
    for i, block in enumerate(run.model.blocks):
        block.use_extra = (step + i) % 3
    plain(run, step)


def in_backward(run: Run, step: int) -> None:
    """Each parameter has an optimizer, which steps as soon as the gradient is there."""
    if step == 0:
        run.notes["made"] = {}
        for name, p in run.model.named_parameters():
            run.notes["made"][name] = torch.optim.AdamW([p], lr=1e-2)

            def hook(p: torch.Tensor, name: str = name) -> None:
                run.trace.note(f"step {run.notes['step']}: {name}.grad", p.grad)
                run.notes["made"][name].step()
                p.grad = None

            p.register_post_accumulate_grad_hook(hook)
    run.notes["step"] = step
    loss = loss_of(run, step)
    loss.backward()
    run.note_loss(step, loss)


def detach_halfway(run: Run, step: int) -> None:
    """Back to stock after step 4; what follows must not notice."""
    from tests.seam.harness import sum_by_reference

    plain(run, step)
    if step == 4 and run.report is not None:
        run.notes["out"] = run.report.stats()
        run.report.detach()
        run.report.detach()  # harmless
        sum_by_reference(run.model)


def attach_again(run: Run, step: int) -> None:
    """Detached and attached again with the other memory mode, between steps."""
    from tide_comm import TideConfig, attach

    plain(run, step)
    if step == 3 and run.report is not None:
        before = run.report.stats()
        mode = "in_place" if run.report.config.memory_mode == "slot_reuse" else "slot_reuse"
        run.report.detach()
        run.report = attach(run.model, TideConfig(memory_mode=mode))
        run.notes["out"] = before


def prefetch_in_vain(run: Run, step: int) -> None:
    """Block 1 is prefetched in every step, and left out of every other one: nobody takes what was gathered."""
    run.model.skip = (1,) if step % 2 else ()
    plain(run, step)
