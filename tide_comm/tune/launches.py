"""Launches of one group's collectives, one after another, and the time between their ends.

Launches follow one another without a pause. The first ones of a turn bring the ranks together and are not counted; from then on none can be
ahead of the others by more than a launch, and the host issues the next while the last one runs. For a group that takes less time than the
host needs to launch it, the host's time is what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tide_comm.engine.base import Buffers, Engine
from tide_comm.plan.all_gather import vacate
from tide_comm.plan.program import Area, Program
from tide_comm.plan.slices import shard_elements
from tide_comm.tune.groups import GroupCase

WARMUP = 2
"""Launches of each value before anything is timed: programs are compiled, connections made."""
ROUNDS = 3
"""Turns of each value; values take turns, so that a slow moment is not one value's alone."""
LAUNCHES = 5
"""Launches a turn; the first follows those of another value and is not counted."""
COUNTED = ROUNDS * (LAUNCHES - 1)

Taken = dict[int, list[list[tuple[float, ...]]]]
"""By value, turn and launch: seconds from the launch's first mark to each of its others."""

SLOTS = 2
"""Slots of the arena: one is gathered into while the other one's vacancy travels."""


class HostMarks:
    """Times of the host, for an engine whose waits block the caller."""

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, first: Any, last: Any) -> float:
        return float(last - first)

    def settle(self) -> None:
        """Everything launched has ended: the host has waited for it."""


class CudaMarks:
    """Events on the current stream; read after `settle`."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) * 1e-3

    def settle(self) -> None:
        torch.cuda.synchronize()


Marks = HostMarks | CudaMarks


class Multiplies:
    """Large bf16 multiplies on the current stream, in the place of a model's: 0.55 TFLOP each, bound by arithmetic."""

    SHAPE = (4096, 8192, 8192)

    def __init__(self, device: torch.device) -> None:
        rows, depth, columns = self.SHAPE
        # Not zeros: a GPU multiplies those faster, for they cost less power.
        self._a = torch.empty(rows, depth, dtype=torch.bfloat16, device=device).normal_()
        self._b = torch.empty(depth, columns, dtype=torch.bfloat16, device=device).normal_()
        self._out = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)

    def __call__(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._out)

    def seconds(self, marks: Marks) -> float:
        """Median of one, alone."""
        self(WARMUP)
        stamps = [marks.mark()]
        for _ in range(COUNTED):
            self(1)
            stamps.append(marks.mark())
        marks.settle()
        taken = sorted(marks.seconds(a, b) for a, b in zip(stamps, stamps[1:], strict=False))
        return taken[len(taken) // 2]


class GroupMemory:
    """One group's shards, gradients and OUT, with numbers as a model has them. Raises `RuntimeError` where memory is short."""

    def __init__(self, engine: Engine, case: GroupCase, device: torch.device) -> None:
        layout = case.layout
        self.params: list[torch.Tensor] = []
        for i, param in enumerate(layout.params):
            dtype = getattr(torch, param.param_dtype)
            if param.in_shard:
                nbytes = param.chunk * dtype.itemsize
                window = engine.window(Area.SHARD, -1, layout.shard_offsets[i], nbytes)
                _filled(torch.empty(0, dtype=dtype, device=device).set_(window))
                # The program reads SHARD, never the caller's memory.
                self.params.append(torch.empty(0, dtype=dtype, device=device))
            else:
                self.params.append(_filled(torch.empty(param.chunk, dtype=dtype, device=device)))
        self.grads: list[torch.Tensor | None] = [None] * len(layout.params)
        self.out: torch.Tensor | None = None
        if case.grad_dtype is None or case.reduce_dtype is None:
            return
        for i in case.trainable:
            shape = layout.params[i].shape
            self.grads[i] = _filled(torch.empty(shape, dtype=getattr(torch, case.grad_dtype), device=device))
        elements = shard_elements(layout, case.trainable)
        self.out = torch.empty(elements, dtype=getattr(torch, case.reduce_dtype), device=device)


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.normal_() if tensor.is_floating_point() else tensor.zero_()


class Launcher:
    """Launches one group's programs on one engine. All ranks call the same methods in the same order."""

    def __init__(self, engine: Engine, memory: GroupMemory, marks: Marks) -> None:
        self.engine = engine
        self.memory = memory
        self.marks = marks
        topology, rank = engine.spec.topology, engine.rank
        self._vacate = vacate(topology, rank)
        self._vacate_reduced = vacate(topology, rank, reduced_from=True)
        self._scale = 1.0 / topology.world
        self._launches = 0

    def _next(self) -> int:
        """A number that is the same on all ranks: tag, and by turns the slot."""
        self._launches += 1
        return self._launches

    def gather(self, program: Program) -> tuple[Any, ...]:
        """Marks before the launch and at its arrival."""
        number = self._next()
        begin = self.marks.mark()
        self.engine.launch(program, number % SLOTS, Buffers(params=self.memory.params), number).wait("arrived")
        end = self.marks.mark()
        self.engine.launch(self._vacate, number % SLOTS)
        return begin, end

    def reduce(
        self, program: Program, gathered: Program | None = None, multiplies: Multiplies | None = None, count: int = 0
    ) -> tuple[Any, ...]:
        """Marks before the launch, with `multiplies` behind the last of `count` of them, and when all has ended.

        `gathered`: with Slot-Reuse, the all-gather into the slot that gradients are then copied into.
        """
        number, memory, engine = self._next(), self.memory, self.engine
        slot = -1
        if gathered is not None:
            slot = number % SLOTS
            engine.launch(gathered, slot, Buffers(params=memory.params), number).wait("arrived")
        marks = [self.marks.mark()]
        # The engine drops the list's gradients when they have been read.
        buffers = Buffers(grads=list(memory.grads), out=memory.out, scale=self._scale)
        launched = engine.launch(program, slot, buffers, number)
        if multiplies is not None:
            multiplies(count)
            marks.append(self.marks.mark())
        launched.wait("done")
        marks.append(self.marks.mark())
        if gathered is not None:
            engine.launch(self._vacate_reduced, slot)
        return tuple(marks)

    def turns(self, runs: Mapping[int, Callable[[], tuple[Any, ...]]]) -> Taken:
        """`ROUNDS` turns of each value. The loops are fixed: collectives run in them, and a rank that decided by its own clock would leave
        the others waiting."""
        for run in runs.values():
            for _ in range(WARMUP):
                run()
        marks: dict[int, list[list[tuple[Any, ...]]]] = {value: [] for value in runs}
        for _ in range(ROUNDS):
            for value, run in runs.items():
                marks[value].append([run() for _ in range(LAUNCHES)][1:])
        self.marks.settle()

        def seconds(first: Any, *others: Any) -> tuple[float, ...]:
            return tuple(self.marks.seconds(first, other) for other in others)

        return {value: [[seconds(*launch) for launch in turn] for turn in turns] for value, turns in marks.items()}
