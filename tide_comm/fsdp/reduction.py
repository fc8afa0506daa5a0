"""One group's reduce-scatter in one backward: what was launched of it, and what FSDP2's tail reads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tide_comm.engine.base import Launched
from tide_comm.errors import TideError
from tide_comm.plan.layout import GroupLayout


class Together(Launched):
    """Several launches of one group, in order. Their streams are the same, so the last one's event stands for all."""

    def __init__(self, launches: list[Launched]) -> None:
        self.launches = launches

    def wait(self, point: str) -> None:
        for launched in self.launches:
            launched.wait(point)

    def event(self, point: str) -> Any:
        return self.launches[-1].event(point)

    def reached(self, point: str) -> bool:
        return all(launched.reached(point) for launched in self.launches)


@dataclass(frozen=True)
class Settings:
    """How FSDP2 wants a group reduced: what it hands to `foreach_reduce`, by the names there."""

    reduce_scatter_group: dist.ProcessGroup | None
    reduce_scatter_stream: Any
    """What is allocated on it may be used on it after compute has let go of it."""
    reduce_dtype: torch.dtype | None
    gradient_divide_factor: float | None
    all_reduce_group: dist.ProcessGroup | None
    force_sum_reduction_for_comms: bool

    @classmethod
    def of(cls, group: FSDPParamGroup) -> Settings:
        """Before FSDP2 hands them over."""
        mesh = group.mesh_info
        return cls(
            group._reduce_scatter_process_group if isinstance(mesh, FSDPMeshInfo) else None,
            group.comm_ctx.reduce_scatter_stream,
            group._reduce_dtype,
            group.gradient_divide_factor,
            group._all_reduce_process_group if isinstance(mesh, DDPMeshInfo) else None,
            group.force_sum_reduction_for_comms,
        )

    def out_dtype(self, grad_dtype: torch.dtype) -> torch.dtype:
        return self.reduce_dtype or grad_dtype

    def scale(self, grad_dtype: torch.dtype, device: torch.device, world: int) -> float:
        """What sums are multiplied by: fl(1/f) for AVG and PREMUL_SUM, 1 for SUM. Raises `TideError` for any other op."""
        factors = collectives._get_gradient_divide_factors(
            self.reduce_scatter_group,
            self.all_reduce_group,
            self.out_dtype(grad_dtype),
            device.type,
            self.gradient_divide_factor,
            self.force_sum_reduction_for_comms,
        )
        op: Any = factors[2]
        kind, factor = (op, 1.0) if isinstance(op, dist.ReduceOp.RedOpType) else op.__getstate__()
        if kind == dist.ReduceOp.AVG:
            return 1.0 / world
        if kind == dist.ReduceOp.SUM:
            return 1.0
        if kind == dist.ReduceOp.PREMUL_SUM:
            return float(factor)
        raise TideError(f"FSDP2 asks for the reduction {kind}; TIDE takes SUM, AVG and PREMUL_SUM")


@dataclass
class Reduction:
    """The reduce-scatter of one group in one backward: one launch, or several of parts."""

    settings: Settings
    out_params: tuple[int, ...]
    """What OUT has room for, in FSDP2's order."""
    grad_dtype: str
    out: torch.Tensor
    scale: float
    ready: Any
    """An event after which OUT may be written; None on the CPU."""
    launches: list[Launched] = field(default_factory=list)
    held: list[list[torch.Tensor | None]] = field(default_factory=list)
    started: set[int] = field(default_factory=set)

    @property
    def launched(self) -> Launched:
        return self.launches[0] if len(self.launches) == 1 else Together(self.launches)


def joined(some: list[Reduction], layout: GroupLayout, indices: tuple[int, ...]) -> Reduction:
    """One reduction whose OUT holds the shards of `indices` alone, copied together when they are there."""
    shards: dict[int, torch.Tensor] = {}
    for one in some:
        chunks = [layout.params[i].chunk for i in one.out_params]
        shards |= {i: s for i, s in zip(one.out_params, one.out.split(chunks), strict=True) if i in one.started}
    launches = [launched for one in some for launched in one.launches]
    first = some[0]
    with on_stream(first.settings.reduce_scatter_stream, first.out.device):
        for launched in launches:
            launched.wait("done")
        out = torch.cat([shards[i] for i in indices])
    held = [held for one in some for held in one.held]
    return replace(first, out_params=indices, out=out, launches=launches, held=held, started=set(indices))


def on_stream(stream: Any, device: torch.device, behind_current: bool = False) -> AbstractContextManager[Any]:
    """Make `stream` torch's current one, behind the present one if asked; nothing on the CPU."""
    if device.type == "cpu":
        return nullcontext()
    if behind_current:
        stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
