"""The sum of gradients and what follows it: factors, hooks, HSDP, process groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tests.seam import steps
from tests.seam.harness import Run, local
from tests.seam.launch import Place
from tests.seam.models import BF16_BF16, FP16_REDUCE, FP32, sharded
from tests.seam.scenarios.registry import add as add_without_row
from tests.seam.scenarios.registry import device, under

add = under("Reductions")


def with_call(method: str, *args: Any, each: bool = True, **sharding: Any) -> Callable[[Place], nn.Module]:
    def build(place: Place) -> nn.Module:
        model = sharded(**sharding)
        for module in [*model.blocks, model] if each else [model]:
            getattr(module, method)(*args)
        return model

    return build


ROW = "`set_gradient_divide_factor`, `set_force_sum_reduction_for_comms`"
add(ROW, "divide by three", core=True, build=with_call("set_gradient_divide_factor", 3.0))
add(ROW, "divide by world", with_call("set_gradient_divide_factor", 4.0), worlds=(4,))
add(ROW, "force sum", with_call("set_force_sum_reduction_for_comms", True))
add(ROW, "force sum bf16", with_call("set_force_sum_reduction_for_comms", True, policy=BF16_BF16))


def scale_when_there(run: Run) -> None:
    """Hooks that change gradients as they come, and note how often."""
    run.notes["out"] = None
    for k, p in enumerate(run.model.parameters()):

        def hook(p: torch.Tensor, factor: float = 1.0 - k / 64) -> None:
            local(p.grad).mul_(factor)

        p.register_post_accumulate_grad_hook(hook)


add(
    "`register_post_accumulate_grad_hook` on sharded parameters",
    "post-accumulate hooks",
    ready=scale_when_there,
    step=steps.accumulate_synced,
    steps=8,
)


def hook_all_reduce(run: Run, group: Any = None) -> None:
    """A hook that changes what was reduced; over `group` it replicates by itself, as some do instead of HSDP."""

    def hook(reduced: torch.Tensor) -> None:
        reduced.mul_(0.75)
        if group is not None:
            total = reduced.cpu()
            dist.all_reduce(total, group=group)
            reduced.copy_(total)

    for module in [*run.model.blocks, run.model]:
        module.set_all_reduce_hook(hook)


add("`set_all_reduce_hook`", "all-reduce hook", ready=hook_all_reduce, steps=8)
add(
    "`set_separate_reduce_scatter_group`",
    "separate group",
    with_call("set_separate_reduce_scatter_group", each=False),
    steps=8,
)
add(
    "`set_separate_reduce_scatter_group`",
    "separate group after attach",
    ready=lambda run: run.model.set_separate_reduce_scatter_group(),
    steps=8,
)
add(
    "`set_reduce_scatter_max_input_buffers`",
    "two input buffers",
    with_call("set_reduce_scatter_max_input_buffers", 2, each=False),
    steps=8,
)

add = under("HSDP")
ROW = "HSDP: shards over some ranks, replicas over the others"


def two_by_two(place: Place, **kwargs: Any) -> nn.Module:
    mesh = init_device_mesh(device(), (place.world // 2, 2), mesh_dim_names=("replicate", "shard"))
    return sharded(mesh=mesh, **kwargs)


add(ROW, "hybrid", two_by_two, worlds=(4,), core=True)
add(
    "HSDP with a unit left to stock",
    "hybrid, one unit on stock",
    lambda place: two_by_two(place, per_block=lambda i: {"mp_policy": FP16_REDUCE} if i == 0 else {}),
    worlds=(4,),
    stock={"blocks.0": "float16 reduction"},
    steps=8,
)


def accumulate_hybrid(run: Run, step: int) -> None:
    for k in range(2):
        run.model.set_requires_all_reduce(k == 1)
        loss = steps.loss_of(run, step, k)
        loss.backward()
        run.note_loss(step, loss, k)
    steps.update(run, step)


add(
    "HSDP, microbatches reduced within shards only (`set_requires_all_reduce(False)`)",
    "hybrid, accumulated",
    two_by_two,
    worlds=(4,),
    step=accumulate_hybrid,
)
add(
    "HSDP, microbatches not reduced (`set_requires_gradient_sync(False)`)",
    "hybrid, unreduced",
    two_by_two,
    worlds=(4,),
    step=steps.accumulate,
    copies=False,
    steps=8,
)
add(
    "HSDP, `reshard_after_forward` `False`, bf16 reduction",
    "hybrid, no reshard",
    lambda place: two_by_two(place, policy=BF16_BF16, reshard_after_forward=False),
    worlds=(4,),
    steps=8,
)
add(
    "`set_all_reduce_hook` on HSDP, also with accumulation",
    "hybrid, hook",
    two_by_two,
    worlds=(4,),
    ready=hook_all_reduce,
    step=accumulate_hybrid,
    steps=8,
)


def halves(place: Place) -> nn.Module:
    """Shards over pairs of ranks; that pairs train alike is up to the hook."""
    mesh = init_device_mesh(device(), (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh["shard"], policy=FP32)
    model.replicas = mesh.get_group("replicate")
    return model


add(
    "`set_all_reduce_hook` that replicates by itself",
    "replicating hook",
    halves,
    worlds=(4,),
    ready=lambda run: hook_all_reduce(run, run.model.replicas),
    steps=8,
)


def llama(place: Place) -> nn.Module:
    """TorchTitan's Llama 3 as the debug configuration trains it, with TorchTitan's own FSDP2 units."""
    from torchtitan_tide import cpu

    cpu.prepare()
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp

    args = TransformerModelArgs(dim=128, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=512, multiple_of=64)
    model = Transformer(args)
    with torch.no_grad():
        model.init_weights()
    mesh = init_device_mesh(device(), (place.world,), mesh_dim_names=("dp_shard",))
    apply_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return model


# Not in the table of CASES: TorchTitan takes the process over on a CPU.
add_without_row("llama3 debug", llama, step=steps.next_token, optimizer=steps.adamw, worlds=())
