"""What stock FSDP2 does around and within its collectives (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py of PyTorch 2.13), for
a group whose parameters are sharded along dim 0."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives

from tide_comm.plan.layout import GroupLayout

_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Streams:
    """FSDP2's, of high priority; on the CPU nothing runs beside."""

    def __init__(self, device: torch.device, names: Sequence[str]) -> None:
        self.cuda = device.type == "cuda"
        self.of: dict[str, Any] = {
            name: torch.cuda.Stream(device, priority=-1) if self.cuda else None for name in names
        }

    def on(self, name: str) -> Any:
        return torch.cuda.stream(self.of[name]) if self.cuda else nullcontext()

    def behind(self, name: str, other: str | None = None) -> None:
        """`name` goes on after what is queued on `other` (None: on the caller's stream) now."""
        if self.cuda:
            self.of[name].wait_stream(self.of[other] if other else torch.cuda.current_stream())

    def mark(self, name: str | None = None) -> Any:
        if not self.cuda:
            return None
        return (self.of[name] if name else torch.cuda.current_stream()).record_event()

    def wait(self, event: Any, name: str | None = None) -> None:
        if self.cuda and event is not None:
            (self.of[name] if name else torch.cuda.current_stream()).wait_event(event)


class StockGather:
    """FSDP2's all-gather into two buffers in turn. `process_group`: symmetric memory on that group; None: NCCL on the default one.
    `outputs`: buffers of an earlier one, to use again."""

    def __init__(
        self,
        layout: GroupLayout,
        masters: Sequence[torch.Tensor],
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
        outputs: list[torch.Tensor] | None = None,
    ) -> None:
        self.world, self.rank = layout.world, dist.get_rank()
        self.masters = [m.view(-1) for m in masters]
        self.sizes = [m.numel() for m in masters]
        self.numel = sum(self.sizes)
        self.group = process_group or dist.group.WORLD
        self.comm: Any = (
            collectives.SymmMemAllGather(process_group, "NCCL") if process_group else collectives.DefaultAllGather()
        )
        self.outputs = outputs or [
            self.comm.allocate((self.numel * self.world,), dtype=torch.bfloat16, device=device) for _ in range(2)
        ]
        for output in self.outputs:
            output.zero_()
        # FSDP2 casts into a buffer of its own; shards that need no cast it copies into the all-gather's at once.
        cast = any(m.dtype != torch.bfloat16 for m in masters)
        casts = torch.empty(self.numel if cast else 0, dtype=torch.bfloat16, device=device)
        self.casts = list(casts.split(self.sizes)) if cast else []
        self.unsharded = [torch.empty(s * self.world, dtype=torch.bfloat16, device=device) for s in self.sizes]
        self.streams = Streams(device, ("copy_in", "gather"))
        self.arrived: list[Any] = [None, None]
        self.free: list[Any] = [None, None]

    def _collective(self, k: int) -> None:
        output = self.outputs[k]
        mine = output.narrow(0, self.numel * self.rank, self.numel)
        self.comm(output_tensor=output, input_tensor=mine, group=self.group)

    def collective(self, reps: int) -> None:
        """Without copies."""
        streams = self.streams
        streams.behind("gather")
        with streams.on("gather"):
            for k in range(reps):
                self._collective(k % 2)
        streams.wait(streams.mark("gather"))

    def _launch(self, k: int) -> None:
        streams, output = self.streams, self.outputs[k]
        streams.wait(self.free[k], "copy_in")
        with streams.on("copy_in"):
            if self.casts:
                torch._foreach_copy_(self.casts, self.masters)
            inputs = self.casts or self.masters
            torch.ops.fsdp.all_gather_copy_in(inputs, output, self.sizes, self.numel, self.rank)
        streams.behind("gather", "copy_in")
        with streams.on("gather"):
            self._collective(k)
        self.arrived[k] = streams.mark("gather")

    def _consume(self, k: int) -> None:
        self.streams.wait(self.arrived[k])
        out = [t.view(self.world, -1) for t in self.unsharded]
        torch.ops.fsdp.split_with_sizes_copy(self.outputs[k].view(self.world, -1), self.sizes, dim=1, out=out)
        self.free[k] = self.streams.mark()

    def run(self, reps: int) -> None:
        """With copies, one all-gather ahead of its consumer."""
        self.streams.behind("copy_in")
        for k in range(reps):
            self._launch(k % 2)
            if k:
                self._consume((k - 1) % 2)
        self._consume((reps - 1) % 2)


class StockReduce:
    """FSDP2's reduce-scatter in fp32 of bf16 gradients, with one input buffer."""

    def __init__(self, layout: GroupLayout, grads: Sequence[torch.Tensor], device: torch.device) -> None:
        self.world, self.grads = layout.world, list(grads)
        numel = sum(p.chunk for p in layout.params)
        self.input = torch.zeros(self.world * numel, device=device)
        self.out = torch.empty(numel, device=device)
        self.streams = Streams(device, ("reduce",))
        # gloo has no AVG.
        self.op = dist.ReduceOp.AVG if self.streams.cuda else dist.ReduceOp.SUM
        self.link_bytes = (self.world - 1) * numel * 4

    def _collective(self) -> None:
        with self.streams.on("reduce"):
            _reduce(self.out, self.input, op=self.op)
            if not self.streams.cuda:
                self.out.mul_(1 / self.world)

    def collective(self, reps: int) -> None:
        """Without chunk_cat."""
        self.streams.behind("reduce")
        for _ in range(reps):
            self._collective()
        self.streams.wait(self.streams.mark("reduce"))

    def run(self, reps: int) -> None:
        """With chunk_cat, which waits for the reduce-scatter before."""
        for _ in range(reps):
            torch.ops.fsdp.chunk_cat(self.grads, dim=0, num_chunks=self.world, out=self.input.view(self.world, -1))
            self.streams.behind("reduce")
            self._collective()
            self.streams.wait(self.streams.mark("reduce"))
