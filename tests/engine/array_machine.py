"""Carries out what the CUDA engine hands to its executor, for all ranks in one process: each rank strictly in issue order, on plain memory.

What crosses machines can only be put: another machine's arena has no address, as with real machines.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import stub_cuda
import torch

from tide_comm.engine.base import ArenaSpec, Buffers
from tide_comm.engine.cuda import compile as compiled
from tide_comm.engine.cuda import engine as engine_module
from tide_comm.engine.cuda.engine import CudaEngine
from tide_comm.engine.cuda.rail import Channel
from tide_comm.plan import names
from tide_comm.plan.program import Program

DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16, 3: torch.float64, 4: torch.uint8}


class Rail:
    """Stands for `NcclRail`: channels that say whose and for which stream they are."""

    def __init__(self, spec: ArenaSpec, rank: int, *unused: Any) -> None:
        self.channels = {name: Channel(rank * 100 + k, 7) for k, name in enumerate(names.RAIL_STREAMS)}

    def functions(self) -> np.ndarray:
        return np.arange(1, 5, dtype=np.uint64)

    def check(self) -> None:
        pass

    close = check


@dataclass
class Launch:
    ops: np.ndarray
    bases: np.ndarray
    values: np.ndarray
    scale: float
    tag: int
    at: int = 0


class Library(stub_cuda.Library):
    """Keeps tables and launches of one rank, and which streams have a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[np.ndarray] = [np.zeros(0)]
        self.queue: list[Launch] = []
        self.channels: dict[int, int] = {}
        self.streams = 0

    def tide_table(self, handle: Any, table: np.ndarray) -> tuple[int, int]:
        self.tables.append(table.copy())
        return 0, len(self.tables) - 1

    def tide_rail_channel(self, handle: Any, stream: int, comm: int, window: int) -> int:
        self.channels[stream] = comm
        return 0

    def tide_launch(self, handle: Any, ops: Any, streams: Any, bases: Any, values: Any, *rest: Any) -> int:
        super().tide_launch(handle, ops, streams, bases, values, *rest)
        self.queue.append(Launch(ops.copy(), bases.copy(), values.copy(), rest[0], rest[1]))
        return 0


TOGETHER = 1 << 56
"""Where a machine's arenas lie behind one address."""


class ArrayMachine:
    """All ranks' engines with the nccl rail, over memory that they share here. `together`: with a multicast address, behind which a write
    is one to every lane of the machine, and a read by a sum that may is the sum of all, in order of lanes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spec: ArenaSpec, together: bool = False) -> None:
        self.counted: Counter[str] = Counter()
        """Copies to all lanes, sums of the switch and regions that were cleared."""
        self.spec, topology = spec, spec.topology
        self.memory = [torch.zeros(spec.total_bytes, dtype=torch.uint8) for _ in range(topology.world)]
        self.groups: list[tuple[int, int]] = []
        """(rank, puts) of each call of NCCL's."""
        self.engines: list[CudaEngine] = []
        self.libraries: list[Library] = []
        monkeypatch.setattr(CudaEngine, "_try_rail", lambda self, exchange: None)
        for rank in range(topology.world):
            library = Library()
            monkeypatch.setattr(engine_module, "NcclRail", Rail)
            engine = stub_cuda.make(monkeypatch, spec, rank, library=library, rail="nccl")
            for peer in (rank, *topology.mates(rank)):
                engine.base[peer] = self.memory[peer].data_ptr()
            assert all(
                engine.base[p] == 0
                for p in range(topology.world)
                if topology.machine_of(p) != topology.machine_of(rank)
            )
            engine.together = TOGETHER if together else 0
            self.engines.append(engine)
            self.libraries.append(library)

    def run(self, programs: Sequence[Program], slot: int, buffers: Sequence[Buffers], tag: int = 0) -> None:
        """One launch on every rank, to its end; raises `AssertionError` on a deadlock."""
        for engine, program, buffer in zip(self.engines, programs, buffers, strict=True):
            engine.launch(program, slot, buffer, tag)
        self.drain()

    def drain(self) -> None:
        while any(library.queue for library in self.libraries):
            moved = False
            for rank in range(len(self.libraries)):
                while self.libraries[rank].queue and self._step(rank):
                    moved = True
            assert moved, "deadlock in issue order"

    def _step(self, rank: int) -> bool:
        launch = self.libraries[rank].queue[0]
        if launch.at == len(launch.ops):
            self.libraries[rank].queue.pop(0)
            return True
        op = launch.ops[launch.at]
        kind = int(op["kind"])
        dst = int(launch.bases[op["dst_base"]]) + int(op["dst"])
        src = int(launch.bases[op["src_base"]]) + int(op["src"])
        if kind == compiled.PUT:
            return self._put(rank, launch)
        if kind in (compiled.COPY, compiled.COPY2D):
            self.counted["to all"] += dst >= TOGETHER
            for to in self._reached(rank, dst):
                for row in range(int(op["rows"]) or 1):
                    ctypes.memmove(to + row * int(op["dst_pitch"]), src + row * int(op["src_pitch"]), int(op["bytes"]))
        elif kind == compiled.CLEAR:
            self.counted["cleared"] += 1
            ctypes.memset(dst, 0, int(op["bytes"]))
        elif kind in (compiled.WRITE, compiled.WAIT, compiled.AGREE):
            value = launch.tag if op["aux"] < 0 else int(launch.values[op["aux"]])
            word = ctypes.c_uint32.from_address(dst)
            if kind == compiled.WRITE:
                word.value = value
            elif kind == compiled.AGREE and word.value != value:
                return False
            elif kind == compiled.WAIT and (word.value - value) & 0xFFFFFFFF >= 1 << 31:
                return False
        elif kind in (compiled.CAST, compiled.REDUCE):
            self._kernel(rank, launch, op)
        launch.at += 1
        return True

    def _reached(self, rank: int, address: int) -> list[int]:
        """Where an address leads: to one place, or to the same place of every lane."""
        if address < TOGETHER:
            return [address]
        topology, offset = self.spec.topology, address - TOGETHER
        assert offset < self.spec.total_bytes and address % 4 == 0
        return [self.memory[lane].data_ptr() + offset for lane in topology.table[topology.machine_of(rank)]]

    def _put(self, rank: int, launch: Launch) -> bool:
        """A run of puts is one group, and each goes to the window of the machine that `aux` names on this rank's rail."""
        topology, first = self.spec.topology, launch.at
        while launch.at < len(launch.ops):
            op = launch.ops[launch.at]
            if op["kind"] != compiled.PUT or op["stream"] != launch.ops[first]["stream"]:
                break
            assert int(launch.bases[op["dst_base"]]) < self.spec.total_bytes, "the window's offset, not an address"
            offset = int(launch.bases[op["dst_base"]]) + int(op["dst"])
            src = int(launch.bases[op["src_base"]]) + int(op["src"])
            start, nbytes = self.memory[rank].data_ptr(), int(op["bytes"])
            assert start <= src and src + nbytes <= start + self.spec.total_bytes, (
                "a put's source lies in the own window"
            )
            assert 0 < nbytes and offset + nbytes <= self.spec.total_bytes
            assert self.libraries[rank].channels[int(op["stream"])] // 100 == rank, "the stream has a channel"
            peer = topology.rank(int(op["aux"]), topology.lane_of(rank))
            assert topology.machine_of(peer) != topology.machine_of(rank)
            ctypes.memmove(self.memory[peer].data_ptr() + offset, src, nbytes)
            launch.at += 1
        self.groups.append((rank, launch.at - first))
        return True

    def _kernel(self, rank: int, launch: Launch, op: Any) -> None:
        for segment in self.libraries[rank].tables[int(op["src"])]:
            sources = int(op["sources"]) if op["kind"] == compiled.REDUCE else 1
            (into,) = self._views(rank, launch, segment, segment["dst"], int(segment["dst_dtype"]))
            places = [segment["src"][k] for k in range(sources)]
            parts = [
                v for place in places for v in self._views(rank, launch, segment, place, int(segment["src_dtype"]))
            ]
            switched = int(op["kind"]) == compiled.REDUCE and bool(op["flags"] & compiled.MULTIMEM)
            # What is no sum of the switch must not read there: a plain load from a multicast address is undefined.
            assert len(parts) == (self.spec.topology.lanes if switched else sources)
            self.counted["switched"] += switched
            if op["kind"] == compiled.CAST:
                into.copy_(parts[0])
                continue
            total = (into if op["flags"] & compiled.CARRY else parts.pop(0)).float().clone()
            for part in parts:
                total += part.float()
            into.copy_(
                total * torch.tensor(launch.scale, dtype=torch.float32) if op["flags"] & compiled.SCALED else total
            )

    def _views(self, rank: int, launch: Launch, segment: Any, place: Any, dtype: int) -> list[torch.Tensor]:
        address = int(launch.bases[place["base"]]) + int(place["offset"])
        return [self._view(at, segment, place, dtype) for at in self._reached(rank, address)]

    @staticmethod
    def _view(address: int, segment: Any, place: Any, dtype: int) -> torch.Tensor:
        item = DTYPES[dtype].itemsize
        elements, width, pitch = int(segment["elements"]), int(segment["width"]), int(place["pitch"])
        rows = elements // width
        span = ((rows - 1) * pitch + width) * item
        raw = (ctypes.c_uint8 * span).from_address(address)
        # Off their own alignment, elements are looked at through bytes only; torch does not mind.
        flat = (
            torch.frombuffer(raw, dtype=torch.uint8).view(DTYPES[dtype])
            if dtype != 4
            else torch.frombuffer(raw, dtype=torch.uint8)
        )
        return flat.as_strided((rows, width), (pitch, 1))
