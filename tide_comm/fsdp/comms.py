"""The communication objects that tag a group as TIDE's, and the tail of a reduce-scatter that stays FSDP2's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from tide_comm.engine.base import Launched

if TYPE_CHECKING:
    from tide_comm.fsdp.group import TideGroup


class TideAllGather(AllGather):
    """Tags the group. Called itself only for an all-gather that stock runs.

    Not a subclass of FSDP2's default: `set_symm_mem` and `set_allocate_memory_*` would silently replace it.
    """

    def __init__(self, group: TideGroup) -> None:
        self.tide = group
        self._stock = DefaultAllGather()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._stock.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return self._stock(output_tensor, input_tensor, group, async_op)


@dataclass
class Tail:
    """A launched reduce-scatter, waiting for FSDP2's tail: HSDP's all-reduce, hooks, division, cast, accumulation into `.grad`."""

    launched: Launched
    held: list[list[torch.Tensor | None]]
    out: torch.Tensor
    sizes: list[torch.Size]
    grad_dtype: str
    dummy: torch.Tensor | None = None

    def read_event(self) -> Any:
        """When the gradients have been read (GPU only): FSDP2 lets compute wait for it before it drops them."""
        return self.launched.event("grads_read")

    def stand_ins(self) -> list[torch.Tensor]:
        """Meta tensors of the gradients' sizes: all that the tail needs to know of them."""
        return [torch.empty(size, dtype=getattr(torch, self.grad_dtype), device="meta") for size in self.sizes]


class TideReduceScatter(ReduceScatter):
    """Tags the group, and inside a tail hands FSDP2 what TIDE has reduced.

    FSDP2 allocates the input, copies gradients in, allocates the output and calls. During a tail the input is a stand-in without memory (so
    FSDP2's buffer of twice the group never exists), the copy-in is skipped, and the output is what the engine writes.
    """

    def __init__(self, group: TideGroup) -> None:
        self.tide = group
        self.tail: Tail | None = None
        self._stock = DefaultReduceScatter()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tail = self.tail
        if tail is None:
            return self._stock.allocate(size, dtype=dtype, device=device)
        if tail.dummy is None:
            tail.dummy = torch.empty(1, dtype=dtype, device=device).expand(*size)
            return tail.dummy
        return tail.out

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.tail is None:
            return self._stock(output_tensor, input_tensor, group, op, async_op)
        self.tail.launched.wait("done")
        return None
