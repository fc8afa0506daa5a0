"""Which memory an arena takes, and how it is let go of: ranks as threads, with memory that only keeps a record."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from ranks import in_threads

from tide_comm.engine.cuda import memory as module
from tide_comm.engine.cuda.memory import MEMORY_ENV, CudaArena
from tide_comm.engine.host.shared import PeerGone
from tide_comm.errors import TideError
from tide_comm.plan.topology import Topology

MIB = 1 << 20


class Record:
    """What happened, over all ranks, in order: (rank, kind, what, whose)."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, str, int]] = []
        self.lock = threading.Lock()

    def __call__(self, *event: Any) -> None:
        with self.lock:
            self.events.append(event)

    def of(self, kind: str, what: str) -> list[tuple[int, str, str, int]]:
        return [e for e in self.events if e[1:3] == (kind, what)]

    def check_freed(self, world: int, kind: str) -> None:
        """Every rank's memory was freed once, after everybody's mapping of it had been closed."""
        assert sorted(e[3] for e in self.of(kind, "free")) == list(range(world))
        for event in self.of(kind, "free"):
            before = self.events[: self.events.index(event)]
            opened = sum(e[1:] == (kind, "open", event[3]) for e in self.events)
            assert sum(e[1:] == (kind, "close", event[3]) for e in before) == opened


class FakeVmm:
    how = "cuMemCreate"

    def __init__(self, rank: int, record: Record, fails: str = "") -> None:
        self.rank, self.record, self.fails = rank, record, fails
        self.nbytes, self.fd, self.made, self.opened = 0, -1, False, 0

    def create(self, nbytes: int) -> int:
        import os

        if self.fails == "create":
            raise TideError("cuMemExportToShareableHandle: error 801")
        self.nbytes, self.made = -(-nbytes // (2 * MIB)) * 2 * MIB, True
        self.fd = os.memfd_create("fake")
        self.record(self.rank, "vmm", "create", self.rank)
        return 1000 + self.rank

    def open(self, fd: int) -> int:
        if self.fails == "open":
            raise TideError("cuMemImportFromShareableHandle: error 1")
        self.opened += 1
        self.record(self.rank, "vmm", "open", -1)
        return 2000 + self.rank

    def close_fd(self) -> None:
        import os

        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def close_opened(self) -> None:
        self.opened = 0

    def free(self) -> None:
        self.close_fd()
        if self.made:
            self.record(self.rank, "vmm", "free", self.rank)
        self.made = False


class FakeIpc(module.IpcMemory):
    def __init__(self, rank: int, record: Record, fails: str = "") -> None:
        super().__init__()
        self.rank, self.record, self.fails, self.peers = rank, record, fails, []

    def create(self, nbytes: int) -> tuple[int, bytes]:
        if self.fails == "create":
            raise TideError("cudaMalloc: error 2")
        self.nbytes, self.own = -(-nbytes // (2 * MIB)) * 2 * MIB, 3000 + self.rank
        return self.own, bytes([self.rank]) * 64

    def open(self, handle: bytes) -> int:
        if self.fails == "open":
            raise TideError("cudaIpcOpenMemHandle: error 201")
        self.peers.append(handle[0])
        self.record(self.rank, "ipc", "open", handle[0])
        return 4000 + handle[0]

    def close_opened(self) -> None:
        time.sleep(0.02 * self.rank)
        for peer in self.peers:
            self.record(self.rank, "ipc", "close", peer)
        self.peers = []

    def free(self) -> None:
        if self.own:
            self.record(self.rank, "ipc", "free", self.rank)
        self.own = 0


def run(
    world: int,
    record: Record,
    body: Callable[[int, CudaArena], Any],
    vmm: dict[int, str] | None = None,
    ipc: dict[int, str] | None = None,
    topology: Topology | None = None,
) -> list[Any]:
    """Arenas of `world` ranks; `vmm` and `ipc` say what fails on which rank. Returns results or exceptions."""

    def made(rank: int, exchange: Any) -> Any:
        fake: Any = FakeVmm(rank, record, (vmm or {}).get(rank, ""))
        other = (ipc or {}).get(rank, "")
        arena = CudaArena(rank, 0, 3 * MIB, exchange, 20.0, fake, lambda: FakeIpc(rank, record, other), topology)
        return body(rank, arena)

    return in_threads(world, made)


def leave(arena: CudaArena) -> tuple[str, str, list[int], int]:
    found = (arena.how, arena.reason, arena.addresses, arena.arena_bytes)
    arena.tell(None)
    arena.free()
    arena.close()
    return found


def test_normally_it_is_cumemcreate() -> None:
    record = Record()
    results = run(3, record, lambda rank, arena: leave(arena))
    for rank, (how, reason, addresses, nbytes) in enumerate(results):
        assert (how, reason, nbytes) == ("cuMemCreate", "", 4 * MIB)
        assert addresses == [1000 + rank if peer == rank else 2000 + rank for peer in range(3)]
    assert len(record.of("vmm", "free")) == 3 and not record.of("ipc", "open")


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("create", "rank 1: cuMemExportToShareableHandle: error 801"),
        ("open", "rank 1: rank 0's arena: cuMemImportFromShareableHandle: error 1"),
    ],
)
def test_if_it_fails_on_one_rank_all_take_ipc(where: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    record = Record()
    module._say_once.cache_clear()
    for _ in range(2):
        results = run(3, record, lambda rank, arena: leave(arena), vmm={1: where})
    for rank, (how, why, addresses, nbytes) in enumerate(results):
        assert (how, why, nbytes) == ("CUDA IPC", reason, 4 * MIB)
        assert addresses == [3000 + rank if peer == rank else 4000 + peer for peer in range(3)]
    assert [r.getMessage() for r in caplog.records] == [
        f"arenas are shared by CUDA IPC instead of cuMemCreate: {reason}"
    ]
    assert len(record.of("vmm", "free")) == len(record.of("vmm", "create"))


def test_ipc_memory_is_freed_after_every_peer_has_closed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_ENV, "ipc")
    record = Record()

    def body(rank: int, arena: CudaArena) -> str:
        arena.tell(None)
        if rank == 0:
            # Peers' words may arrive while this one still watches its connections.
            time.sleep(0.3)
            arena.check()
        arena.free()
        arena.close()
        return arena.reason

    assert run(4, record, body) == [f"rank 0: {MEMORY_ENV}=ipc"] * 4
    record.check_freed(4, "ipc")
    assert not record.of("vmm", "create")


def test_memory_that_a_peer_may_still_touch_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_ENV, "ipc")
    record = Record()

    def body(rank: int, arena: CudaArena) -> None:
        arena.tell("stuck" if rank == 2 else None)
        if rank != 2:
            arena.free()
        arena.close()

    started = time.monotonic()
    assert run(3, record, body) == [None] * 3
    assert not record.of("ipc", "free") and len(record.of("ipc", "close")) == 4
    assert time.monotonic() - started < module.CLOSED_WAIT_S / 2, "a closed connection ends the wait"


@pytest.mark.parametrize("where", ["create", "open"])
def test_if_neither_works_all_ranks_say_so(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record()
    results = run(3, record, lambda rank, arena: leave(arena), vmm={0: "create"}, ipc={2: where})
    assert len({str(r) for r in results}) == 1 and isinstance(results[0], TideError)
    assert "rank 0: cuMemExport" in str(results[0]) and "CUDA IPC: rank 2: " in str(results[0])
    if where == "open":
        record.check_freed(3, "ipc")


def test_a_wrong_value_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_ENV, "vmm")
    for error in run(2, Record(), lambda rank, arena: leave(arena)):
        assert isinstance(error, TideError) and 'takes "ipc"' in str(error)


def test_over_a_rail_only_mates_are_mapped() -> None:
    """Two machines of two lanes: each rank maps its mate, and is connected to its mate and its rail peer."""
    record, topology = Record(), Topology.regular(2, 2)
    peers: dict[int, list[int]] = {}

    def body(rank: int, arena: CudaArena) -> Any:
        peers[rank] = sorted(arena.sockets)
        return leave(arena)

    results = run(4, record, body, topology=topology)
    for rank, (how, reason, addresses, nbytes) in enumerate(results):
        mate, rail = rank ^ 1, rank ^ 2
        assert (how, reason, nbytes) == ("cuMemCreate", "", 4 * MIB) and peers[rank] == sorted([mate, rail])
        assert [a > 0 for a in addresses] == [peer in (rank, mate) for peer in range(4)] and addresses[
            rank
        ] == 1000 + rank
    assert len(record.of("vmm", "open")) == 4 and len(record.of("vmm", "free")) == 4


def test_a_rail_peer_that_dies_is_noticed() -> None:
    found: dict[int, str] = {}
    dead, kept = threading.Event(), []  # kept: an arena that is collected closes its connections as well

    def body(rank: int, arena: CudaArena) -> None:
        kept.append(arena)
        if rank == 3:
            arena.close()
            dead.set()
            return
        dead.wait(10)
        time.sleep(0.2)
        try:
            arena.check()
        except PeerGone as gone:
            found[rank] = str(gone)

    assert run(4, Record(), body, topology=Topology.regular(2, 2)) == [None] * 4
    assert sorted(found) == [1, 2] and all("rank 3 has died" in text for text in found.values())


def test_a_rail_takes_no_other_memory() -> None:
    results = run(2, Record(), lambda rank, arena: None, vmm={1: "create"}, topology=Topology.regular(2, 1))
    for error in results:
        assert isinstance(error, TideError) and "rank 1: cuMemExportToShareableHandle" in str(error), error
        assert "takes cuMemCreate's memory" in str(error)
