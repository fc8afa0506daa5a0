"""What is sharded, how, and in which precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from tests.seam import steps
from tests.seam.experts import MoEBlock
from tests.seam.harness import ReferenceReduceScatter, Run, local
from tests.seam.launch import Place
from tests.seam.models import BF16_BF16, BF16_FP32, FP16_FP32, FP16_REDUCE, FP32, Nested, Net, Tied, sharded
from tests.seam.scenarios.registry import device, under

add = under("Resharding")
ROW = "`reshard_after_forward` `True`, `False`, or per unit"
add(ROW, "reshard", steps=20, optimizer=steps.adamw, core=True, three=True)
add(ROW, "no reshard", lambda place: sharded(reshard_after_forward=False), core=True)
add(ROW, "root reshards", lambda place: sharded(reshard_after_forward=True))
add(ROW, "some reshard", lambda place: sharded(per_block=lambda i: {"reshard_after_forward": i != 1}))
add(
    "`reshard_after_forward` an integer",
    "reshard to two",
    lambda place: sharded(reshard_after_forward=2),
    worlds=(4,),
    core=True,
    stock_all_gathers=True,
    why="the backward's, over the smaller mesh, run on stock",
    copies=None,
)


def reshard_by_turns(run: Run, step: int) -> None:
    run.model.set_reshard_after_forward(step % 3 == 0)
    steps.plain(run, step)


add(
    "`set_reshard_after_forward` while training",
    "reshard by turns",
    lambda place: sharded(Net(blocks=5)),
    step=reshard_by_turns,
    stock_all_gathers=True,
    why="slots are counted at `attach`: those that find all taken run on stock, unless `slots` makes room",
    copies=None,
    steps=8,
)
add(
    "`set_reshard_after_forward` while training, with `slots` for all units",
    "reshard by turns, all slots",
    lambda place: sharded(Net(blocks=5)),
    step=reshard_by_turns,
    config={"slots": 8},
    steps=8,
)


def stay_unsharded(run: Run) -> None:
    run.model.set_reshard_after_backward(False)


ROW = "`set_reshard_after_backward(False)`, also between microbatches"
UNSHARDED = {
    "stock_all_gathers": None,
    "why": "units that stay unsharded keep their slots; all-gathers that find all taken run on stock, unless `slots` makes room",
    "copies": None,
}
add(ROW, "accumulate unsharded", step=steps.accumulate_unsharded, **UNSHARDED)
add(ROW, "no reshard after backward", step=steps.reshard_by_hand, ready=stay_unsharded, **UNSHARDED)

add = under("Precision")
ROW = "fp32, bf16, fp16 parameters or `param_dtype`; bf16 or fp32 reduction"
add(ROW, "fp32", lambda place: sharded(policy=FP32), core=True)
add(ROW, "bf16 reduce", core=True, build=lambda place: sharded(policy=BF16_BF16))
add(ROW, "bf16 parameters", lambda place: sharded(Net().to(torch.bfloat16), FP32))
add(ROW, "bf16 parameters, fp32 reduce", lambda place: sharded(Net().to(torch.bfloat16), BF16_FP32))
add(ROW, "fp16 parameters", lambda place: sharded(policy=FP16_FP32), steps=8)
add(
    "fp16 reduction",
    "fp16 reduce",
    lambda place: sharded(per_block=lambda i: {"mp_policy": FP16_REDUCE} if i == 1 else {}),
    stock={"blocks.1": "float16 reduction"},
)
ALL = ("(root)", "blocks.0", "blocks.1", "blocks.2")
add(
    "fp64 parameters or reduction",
    "fp64",
    lambda place: sharded(Net().double(), FP32),
    stock=dict.fromkeys(ALL, "float64 reduction"),
    steps=8,
)


def quantised(place: Place) -> nn.Module:
    from tests.seam.float8 import Float8Weight

    net = Net()
    net.blocks[1].up.weight = nn.Parameter(Float8Weight(net.blocks[1].up.weight.detach()))
    return sharded(net)


add(
    "fp8 and other extensions of the all-gather (`fsdp_pre_all_gather`)",
    "fp8",
    quantised,
    stock={"blocks.1": "fsdp_pre_all_gather (quantised all-gather)"},
    steps=8,
)

add = under("Parameters and units")
ROW = "Shapes that ranks do not divide; ranks with empty shards"
add(ROW, "uneven", lambda place: sharded(Net(dim=10, hidden=13)), core=True, three=True)
add(ROW, "uneven fp32", lambda place: sharded(Net(dim=9, hidden=5), FP32))


def freeze(model: nn.Module) -> nn.Module:
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.bias.requires_grad_(False)
    model.inp.weight.requires_grad_(False)
    return model


ROW = "Frozen parameters and units"
add(ROW, "frozen", core=True, build=lambda place: sharded(freeze(Net())))
add(ROW, "frozen, no reshard", lambda place: sharded(freeze(Net()), reshard_after_forward=False))


def freeze_by_turns(run: Run, step: int) -> None:
    for i, block in enumerate(run.model.blocks):
        block.requires_grad_((step + i) % 3 > 0)
        block.up.weight.requires_grad_(True)
    steps.plain(run, step)


add("`requires_grad_` while training", "freeze by turns", step=freeze_by_turns, steps=8)


def ignoring(place: Place) -> nn.Module:
    net = Net()
    ignored = {net.blocks[1].up.weight, net.scale}
    return sharded(net, FP32, ignored_params=ignored)


add("`ignored_params`", "ignored", ignoring, optimizer=partial(steps.adamw, foreach=False))


def by_columns(place: Place) -> nn.Module:
    return sharded(Net(dim=8, hidden=12), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)


ROW = "`shard_placement_fn` with `Shard(1)`"
add(ROW, "columns", by_columns, core=True)
add(ROW, "columns, accumulated", by_columns, step=steps.accumulate, copies=None)


def several_groups(place: Place) -> nn.Module:
    """Blocks' matrices over half of the ranks (with two ranks: over both, and replicated once), the rest over all."""
    outer = init_device_mesh(device(), (max(1, place.world // 2), 2), mesh_dim_names=("outer", "experts"))
    whole = init_device_mesh(device(), (place.world,), mesh_dim_names=("all",))
    info = FSDPMeshInfo(outer["experts"], 0) if place.world > 2 else HSDPMeshInfo(outer, 1, 0)
    everywhere = FSDPMeshInfo(whole, 0)

    def placement(p: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), info if p.ndim == 2 else everywhere)

    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=whole, mp_policy=BF16_FP32, shard_placement_fn=placement)
    return fully_shard(model, mesh=whole, mp_policy=BF16_FP32)


ROW = "Several groups in a unit (`ShardPlacementResult`), units over other meshes (experts)"
add(ROW, "several groups", several_groups, steps=8)


def two_meshes(place: Place) -> nn.Module:
    """As with experts: one block over half of the ranks, the others over all."""
    half = init_device_mesh(device(), (2, 2), mesh_dim_names=("outer", "experts"))["experts"]
    return sharded(per_block=lambda i: {"mesh": half} if i == 1 else {})


add(ROW, "two meshes", two_meshes, worlds=(4,), core=True)


def tied(place: Place) -> nn.Module:
    model = Tied()
    fully_shard(model.block, mp_policy=BF16_FP32)
    return fully_shard(model, mp_policy=BF16_FP32)


def tied_in_a_unit(place: Place) -> nn.Module:
    model = Tied()
    fully_shard([model.one, model.two], mp_policy=BF16_FP32)
    fully_shard(model.block, mp_policy=BF16_FP32)
    return fully_shard(model, mp_policy=BF16_FP32)


ROW = "Tied weights, in the root or in a unit of several modules"
add(ROW, "tied", tied)
add(ROW, "tied in a unit", tied_in_a_unit, steps=8)


def nested(place: Place) -> nn.Module:
    model = Nested()
    for part in model.outer:
        fully_shard(part[1], mp_policy=BF16_FP32)
        fully_shard(part, mp_policy=BF16_FP32)
    return fully_shard(model, mp_policy=BF16_FP32)


add("Units within units", "nested", nested)


def bare_root(place: Place) -> nn.Module:
    """Every parameter in a unit of its own but the scale; two modules share one unit."""
    model = Net()
    fully_shard([model.inp, model.out], mp_policy=BF16_FP32)
    return sharded(model)


ROW = "A unit of several modules (`fully_shard([a, b])`), called together or in chunks"
add(ROW, "shared unit", bare_root)


class Chunked(Net):
    """The forward ends before the head, which is called in chunks: as losses over a long sequence are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x.to(self.inp.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.last(x * self.scale)


def headless(place: Place) -> nn.Module:
    model = Chunked()
    model.last = nn.LayerNorm(8)
    fully_shard([model.last, model.out], mp_policy=BF16_FP32)
    return sharded(model)


def chunked_loss(run: Run, step: int) -> None:
    x = run.batch(step, rows=6)
    hidden = run.model(x)
    cut = hidden.detach().requires_grad_()
    for k, (part, wanted) in enumerate(zip(cut.chunk(3), x.chunk(3), strict=True)):
        loss = (run.model.out(part).float() - wanted.mean(dim=1, keepdim=True)).square().mean()
        loss.backward()
        run.note_loss(step, loss, k)
    hidden.backward(cut.grad)
    steps.update(run, step)


add(
    ROW,
    "chunked loss",
    headless,
    step=chunked_loss,
    copies=None,
    steps=8,
)
add(
    "Parameters that a step does not use, the same on all ranks",
    "unused",
    lambda place: sharded(Net(extra=True)),
    step=steps.skip_by_turns,
)


def use_by_rank(run: Run, step: int) -> None:
    for i, block in enumerate(run.model.blocks):
        block.use_extra = (step + i + run.place.rank) % 3
    steps.plain(run, step)


add(
    "Parameters that a step does not use, other ones by rank, with `set_reduce_scatter_unused_params(True)`",
    "unused by rank",
    lambda place: sharded(Net(extra=True)),
    ready=lambda run: run.model.set_reduce_scatter_unused_params(True),
    step=use_by_rank,
    copies=None,
    steps=8,
)


def on_meta(place: Place) -> nn.Module:
    with torch.device("meta"):
        return sharded()


def materialise(run: Run) -> None:
    run.model.to_empty(device=device())
    generator = torch.Generator().manual_seed(run.place.rank)
    with torch.no_grad():
        for p in run.model.parameters():
            local(p).copy_(torch.randn(local(p).shape, generator=generator) * 0.3)


add("A model on the meta device, `to_empty` after `attach`", "meta", on_meta, ready=materialise, optimizer=steps.adamw)


def mixture(stacked: bool) -> Callable[[Place], nn.Module]:
    """A block in the middle has 128 experts."""

    def build(place: Place) -> nn.Module:
        net = Net()
        net.blocks[1] = MoEBlock(stacked=stacked)
        return sharded(net)

    return build


FEW = {"worlds": (2,), "steps": 3}
ROW = "A mixture of experts as stacked tensors, or as a list of modules with a larger `max_group_params`"
add(ROW, "stacked experts", mixture(stacked=True), **FEW)
add(ROW, "listed experts, all allowed", mixture(stacked=False), config={"max_group_params": 393}, **FEW)

add = under("Left to stock")
add(
    "CPU offload",
    "offload",
    lambda place: sharded(per_block=lambda i: {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if i == 1 else {}),
    stock={"blocks.1": "CPU offload"},
)


def one_large(place: Place) -> nn.Module:
    net = Net()
    net.blocks[1] = Net(extra=True).blocks[0]
    net.blocks[1].use_extra = 2
    return sharded(net)


add(
    "A unit of more than `max_group_params` trainable tensors",
    "too many tensors",
    one_large,
    config={"max_group_params": 6},
    stock={"blocks.1": "more than max_group_params = 6"},
)


add(
    "A mixture of experts as a list of modules: 9 + 3 x 128 tensors in a unit",
    "listed experts",
    mixture(stacked=False),
    stock={"blocks.1": "393 trainable tensors, more than max_group_params = 256"},
    **FEW,
)


def custom(place: Place) -> nn.Module:
    model = sharded()
    model.blocks[2].set_custom_reduce_scatter(ReferenceReduceScatter())
    return model


add(
    "`set_custom_all_gather`, `set_custom_reduce_scatter` before `attach`",
    "custom comm",
    custom,
    stock={"blocks.2": "a custom communication object is set already"},
)


def alone(place: Place) -> nn.Module:
    """Replicated over all ranks, sharded over one; the root over all."""
    mesh = init_device_mesh(device(), (place.world, 1), mesh_dim_names=("replicate", "shard"))
    return sharded(per_block=lambda i: {"mesh": mesh} if i == 1 else {})


add(
    "A shard group of one rank",
    "one rank",
    alone,
    stock={"blocks.1": "its shard group has one rank: nothing to communicate"},
    steps=8,
)
ROW = "Only all-gathers on TIDE, or only reduce-scatters"
add(ROW, "all-gather only", config={"reduce_scatter": False}, modes=("in_place",), core=True)
add(ROW, "reduce-scatter only", config={"all_gather": False}, modes=("in_place",), core=True)
