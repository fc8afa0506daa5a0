"""Sums over all lanes' memory: on the host engine, and what the CUDA engine's arrays say, carried out here in place of the kernel."""

from __future__ import annotations

import threading

import numpy as np
import peer_sums
import pytest
import torch
from ranks import run_ranks

from tide_comm.engine.base import ArenaSpec
from tide_comm.engine.cuda import compile as compiled
from tide_comm.engine.cuda.compile import Compiled
from tide_comm.engine.cuda.numbers import WordTable
from tide_comm.engine.host.engine import HostEngine
from tide_comm.errors import TideError
from tide_comm.plan import names
from tide_comm.plan.program import Area, Binding, Program, Reduce, Region, Remote, Segment


@pytest.mark.parametrize("world", [2, 3])
def test_on_the_host_engine(world: int) -> None:
    barrier = threading.Barrier(world)

    def body(rank: int, engine: HostEngine) -> None:
        for seed, case in enumerate(peer_sums.cases(world)):
            peer_sums.play(case, seed, engine, rank, torch.device("cpu"), barrier.wait)

    assert run_ranks(peer_sums.arena(world), body) == [None] * world


ARENA = 1 << 40
OUT = 1 << 50


class Gpu:
    """Arenas at (rank + 1) << 40, OUT at 1 << 50, and the reduce kernel with its own indexing."""

    def __init__(self, spec: ArenaSpec, arenas: list[np.ndarray], out: np.ndarray) -> None:
        self.spec, self.arenas, self.out = spec, arenas, out
        self.tables: list[np.ndarray] = []

    def upload(self, table: np.ndarray) -> int:
        self.tables.append(table.copy())
        return len(self.tables) - 1

    def memory(self, address: int, dtype: str) -> np.ndarray:
        if address >= OUT:
            return self.out.view(dtype)[(address - OUT) // np.dtype(dtype).itemsize :]
        arena = self.arenas[address // ARENA - 1].view(dtype)
        return arena[address % ARENA // np.dtype(dtype).itemsize :]

    def run(self, program: Program, slot: int, scale: float) -> None:
        made = Compiled(program, self.spec, self.upload, lambda name: 0, False)
        world = self.spec.topology.world
        bases = made.numbers.arena_part([(r + 1) * ARENA for r in range(world)], Binding(slot, 0, 0, {}, {}))
        bases += [OUT]
        for op in made.for_slot(slot, WordTable(self.spec), lambda key: 0).ops:
            if op["kind"] == compiled.REDUCE:
                self.reduce(op, bases, np.float32(scale))

    def reduce(self, op: np.void, bases: list[int], scale: np.float32) -> None:
        for s in self.tables[int(op["src"])]:
            i = np.arange(int(s["elements"]))
            width = int(s["width"])

            def at(place: np.void, i: np.ndarray = i, width: int = width) -> np.ndarray:
                return np.where(i < width, i, i // width * int(place["pitch"]) + i % width)

            def memory(place: np.void) -> np.ndarray:
                return self.memory(bases[int(place["base"])] + int(place["offset"]), "float32")

            total = memory(s["dst"])[at(s["dst"])] if op["flags"] & compiled.CARRY else None
            for k in range(int(op["sources"])):
                term = memory(s["src"][k])[at(s["src"][k])]
                total = term if total is None else total + term
            assert total is not None
            memory(s["dst"])[at(s["dst"])] = total * (scale if op["flags"] & compiled.SCALED else np.float32(1))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_the_cuda_engine_is_told(world: int) -> None:
    spec = peer_sums.arena(world)
    for seed, case in enumerate(peer_sums.cases(world)):
        if world == 4 and seed % 4:
            continue
        if case.dtype != "float32" or (case.carry and world == 1):
            continue
        arenas = [np.zeros(spec.total_bytes // 4, np.float32) for _ in range(world)]
        start = spec.start(case.area, 0) // 4
        for lane in range(world):
            arenas[lane][start : start + world * peer_sums.BLOCK] = peer_sums.contents(seed, world, lane).numpy()
        for rank in range(world):
            out = np.full(peer_sums.OUT_ELEMENTS, np.nan, np.float32)
            slot = 0 if case.area is Area.SLOT else -1
            Gpu(spec, arenas, out).run(peer_sums.program(case, rank), slot, peer_sums.SCALE)
            np.testing.assert_array_equal(out, peer_sums.expected(case, seed, world, rank).numpy())


@pytest.mark.parametrize("area", [Area.GRAD, Area.PARAM, Area.OUT])
def test_a_callers_memory_cannot_be_read_by_peers(area: Area) -> None:
    segment = Segment((Remote(1, Region(area, 0, 64)),), Region(Area.OUT, 0, 64))
    program = Program("wrong", 0, (Reduce(names.SUM, (segment,), "float32", "float32"),))
    with pytest.raises(TideError, match="own memory"):
        Compiled(program, peer_sums.arena(2), lambda table: 0, lambda name: 0, False)
