"""The table of scenarios, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from tests.seam import steps
from tests.seam.harness import ReferenceReduceScatter, Run, Scenario, local
from tests.seam.launch import Place
from tests.seam.models import BF16_BF16, BF16_FP32, FP16_REDUCE, FP32, Nested, Net, Tied, sharded

SCENARIOS: dict[str, Scenario] = {}


def device() -> str:
    """What meshes are made of: the GPU where the scenarios play on GPUs (cuda_ranks.py)."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def add(name: str, build: Callable[[Place], nn.Module] | None = None, **kwargs: Any) -> Scenario:
    kwargs.setdefault("step", steps.plain)
    kwargs.setdefault("optimizer", steps.LocalAdam)
    scenario = Scenario(name, build or (lambda place: sharded()), **kwargs)
    assert name not in SCENARIOS
    SCENARIOS[name] = scenario
    return scenario


# Resharding and precision

add("reshard", steps=20, optimizer=steps.adamw, core=True, three=True)
add("no reshard", lambda place: sharded(reshard_after_forward=False), core=True)
add("root reshards", lambda place: sharded(reshard_after_forward=True))
add("some reshard", lambda place: sharded(per_block=lambda i: {"reshard_after_forward": i != 1}))
add(
    "reshard to two",
    lambda place: sharded(reshard_after_forward=2),
    worlds=(4,),
    core=True,
    stock_all_gathers=True,
    copies=None,
)
add("fp32", lambda place: sharded(policy=FP32), core=True)
add("bf16 reduce", core=True, build=lambda place: sharded(policy=BF16_BF16))
add("bf16 parameters", lambda place: sharded(Net().to(torch.bfloat16), FP32))
add("bf16 parameters, fp32 reduce", lambda place: sharded(Net().to(torch.bfloat16), BF16_FP32))

# Shapes and who has gradients

add("uneven", lambda place: sharded(Net(dim=10, hidden=13)), core=True, three=True)
add("uneven fp32", lambda place: sharded(Net(dim=9, hidden=5), FP32))


def freeze(model: nn.Module) -> nn.Module:
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.bias.requires_grad_(False)
    model.inp.weight.requires_grad_(False)
    return model


add("frozen", core=True, build=lambda place: sharded(freeze(Net())))
add("frozen, no reshard", lambda place: sharded(freeze(Net()), reshard_after_forward=False))


def ignoring(place: Place) -> nn.Module:
    net = Net()
    ignored = {net.blocks[1].up.weight, net.scale}
    return sharded(net, FP32, ignored_params=ignored)


add("ignored", ignoring, optimizer=partial(steps.adamw, foreach=False))


def by_columns(place: Place) -> nn.Module:
    return sharded(Net(dim=8, hidden=12), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)


add("columns", by_columns, core=True)
add("columns, accumulated", by_columns, step=steps.accumulate, copies=None)
add("unused", lambda place: sharded(Net(extra=True)), step=steps.skip_by_turns)


def tied(place: Place) -> nn.Module:
    model = Tied()
    fully_shard(model.block, mp_policy=BF16_FP32)
    return fully_shard(model, mp_policy=BF16_FP32)


add("tied", tied)


def nested(place: Place) -> nn.Module:
    model = Nested()
    for part in model.outer:
        fully_shard(part[1], mp_policy=BF16_FP32)
        fully_shard(part, mp_policy=BF16_FP32)
    return fully_shard(model, mp_policy=BF16_FP32)


add("nested", nested)


def bare_root(place: Place) -> nn.Module:
    """Every parameter in a unit of its own but the scale; two modules share one unit."""
    model = Net()
    fully_shard([model.inp, model.out], mp_policy=BF16_FP32)
    return sharded(model)


add("shared unit", bare_root)

# Accumulation

add("accumulate", core=True, step=steps.accumulate, copies=False)
add("accumulate fp32", lambda place: sharded(policy=FP32), step=steps.accumulate, copies=None)
add("accumulate synced", step=steps.accumulate_synced)
add("accumulate synced bf16", lambda place: sharded(policy=BF16_BF16), step=steps.accumulate_synced)
add("accumulate unsharded", step=steps.accumulate_unsharded, stock_all_gathers=None, copies=None)


def stay_unsharded(run: Run) -> None:
    run.model.set_reshard_after_backward(False)


add("no reshard after backward", step=steps.reshard_by_hand, ready=stay_unsharded, stock_all_gathers=None, copies=None)

# Order of all-gathers


def prefetching(depth: int) -> Callable[[Place], nn.Module]:
    def build(place: Place) -> nn.Module:
        model = sharded(Net(blocks=5))
        blocks = list(model.blocks)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + depth])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - depth) : i][::-1])
        return model

    return build


add("prefetch two", prefetching(2), core=True)
add("prefetch three, two slots", prefetching(3), config={"slots": 2}, stock_all_gathers=True, copies=None)
add(
    "prefetch in vain",
    prefetching(1),
    step=steps.prefetch_in_vain,
    config={"slots": 5},
    copies=None,
)
add("unshard by hand", step=steps.unshard_api, copies=None)
add("recompute inside", lambda place: sharded(Net(recompute="inside")))
add("recompute outside", lambda place: sharded(Net(recompute="outside")))
add("two forwards", step=steps.two_forwards)

# Writes to parameters

add("ema", step=steps.ema)
add("ema bf16 parameters", lambda place: sharded(Net().to(torch.bfloat16), FP32), step=steps.ema)
add("ema fp32, no reshard", lambda place: sharded(policy=FP32, reshard_after_forward=False), step=steps.ema)
add("data", step=steps.write_data)
add("data fp32", lambda place: sharded(policy=FP32), step=steps.write_data)
add(
    "write after evaluation",
    lambda place: sharded(policy=FP32, reshard_after_forward=False),
    step=steps.write_after_evaluation,
)
add("load", step=steps.load)
add("load fp32", lambda place: sharded(policy=FP32), step=steps.load)
add("load assign", step=steps.load_assign, optimizer=steps.adamw)
add("load assign fp32", lambda place: sharded(policy=FP32), step=steps.load_assign, optimizer=steps.adamw)
for kind, chosen in {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}.items():
    add(f"adamw {kind}", lambda place: sharded(policy=FP32), optimizer=partial(steps.adamw, **chosen))
add("optimizer in backward", step=steps.in_backward, optimizer=steps.no_optimizer)
add(
    "optimizer in backward fp32",
    lambda place: sharded(policy=FP32),
    step=steps.in_backward,
    optimizer=steps.no_optimizer,
)
add("checkpoint", step=steps.save_and_load, optimizer=steps.adamw)
add("checkpoint fp32", lambda place: sharded(policy=FP32), step=steps.save_and_load, optimizer=steps.adamw)


def on_meta(place: Place) -> nn.Module:
    with torch.device("meta"):
        return sharded()


def materialise(run: Run) -> None:
    run.model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(run.place.rank)
    with torch.no_grad():
        for p in run.model.parameters():
            local(p).copy_(torch.randn(local(p).shape, generator=generator) * 0.3)


add("meta", on_meta, ready=materialise, optimizer=steps.adamw)
add("detach", step=steps.detach_halfway, copies=None, optimizer=steps.adamw)

add("attach again", step=steps.attach_again, copies=None)

# The sum and what follows it


def with_call(method: str, *args: Any, each: bool = True, **sharding: Any) -> Callable[[Place], nn.Module]:
    def build(place: Place) -> nn.Module:
        model = sharded(**sharding)
        for module in [*model.blocks, model] if each else [model]:
            getattr(module, method)(*args)
        return model

    return build


add("divide by three", core=True, build=with_call("set_gradient_divide_factor", 3.0))
add("divide by world", with_call("set_gradient_divide_factor", 4.0), worlds=(4,))
add("force sum", with_call("set_force_sum_reduction_for_comms", True))
add("force sum bf16", with_call("set_force_sum_reduction_for_comms", True, policy=BF16_BF16))
add("clip", step=steps.clip, optimizer=steps.adamw)


def two_by_two(place: Place) -> nn.Module:
    return sharded(mesh=init_device_mesh(device(), (2, 2), mesh_dim_names=("replicate", "shard")))


def accumulate_hybrid(run: Run, step: int) -> None:
    for k in range(2):
        run.model.set_requires_all_reduce(k == 1)
        loss = steps.loss_of(run, step, k)
        loss.backward()
        run.note_loss(step, loss, k)
    steps.update(run, step)


def two_meshes(place: Place) -> nn.Module:
    """As with experts: one block over half of the ranks, the others over all."""
    half = init_device_mesh(device(), (2, 2), mesh_dim_names=("outer", "experts"))["experts"]
    return sharded(per_block=lambda i: {"mesh": half} if i == 1 else {})


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
add("llama3 debug", llama, step=steps.next_token, optimizer=steps.adamw, worlds=())
add("two meshes", two_meshes, worlds=(4,), core=True)
add("hybrid", two_by_two, worlds=(4,), core=True)
add("hybrid, accumulated", two_by_two, worlds=(4,), step=accumulate_hybrid)

# What falls back

add("all-gather only", config={"reduce_scatter": False}, modes=("in_place",), core=True)
add("reduce-scatter only", config={"all_gather": False}, modes=("in_place",), core=True)
add(
    "fp16 reduce",
    lambda place: sharded(per_block=lambda i: {"mp_policy": FP16_REDUCE} if i == 1 else {}),
    stock={"blocks.1": "float16"},
)
add(
    "offload",
    lambda place: sharded(per_block=lambda i: {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if i == 1 else {}),
    stock={"blocks.1": "CPU offload"},
)


def one_large(place: Place) -> nn.Module:
    net = Net()
    net.blocks[1] = Net(extra=True).blocks[0]
    net.blocks[1].use_extra = 2
    return sharded(net)


add("too many tensors", one_large, config={"max_group_params": 6}, stock={"blocks.1": "max_group_params = 6"})


def custom(place: Place) -> nn.Module:
    model = sharded()
    model.blocks[2].set_custom_reduce_scatter(ReferenceReduceScatter())
    return model


add("custom comm", custom, stock={"blocks.2": "custom communication"})
