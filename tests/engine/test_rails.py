"""Which rail a job gets, who is asked for it, and what the report says."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from ranks import in_threads

from tide_comm import TideConfig
from tide_comm.engine.cuda import multicast
from tide_comm.engine.cuda.multicast import Multicast
from tide_comm.engine.cuda.rma_probe import ARENA, NCCL_OWN, RmaWindow
from tide_comm.errors import TideError
from tide_comm.fsdp import attach as attach_module
from tide_comm.fsdp.rails import Rail, ask_nccl, choose, decide_multicast, needs_nccl
from tide_comm.fsdp.report import Report
from tide_comm.plan.topology import Topology

GPU = torch.device("cuda", 0)
OK = ("", "NCCL 2.31.2, memory made as the arena's registers")
OLD = ("rank 1: NCCL 2.29.7 (/x/libnccl.so.2) is too old: rails need 2.31.2", "")


@pytest.mark.parametrize(
    ("asked", "device", "machines", "hosts", "nccl", "name", "reason"),
    [
        ("auto", "cuda", 2, 1, None, "loopback", "2 emulated machines of one host"),
        ("loopback", "cuda", 2, 1, None, "loopback", "emulated"),
        ("nccl", "cuda", 2, 1, OK, "nccl", "NCCL 2.31.2"),
        ("nccl", "cuda", 2, 1, OLD, "", "rank 1: NCCL 2.29.7"),
        ("auto", "cuda", 3, 3, OK, "nccl", "3 machines; NCCL 2.31.2"),
        ("auto", "cuda", 3, 3, OLD, "", "too old"),
        ("loopback", "cuda", 3, 3, None, "", "copies within one host"),
        ("shm", "cuda", 2, 1, None, "", "not to be had on GPUs"),
        ("auto", "cpu", 2, 1, None, "shm", "2 emulated machines"),
        ("shm", "cpu", 2, 1, None, "shm", "emulated"),
        ("nccl", "cpu", 2, 1, None, "", "not to be had on a CPU"),
        ("auto", "cpu", 2, 2, None, "", "the host engine works within one host"),
    ],
)
def test_choice(asked: str, device: str, machines: int, hosts: int, nccl: Any, name: str, reason: str) -> None:
    found = choose(asked, device, machines, hosts, nccl)
    assert found is not None and found.name == name and reason in found.reason
    assert needs_nccl(asked, device, machines, hosts) == (nccl is not None)


def test_one_machine_has_no_rail() -> None:
    assert choose("nccl", "cuda", 1, 1, None) is None and not needs_nccl("nccl", "cuda", 1, 1)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())


@pytest.mark.parametrize(
    ("window", "problem"),
    [
        (RmaWindow("2.31.2", True, ARENA, "memory made as the arena's registers"), ""),
        (RmaWindow("2.31.2", True, NCCL_OWN, "the arena's kind does not register (x)"), "the arena's kind does not"),
        (RmaWindow("2.29.7", False, "", "rank 1: NCCL 2.29.7 is too old"), "rank 1: NCCL 2.29.7 is too old"),
    ],
)
def test_the_windows_verdict_is_the_same_on_all_ranks(window: RmaWindow, problem: str, no_gpu: None) -> None:
    def probe(exchange: Any, rank: int, world: int, device: int) -> RmaWindow:
        return RmaWindow(f"{window.version}+{rank}", window.ok, window.memory, window.reason)

    found = in_threads(3, lambda rank, exchange: ask_nccl(exchange, rank, 3, GPU, 20.0, probe))
    assert found == [found[0]] * 3 and found[0][0].startswith(problem) and bool(found[0][0]) == bool(problem)
    assert "NCCL " + window.version + "+0" in found[0][1]


def test_a_rank_that_never_answers_ends_in_an_error(no_gpu: None) -> None:
    ended = threading.Event()
    with pytest.raises(TideError, match="no answer within 0.2 s"):
        ask_nccl(lambda mine: [mine], 0, 1, GPU, 0.2, lambda *unused: ended.wait(5))
    ended.set()


def test_nccl_is_asked_only_where_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(exchange: Any, rank: int, world: int, *unused: Any) -> tuple[str, str]:
        asked.append(rank)
        return OK

    monkeypatch.setattr(attach_module, "ask_nccl", ask)
    two = Topology.regular(2, 1)

    def rail(config: TideConfig, hosts: int, problem: str = "") -> Any:
        return in_threads(2, lambda r, e: attach_module._rail(config, GPU, two, hosts, e, r, problem if r == 1 else ""))

    assert rail(TideConfig(), 1) == [Rail("loopback", "2 emulated machines of one host")] * 2 and not asked
    assert rail(TideConfig(rail="loopback"), 2)[0].name == "" and not asked
    broken = rail(TideConfig(), 2, "compute capability 8.0, below 9.0")
    assert broken[0] == broken[1] and "rank 1: compute capability 8.0" in broken[0].reason and not asked
    found = rail(TideConfig(), 2)
    assert [r.name for r in found] == ["nccl", "nccl"] and sorted(asked) == [0, 1]
    assert str(found[0]) == "rail: nccl (2 machines; NCCL 2.31.2, memory made as the arena's registers)"


def test_multicast_is_asked_only_where_it_decides() -> None:
    asked: list[str] = []
    answer = Multicast(False, "rank 1: switched off by NCCL_NVLS_ENABLE=0")

    def decide(config: str, device: int, exchange: Any) -> Multicast:
        asked.append(config)
        return answer

    def ask(config: TideConfig, topology: Topology) -> tuple[bool, str]:
        found = decide_multicast(config, topology, GPU, lambda mine: [mine], decide)
        return found.used, found.line

    pair = Topology.regular(1, 2)
    assert ask(TideConfig(), Topology.regular(2, 1)) == (False, "multicast: no (machines of one GPU)")
    assert ask(TideConfig(multicast="off"), pair) == (False, 'multicast: no (multicast = "off")')
    assert not asked
    with pytest.raises(TideError, match=r'"on" cannot be had: rank 1: switched off by NCCL_NVLS_ENABLE=0'):
        ask(TideConfig(multicast="on"), pair)
    assert ask(TideConfig(), pair) == (False, "multicast: no (rank 1: switched off by NCCL_NVLS_ENABLE=0)")
    answer = Multicast(True, "made")
    line = "multicast: yes (made; pieces of at most 4096 bytes)"
    assert ask(TideConfig(multicast_max_bytes=4096), pair) == (True, line)
    assert asked == ["on", "auto", "auto"]
    found = decide_multicast(TideConfig(), pair, GPU, lambda mine: [mine], decide)
    assert found.outcome("") == "multicast: yes (made; pieces of at most 67108864 bytes)"
    assert found.outcome("rank 1: x") == "multicast: no, lane by lane (rank 1: x)"


def test_on_a_cpu_only_on_runs_programs_for_multicast() -> None:
    def ask(config: TideConfig, lanes: int) -> tuple[bool, str]:
        found = decide_multicast(config, Topology.regular(2, lanes), torch.device("cpu"), lambda mine: [mine])
        return found.used, found.line

    assert ask(TideConfig(), 2) == ask(TideConfig(multicast="off"), 2) == (False, "")
    assert ask(TideConfig(multicast="on"), 1) == (False, "multicast: no (machines of one rank)")
    line = "multicast: yes (host engine: a copy to every lane; pieces of at most 67108864 bytes)"
    assert ask(TideConfig(multicast="on"), 2) == (True, line)


def test_where_multicast_is_switched_off_no_child_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setattr(multicast, "ask_child", lambda *unused: pytest.fail("the probe was started"))
    monkeypatch.setattr(multicast, "device_supports", lambda device: pytest.fail("the driver was asked"))
    pair = Topology.regular(1, 2)
    found = in_threads(2, lambda rank, exchange: decide_multicast(TideConfig(), pair, GPU, exchange).line)
    assert found == ["multicast: no (rank 0: switched off by NCCL_NVLS_ENABLE=0)"] * 2


def test_the_report_names_decisions() -> None:
    text = str(Report(TideConfig(), [], decisions=[str(Rail("nccl", "2 machines; NCCL 2.31.2")), "multicast: no (x)"]))
    assert "rail: nccl (2 machines; NCCL 2.31.2)\nmulticast: no (x)" in text
