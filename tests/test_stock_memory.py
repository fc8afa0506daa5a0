"""What `tide plan` and the report say stock FSDP2 holds, against PyTorch's own tracker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide_comm.config import TideConfig
from tide_comm.fsdp.attach import stock_memory
from tide_comm.plan.layout import GroupLayout, ParamLayout
from torchtitan_tide import plan as plan_command

WORLD, BLOCKS, DIM, LINEARS = 64, 5, 1024, 4
PURPOSES = {
    "Unsharded Param": "unsharded",
    "All Gather": "all-gather outputs",
    "Reduce Scatter": "reduce-scatter input",
}


class Block(nn.Module):
    """Shards and activations are small beside a gathered block."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(LINEARS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)
        return x


class Tracker(FSDPMemTracker):
    """Keeps what is held for communication after every change."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.moments: list[dict[str, int]] = []

    def _update_snap(self, *args: Any, **kwargs: Any) -> None:
        super()._update_snap(*args, **kwargs)
        for held in self._curr_mem_snap.values():
            by_name = {getattr(kind, "value", kind): nbytes for kind, nbytes in held.items()}
            self.moments.append({ours: by_name.get(theirs, 0) for theirs, ours in PURPOSES.items()})


def tracked(reshard: bool) -> list[dict[str, int]]:
    mesh = init_device_mesh("cpu", (WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = Tracker(model, optimizer)
    with tracker:
        for _ in range(2):
            model(torch.randn(4, DIM)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker.moments


def groups(keep: bool) -> list[tuple[Any, GroupLayout]]:
    params = tuple(ParamLayout(f"w{i}", (DIM, DIM), "float32", "bfloat16", WORLD) for i in range(LINEARS))
    return [(SimpleNamespace(keeps_slot=keep), GroupLayout(f"b{b}", params, WORLD)) for b in range(BLOCKS)]


@pytest.mark.parametrize("reshard", [True, False])
def test_as_pytorch_counts(reshard: bool) -> None:
    with plan_command.fake_process_group(WORLD):
        assert dist.get_world_size() == WORLD
        moments = tracked(reshard)
    most = max(sum(moment.values()) for moment in moments)
    said = stock_memory(groups(not reshard), TideConfig())
    block = groups(False)[0][1].slot_bytes
    assert sum(said.values()) == most == (4 if reshard else BLOCKS + 2) * block
    assert said in moments or said in [{k: v for k, v in moment.items() if v} for moment in moments]
    gathered = stock_memory(groups(not reshard), TideConfig(reduce_scatter=False))
    without = [moment for moment in moments if not moment["reduce-scatter input"]]
    assert sum(gathered.values()) == max(sum(moment.values()) for moment in without)


def test_halves_and_nothing() -> None:
    block = groups(False)[0][1].slot_bytes
    assert stock_memory([], TideConfig()) == {}
    assert stock_memory(groups(False), TideConfig(all_gather=False)) == {"reduce-scatter input": 2 * block}
    assert stock_memory(groups(False), TideConfig()) == {
        "unsharded": block,
        "all-gather outputs": block,
        "reduce-scatter input": 2 * block,
    }
