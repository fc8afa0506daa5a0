"""One group's reduce-scatter in one backward: what was launched of it, and what FSDP2's tail reads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

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


@dataclass
class Reduction:
    """The reduce-scatter of one group in one backward: one launch, or several of parts."""

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


def joined(
    some: list[Reduction], layout: GroupLayout, indices: tuple[int, ...], stream: Any, device: torch.device
) -> Reduction:
    """One reduction whose OUT holds the shards of `indices` alone, copied together when they are there."""
    shards: dict[int, torch.Tensor] = {}
    for one in some:
        chunks = [layout.params[i].chunk for i in one.out_params]
        shards |= {i: s for i, s in zip(one.out_params, one.out.split(chunks), strict=True) if i in one.started}
    launches = [launched for one in some for launched in one.launches]
    with on_stream(stream, device):
        for launched in launches:
            launched.wait("done")
        out = torch.cat([shards[i] for i in indices])
    first = some[0]
    held = [held for one in some for held in one.held]
    return Reduction(indices, first.grad_dtype, out, first.scale, first.ready, launches, held, set(indices))


def on_stream(stream: Any, device: torch.device, behind_current: bool = False) -> AbstractContextManager[Any]:
    """Make `stream` torch's current one, behind the present one if asked; nothing on the CPU."""
    if device.type == "cpu":
        return nullcontext()
    if behind_current:
        stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def scale_of(op: Any, world: int) -> float:
    """What the sum is multiplied by: fl(1/f) for AVG and PREMUL_SUM, 1 for SUM. Raises `TideError` for any other op."""
    kind, factor = (op, 1.0) if isinstance(op, dist.ReduceOp.RedOpType) else op.__getstate__()
    if kind == dist.ReduceOp.AVG:
        return 1.0 / world
    if kind == dist.ReduceOp.SUM:
        return 1.0
    if kind == dist.ReduceOp.PREMUL_SUM:
        return float(factor)
    raise TideError(f"FSDP2 asks for the reduction {kind}; TIDE takes SUM, AVG and PREMUL_SUM")
