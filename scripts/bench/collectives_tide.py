"""TIDE's collectives of one group on an engine of their own, back to back, and their peer copies alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from job import exchange

from tide_comm.engine.base import ArenaSpec, Buffers, Engine, Launched
from tide_comm.engine.host.engine import HostEngine
from tide_comm.plan import names
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.program import COMPUTE, After, Area, Copy, Event, Op, Program, Record
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.slices import StageSpec, shard_elements
from tide_comm.plan.topology import Topology

TIMEOUT_S = 60.0


def copies_of(program: Program, stream: str, end: Event) -> Program:
    """The program's copies to peers on `stream`, nothing else; its point is "end"."""
    ops: list[Op] = [Record(COMPUTE, names.BEGIN), After(stream, names.BEGIN)]
    ops += [op for op in program.ops if isinstance(op, Copy) and op.stream == stream]
    ops += [Record(stream, end)]
    return replace(
        program, name=f"copies of {program.name}", ops=tuple(ops), points={"end": end}, arrivals={}, stage_pieces=0
    )


def bytes_of(program: Program) -> int:
    return sum(op.src.nbytes for op in program.ops if isinstance(op, Copy))


class TideCollectives:
    """An arena of two slots and a ring of `ring` pieces. Collective while it is made and closed. `grads`: to share with another one."""

    def __init__(
        self,
        layout: GroupLayout,
        device: torch.device,
        piece_bytes: int,
        ring: int,
        grads: list[torch.Tensor] | None = None,
        gathers: bool = True,
    ) -> None:
        self.layout, self.device, self.rank = layout, device, dist.get_rank()
        world = layout.world
        self.topology = Topology.regular(1, world)
        shard, slot, slots = (layout.shard_bytes, layout.slot_bytes, 2) if gathers else (0, 0, 0)
        spec = ArenaSpec(self.topology, shard, slot, slots, StageSpec(piece_bytes, ring, world))
        self.engine = self._engine(spec)
        self.stage = spec.stage
        self.indices = range(len(layout.params))
        torch.manual_seed(1 + self.rank)
        self.masters: list[torch.Tensor] = []
        if gathers:
            dtypes = [getattr(torch, p.param_dtype) for p in layout.params]
            self.masters = [
                torch.randn(p.chunk, device=device).to(dtype) for p, dtype in zip(layout.params, dtypes, strict=True)
            ]
            for i, p in enumerate(layout.params):
                if p.in_shard and p.chunk:
                    self._fill_shard(i)
            self._gather = all_gather(layout, self.topology, self.rank)
            self._gather_copies = copies_of(self._gather, names.PUSH, names.SENT)
            self._vacate = vacate(self.topology, self.rank)
        self.grads = grads or [torch.randn(p.shape, device=device).bfloat16() for p in layout.params]
        # Zeros: padding is not written, and FSDP2's is zero.
        self.out = torch.zeros(shard_elements(layout, self.indices), device=device)
        self._reduce_copies = copies_of(self._reduce_program(16), names.REDUCE_PUSH, names.PUSHED)
        self.launches = 0

    def _engine(self, spec: ArenaSpec) -> Engine:
        if self.device.type == "cpu":
            return HostEngine(spec, self.rank, exchange, TIMEOUT_S)
        from tide_comm.engine.cuda.engine import CudaEngine

        return CudaEngine(spec, self.rank, exchange, TIMEOUT_S, self.device)

    def _fill_shard(self, i: int) -> None:
        """bf16 parameters live in the arena."""
        region = self.layout.shard(i, 0)
        storage = self.engine.window(Area.SHARD, -1, region.offset, region.nbytes)
        place = torch.empty(0, dtype=torch.bfloat16, device=self.device).set_(storage)
        place.copy_(self.masters[i])
        self.masters[i] = place

    def _reduce_program(self, blocks: int) -> Program:
        return reduce_scatter(
            self.layout, self.topology, self.rank, self.stage, self.indices, "bfloat16", "float32", blocks=blocks
        )

    def gather_bytes(self) -> int:
        """To the other ranks."""
        return bytes_of(self._gather)

    def reduce_bytes(self) -> int:
        return bytes_of(self._reduce_copies)

    def gather(self, reps: int) -> None:
        """One ahead of its consumer, which reads nothing."""
        before: tuple[Launched, int] | None = None
        for _ in range(reps):
            slot = self.launches % 2
            launched = self.engine.launch(self._gather, slot, Buffers(params=self.masters), self.launches)
            self.launches += 1
            if before:
                self._consume(*before)
            before = (launched, slot)
        if before:
            self._consume(*before)

    def _consume(self, launched: Launched, slot: int) -> None:
        launched.wait("arrived")
        self.last_slot = slot
        self.engine.launch(self._vacate, slot)

    def gather_copies(self, reps: int) -> None:
        for k in range(reps):
            launched = self.engine.launch(self._gather_copies, k % 2, Buffers(params=self.masters))
        launched.wait("end")

    def gathered_like(self, wanted: list[torch.Tensor]) -> bool:
        """Whether the last slot that was gathered into holds these parameters, to the bit."""
        same = True
        for i, p in enumerate(self.layout.params):
            window = self.engine.window(Area.SLOT, self.last_slot, self.layout.slot_offsets[i], p.slot_bytes)
            got = torch.empty(0, dtype=torch.bfloat16, device=self.device).set_(window)
            same = same and torch.equal(got.view(-1), wanted[i].view(-1))
        return same

    def reduce(self, blocks: int) -> Callable[[int], None]:
        """Reduce-scatters with sums of so many thread blocks."""
        program = self._reduce_program(blocks)

        def run(reps: int) -> None:
            for _ in range(reps):
                buffers = Buffers(grads=list(self.grads), out=self.out, scale=1 / self.layout.world)
                launched = self.engine.launch(program, -1, buffers, self.launches)
                self.launches += 1
            launched.wait("done")
            launched.wait("grads_read")

        return run

    def reduce_copies(self, reps: int) -> None:
        for _ in range(reps):
            launched = self.engine.launch(self._reduce_copies, -1, Buffers(grads=list(self.grads), out=self.out))
        launched.wait("end")

    def reduced_like(self, wanted: torch.Tensor) -> bool | str:
        """Whether OUT equals `wanted` to the bit, else the largest difference."""
        if torch.equal(self.out, wanted):
            return True
        return f"differs by at most {(self.out - wanted).abs().max().item():.2e}"

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        exchange(None)
        self.engine.close()
