"""Communicators and windows of the nccl rail: a stand-in for NCCL, ranks as threads."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from ranks import in_threads

from tide_comm.engine.base import ArenaSpec
from tide_comm.engine.cuda import rail as module
from tide_comm.engine.cuda.rail import NcclRail
from tide_comm.errors import TideError
from tide_comm.plan import names
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology

TOPOLOGY = Topology(((0, 2), (3, 1), (4, 5)))
SPEC = ArenaSpec(TOPOLOGY, 0, 1 << 20, 2, StageSpec(4096, 2, 2))
DEVICE = torch.device("cuda", 0)


class FakeNccl:
    """`fails`: methods that raise, or with "hang:" in front never return before `ended` is set."""

    version = "2.31.2"
    ended = threading.Event()

    def __init__(self, rank: int, log: list[tuple], fails: str = "") -> None:
        self.rank, self.log, self.fails, self.ids, self.broken = rank, log, fails, 0, ""

    def _do(self, what: str, *told: Any) -> None:
        self.log.append((what, *told))
        if self.fails == what:
            raise TideError(f"{what} failed")
        if self.fails == "hang:" + what:
            self.ended.wait(30)

    def unique_id(self) -> bytes:
        self._do("unique_id")
        self.ids += 1
        return f"{self.rank}/{self.ids}".encode()

    def init(self, world: int, unique: bytes, rank: int) -> int:
        self._do("init", world, unique.decode(), rank)
        return 10 * len(self.log)

    def register(self, comm: int, address: int, nbytes: int) -> int:
        self._do("register", comm, address, nbytes)
        return comm + 1

    def deregister(self, comm: int, window: int) -> None:
        self._do("deregister", comm, window)

    def destroy(self, comm: int) -> None:
        self._do("destroy", comm)

    def trouble(self, comm: int) -> str:
        return self.broken

    def addresses(self) -> list[int]:
        return [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    FakeNccl.ended.clear()


def run(fails: dict[int, str], timeout_s: float = 20.0) -> tuple[list[Any], list[list[tuple]]]:
    logs: list[list[tuple]] = [[] for _ in range(TOPOLOGY.world)]

    def body(rank: int, exchange: Any) -> NcclRail:
        def load() -> Any:
            if fails.get(rank) == "load":
                raise TideError("NCCL 2.29.7 is too old")
            return FakeNccl(rank, logs[rank], fails.get(rank, ""))

        return NcclRail(SPEC, rank, exchange, DEVICE, 4096 * rank, 1 << 21, timeout_s, load)

    return in_threads(TOPOLOGY.world, body), logs


def test_a_communicator_a_stream_and_rail() -> None:
    found, logs = run({})
    joined: dict[str, list[tuple[int, int]]] = {}
    for rank, (rail, log) in enumerate(zip(found, logs, strict=True)):
        assert list(rail.channels) == list(names.RAIL_STREAMS) and rail.about == "NCCL 2.31.2"
        for what, *told in log:
            if what == "init":
                joined.setdefault(told[1], []).append((told[2], rank))
                assert told[0] == TOPOLOGY.machines
        windows = [told for what, *told in log if what == "register"]
        assert all(told[1:] == [4096 * rank, 1 << 21] for told in windows) and len(windows) == len(names.RAIL_STREAMS)
        assert all(channel.window == channel.comm + 1 for channel in rail.channels.values())
    # Each unique id brings together one lane's ranks, numbered by machine, and each serves one stream.
    assert len(joined) == 2 * len(names.RAIL_STREAMS)
    for unique, members in joined.items():
        lane = TOPOLOGY.lane_of(int(unique.split("/")[0]))
        assert sorted(members) == [(m, row[lane]) for m, row in enumerate(TOPOLOGY.table)]


@pytest.mark.parametrize(
    ("failing", "says"), [("load", "too old"), ("init", "communicator 'rail'"), ("register", "window")]
)
def test_all_ranks_name_the_first_that_failed(failing: str, says: str) -> None:
    found, logs = run({3: failing, 4: failing})
    assert {str(error) for error in found} == {str(found[0])} and isinstance(found[0], TideError)
    assert "rank 3: " in str(found[0]) and says in str(found[0])
    assert not any(what == "register" for log in logs for what, *_ in log) or failing == "register"


def test_nobody_waits_for_nccl_for_ever() -> None:
    found, _ = run({2: "hang:init"}, timeout_s=0.5)
    FakeNccl.ended.set()
    assert all("rank 2: no answer within 0.5 s" in str(error) for error in found)


def test_a_broken_communicator_is_told() -> None:
    found, _ = run({})
    rail = found[5]
    rail.check()
    rail.nccl.broken = "remote process exited (line mlx5_3)"
    with pytest.raises(TideError, match=r"rail of lane 1 is broken \(stream 'rail'\): remote process exited"):
        rail.check()


def test_closing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found, logs = run({1: ""})
    found[0].close()
    ended = [entry for entry in logs[0] if entry[0] in ("deregister", "destroy")]
    assert [what for what, *_ in ended] == ["deregister", "destroy"] * len(names.RAIL_STREAMS)
    assert not found[0].channels
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    found[1].nccl.fails = "hang:deregister"
    found[1].close()
    FakeNccl.ended.set()
    assert "the nccl rail was not closed (no answer within 0.2 s)" in caplog.text
