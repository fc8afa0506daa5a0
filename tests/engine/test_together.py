"""The arenas of a machine at one address: how lanes get there together, or all give up; and the trial. No driver is asked here."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import exchange_for, in_threads, run_ranks
from test_cuda_memory import MIB, FakeIpc, FakeVmm, Record

from tide_comm.engine.base import ArenaSpec
from tide_comm.engine.cuda import library
from tide_comm.engine.cuda import together as module
from tide_comm.engine.cuda.memory import MEMORY_ENV, CudaArena
from tide_comm.engine.cuda.together import MulticastObject, try_lanes
from tide_comm.engine.host.engine import HostEngine
from tide_comm.errors import TideError
from tide_comm.plan.program import Area, CopyAll, LaneSum, Program, Reduce
from tide_comm.plan.slices import InboxSpec, StageSpec
from tide_comm.plan.topology import Topology
from tide_comm.plan.trial import lanes_trial

STEPS = ("bytes", "create", "open", "add", "bind", "map")


class Part(MulticastObject):
    """Keeps a record of what the driver would be asked, and in which order over the lanes."""

    def __init__(self, rank: int, lanes: int, log: list[tuple[int, str]], fails: str = "") -> None:
        super().__init__(rank, lanes)
        self.rank, self.log, self.fails = rank, log, fails

    def _do(self, what: str) -> None:
        if self.fails == what:
            raise TideError(f"{what}: error 999")
        self.log.append((self.rank, what))

    def bytes_for(self, nbytes: int) -> int:
        self._do("bytes")
        return -(-nbytes // (32 * MIB)) * 32 * MIB

    def create(self, nbytes: int) -> int:
        self._do("create")
        self.made, self.nbytes = 7, nbytes
        return os.memfd_create(f"object{self.rank}")

    def open(self, fd: int, nbytes: int) -> None:
        self._do("open")
        self.name = os.readlink(f"/proc/self/fd/{fd}")
        self.object, self.nbytes = 8, nbytes

    def add(self) -> None:
        self._do("add")

    def bind(self, memory: int) -> None:
        self._do("bind")
        assert memory == 500 + self.rank
        self.bound = True

    def map(self) -> None:
        self._do("map")
        self.address = 9000 + self.rank

    def unmap(self) -> None:
        if self.address:
            self._do("unmap")
        self.address = 0

    def free(self) -> None:
        if self.object or self.made:
            self._do("unbind" if self.bound else "release")
        self.object, self.made, self.bound = 0, 0, False


def arenas(
    topology: Topology, log: list[tuple[int, str]], body: Any, fails: dict[int, str] | None = None, mapped: bool = True
) -> list[Any]:
    """`body(rank, arena, part)` on every rank; `mapped`: machines map each other, as emulated ones do."""
    record = Record()

    def main(rank: int, exchange: Any) -> Any:
        lanes: Sequence[int] = topology.table[topology.machine_of(rank)]
        part = Part(rank, len(lanes), log, (fails or {}).get(rank, ""))
        vmm: Any = FakeVmm(rank, record)
        vmm.own = (1000 + rank, 500 + rank)
        apart = None if mapped else topology
        arena = CudaArena(
            rank, rank, 3 * MIB, exchange, 20.0, vmm, lambda: FakeIpc(rank, record), apart, lanes=lanes, part=part
        )
        return body(rank, arena, part)

    return in_threads(topology.world, main)


def leave(rank: int, arena: CudaArena, part: Part) -> tuple[int, str, int, str]:
    found = (arena.together, arena.apart, arena.arena_bytes, getattr(part, "name", "").split(" ")[0])
    arena.tell(None)
    arena.free()
    arena.close()
    return found


def places(log: list[tuple[int, str]], what: str) -> list[int]:
    return [i for i, (_, done) in enumerate(log) if done == what]


@pytest.mark.parametrize("mapped", [True, False])
def test_lanes_of_each_machine_take_one_step_after_the_other(mapped: bool) -> None:
    """Ranks out of order, two machines: the first lane of each makes its object, all open it, it too."""
    topology, log = Topology(((3, 0), (1, 2))), []
    found = arenas(topology, log, leave, mapped=mapped)
    for rank, (together, apart, nbytes, name) in enumerate(found):
        assert (together, apart, nbytes) == (9000 + rank, "", 32 * MIB)
        assert name == f"/memfd:object{3 if rank in (0, 3) else 1}"
    assert sorted(rank for rank, what in log if what == "create") == [1, 3]
    for what, count in (("open", 4), ("add", 4), ("bind", 4), ("map", 4), ("unmap", 4), ("unbind", 4)):
        assert len(places(log, what)) == count
    for machine in topology.table:
        steps = [entry for entry in log if entry[0] in machine]
        for before, after in (("add", "bind"), ("bind", "map"), ("map", "unmap"), ("unmap", "unbind")):
            assert max(places(steps, before)) < min(places(steps, after)), (before, after)


@pytest.mark.parametrize("where", STEPS)
def test_where_one_lane_fails_all_are_apart(where: str) -> None:
    """The arena is as it would have been, and nothing of the object is left."""
    topology, log = Topology.regular(2, 2), []
    culprit = 2 if where == "create" else 3
    for rank, (together, apart, nbytes, _) in enumerate(arenas(topology, log, leave, {culprit: where})):
        assert (together, apart) == (0, f"rank {culprit}: {where}: error 999"), rank
        assert nbytes == (4 if where == "bytes" else 32) * MIB
    assert len(places(log, "unmap")) == len(places(log, "map")) and len(places(log, "unbind")) == len(
        places(log, "bind")
    )
    held = {rank for rank, what in log if what in ("create", "open")}
    assert {rank for rank, what in log if what in ("unbind", "release")} == held
    if where == "map":
        assert max(places(log, "unmap")) < min(places(log, "unbind"))


def test_memory_of_another_kind_fits_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_ENV, "ipc")
    log: list[tuple[int, str]] = []
    for together, apart, _, _ in arenas(Topology.regular(1, 2), log, leave):
        assert (together, apart) == (0, "memory shared by CUDA IPC fits no multicast object")
    assert {what for _, what in log} == {"bytes"}


def test_a_lane_that_has_died_may_still_be_written_to() -> None:
    """Its peers leave the object, and their memory, to the end of their processes."""
    log: list[tuple[int, str]] = []
    gone = threading.Barrier(2)

    def body(rank: int, arena: CudaArena, part: Part) -> None:
        if rank == 1:
            arena.close()
        gone.wait(10)
        if rank == 0:
            arena.tell(None)
            arena.free()
            arena.close()

    assert arenas(Topology.regular(1, 2), log, body) == [None, None]
    assert (0, "unmap") in log and not places(log, "unbind")


@pytest.mark.parametrize("how", ["the first lane cannot open it", "the second lane cannot be sent it"])
def test_a_descriptor_that_nobody_takes_is_no_farewell(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first lane sent before it failed must not stay in the connections: its peers would take it for one that has left."""
    real, sent, lock = socket.send_fds, [], threading.Barrier(3)

    def send(connection: socket.socket, data: Any, fds: Any) -> int:
        if data == [b"m"] and how.startswith("the second"):
            sent.append(1)
            if len(sent) == 2:
                raise OSError("no buffer space")
        return real(connection, data, fds)

    def body(rank: int, arena: CudaArena, part: Part) -> tuple[str, list[int]]:
        arena.check()  # as the watchdog does
        left = arena.has_left()
        lock.wait(20)
        return leave(rank, arena, part)[1], left

    monkeypatch.setattr(socket, "send_fds", send)
    fails = {0: "open"} if how.startswith("the first") else {}
    found = arenas(Topology.regular(1, 3), [], body, fails)
    assert [left for _, left in found] == [[], [], []] and len({apart for apart, _ in found}) == 1
    assert found[0][0].startswith("rank 0: ")


def test_both_handles_go_back_though_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[tuple[int, int]] = []

    class Library:
        def tide_multicast_free(self, handle: int, device: int, bound: int, nbytes: int) -> int:
            freed.append((handle, bound))
            return 10 if bound else 0

        def tide_error(self) -> str:
            return "cuMulticastUnbind: error 1"

    monkeypatch.setattr(module, "load", Library)
    monkeypatch.setattr(library, "load", Library)
    part = MulticastObject(0, 2)
    part.object, part.made, part.bound, part.nbytes = 8, 7, True, MIB
    with pytest.raises(TideError, match="freeing a multicast object: cuMulticastUnbind: error 1"):
        part.free()
    part.free()
    assert freed == [(8, 1), (7, 0)]


def spec_of(machines: int, lanes: int, slots: int = 1) -> ArenaSpec:
    inbox = InboxSpec(4096, min(2, lanes), lanes, True) if machines > 1 else None
    return ArenaSpec(
        Topology.regular(machines, lanes), 0, 4096 if slots else 0, slots, StageSpec(4096, 3, lanes), inbox
    )


@pytest.mark.parametrize(("machines", "lanes", "slots"), [(1, 2, 1), (1, 3, 1), (2, 2, 1), (2, 2, 0)])
def test_the_trial_on_the_host_engine(machines: int, lanes: int, slots: int) -> None:
    """A write to every lane and a sum of all; twice, so that counts go on; memory is as before."""
    spec = spec_of(machines, lanes, slots)
    exchange = exchange_for(spec.topology.world)

    def body(rank: int, engine: HostEngine) -> list[Any]:
        said = [try_lanes(engine, exchange(rank), lambda: None) for _ in range(2)]
        left = []
        for area in ([Area.SLOT] if slots else []) + ([Area.INBOX, Area.PARTIAL] if machines > 1 else []):
            storage: Any = engine.window(area, 0, 0, 4096)
            left.append(int(torch.empty(0, dtype=torch.uint8).set_(storage).count_nonzero()))
        return [said, sum(left)]

    assert run_ranks(spec, body) == [[["", ""], 0]] * spec.topology.world


class Faulty:
    """A host engine whose switch does not do one thing, on one rank."""

    def __init__(self, engine: HostEngine, lost: type) -> None:
        self.engine, self.lost = engine, lost

    def launch(self, program: Program, slot: int = -1) -> Any:
        kept = [op for op in program.ops if not isinstance(op, self.lost)]
        return self.engine.launch(Program("faulty", program.rank, tuple(kept), program.points, program.arrivals), slot)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        (CopyAll, "what lanes wrote (1048576 bytes each) was not there in 8 of 8 turns"),
        (Reduce, "the lanes' sum was another in 8 of 8 turns"),
    ],
)
def test_a_trial_that_comes_out_wrong_is_told_to_all(lost: type, says: str) -> None:
    exchange = exchange_for(4)

    def body(rank: int, engine: HostEngine) -> str:
        faulty: Any = Faulty(engine, lost) if rank == 1 else engine
        return try_lanes(faulty, exchange(rank), lambda: None)

    said = run_ranks(spec_of(2, 2), body)
    assert len(set(said)) == 1 and says in said[0] and said[0].startswith("rank 0" if lost is CopyAll else "rank 1")


def test_what_the_trial_uses() -> None:
    """What programs use where they reach all lanes at once, and nothing without a place in the arena."""
    program = lanes_trial(Topology.regular(2, 2), 3, nbytes=64, adds=True)
    assert [op.lanes for op in program.ops if isinstance(op, CopyAll)] == [(2, 3)]
    sums = [s for op in program.ops if isinstance(op, Reduce) for seg in op.segments for s in seg.sources]
    assert [s.ranks for s in sums if isinstance(s, LaneSum)] == [(2, 3)]
    assert not lanes_trial(Topology.regular(1, 2), 0, nbytes=0, adds=False).ops
