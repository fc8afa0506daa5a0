"""All ranks' programs in one thread, each strictly in issue order: what they compute for many machines, without a thread a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide_comm.engine.base import ArenaSpec, Buffers
from tide_comm.engine.host import kernels
from tide_comm.plan.program import (
    Agree,
    Area,
    Binding,
    Cast,
    Clear,
    Copy,
    CopyAll,
    Counters,
    Op,
    Post,
    Program,
    Put,
    Reduce,
    Region,
    Remote,
    Signal,
    Wait,
    WordKey,
    bind,
    copies_of,
)


@dataclass
class Launch:
    program: Program
    binding: Binding
    buffers: Buffers


class Sequential:
    """Memory and words of all ranks of an arena."""

    def __init__(self, spec: ArenaSpec) -> None:
        self.spec = spec
        world = spec.topology.world
        self.memory = [torch.full((spec.total_bytes,), 0xFF, dtype=torch.uint8) for _ in range(world)]
        self.counters = [Counters() for _ in range(world)]
        self.words: dict[tuple[int, WordKey], int] = {}
        self.tags: dict[tuple[int, int], int] = {}

    def run(self, programs: Sequence[Program], slot: int, buffers: Sequence[Buffers]) -> None:
        """One launch on every rank, to its end; raises `AssertionError` on a deadlock."""
        launches = [
            Launch(p, bind(p, self.counters[r], slot), b)
            for r, (p, b) in enumerate(zip(programs, buffers, strict=True))
        ]
        at = [0] * len(launches)
        while any(i < len(x.program.ops) for i, x in zip(at, launches, strict=True)):
            before = list(at)
            for rank, launch in enumerate(launches):
                while at[rank] < len(launch.program.ops) and self._step(rank, launch.program.ops[at[rank]], launch):
                    at[rank] += 1
            stuck = [x.program.ops[i] for i, x in zip(at, launches, strict=True) if i < len(x.program.ops)]
            assert at != before, f"deadlock in issue order: {stuck[:3]}"

    def _step(self, rank: int, op: Op, launch: Launch) -> bool:
        """False if the rank has to wait here."""
        if isinstance(op, Wait):
            key = (rank, launch.binding.word(op.word))
            return self.words.get(key, 0) >= launch.binding.wait_value(op)
        if isinstance(op, (Copy, Put)):
            kernels.copy(self._at(op.src, rank, launch), op.src, self._at(op.dst, op.peer, launch), op.dst)
        elif isinstance(op, CopyAll):
            for lane in op.lands(rank):
                kernels.copy(self._at(op.src, rank, launch), op.src, self._at(op.dst, lane, launch), op.dst)
        elif isinstance(op, Cast):
            for part in op.parts:
                kernels.cast(self._at(part.src, rank, launch), self._at(part.dst, rank, launch), part)
        elif isinstance(op, Reduce):
            for segment in op.segments:
                copies = [copy for source in segment.sources for copy in copies_of(source)]
                sources = [(self._at(s, rank, launch), s.region if isinstance(s, Remote) else s) for s in copies]
                kernels.reduce(sources, self._at(segment.dst, rank, launch), segment.dst, op, launch.buffers.scale)
        elif isinstance(op, Clear):
            kernels.clear(self._at(op.dst, rank, launch), op.dst)
        elif isinstance(op, Post):
            self.tags[op.peer, self.spec.tag_of(rank, op.index, launch.binding)] = 1
        elif isinstance(op, Agree):
            for peer in op.peers:
                assert self.tags.pop((rank, self.spec.tag_of(peer, op.index, launch.binding))) == 1
        if isinstance(op, (Signal, Put)):
            key = (op.peer, launch.binding.word(op.word))
            self.words[key] = self.words.get(key, 0) + 1
        return True

    def _at(self, source: Region | Remote, rank: int, launch: Launch) -> int:
        region, owner = (source.region, source.rank) if isinstance(source, Remote) else (source, rank)
        buffers = launch.buffers
        own: dict[Area, object] = {Area.PARAM: buffers.params, Area.GRAD: buffers.grads, Area.OUT: [buffers.out]}
        if region.area in own:
            tensor = own[region.area][0 if region.area is Area.OUT else region.index]  # type: ignore[index]
            return int(tensor.data_ptr()) + region.offset
        return self.memory[owner].data_ptr() + self.spec.region_start(region, launch.binding) + region.offset
