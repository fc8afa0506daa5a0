"""A CUDA engine without a GPU: the library and the connections are stand-ins, so that binding and the watchdog run on any machine."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from tide_comm.engine.base import ArenaSpec
from tide_comm.engine.cuda import engine as engine_module
from tide_comm.engine.cuda.engine import CudaEngine
from tide_comm.engine.cuda.records import OP
from tide_comm.engine.host.shared import PeerGone


class Library:
    """Notes launches. `busy`: events that have not been reached. Device memory is this process's."""

    def __init__(self) -> None:
        self.launches: list[tuple[np.ndarray, np.ndarray, int]] = []
        """(operations, values, tag) of each."""
        self.busy: set[int] = set()
        self.answers = True

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("tide_"), name
        return lambda *unused: (0, 0) if name in ("tide_engine_create", "tide_stream_create", "tide_table") else 0

    def tide_launch(
        self, handle: Any, ops: np.ndarray, streams: Any, bases: Any, values: np.ndarray, *rest: Any
    ) -> int:
        assert ops.dtype == OP and values.dtype == np.uint32
        self.launches.append((ops.copy(), values.copy(), rest[1]))
        return 0

    def tide_event_busy(self, handle: Any, number: int) -> int:
        return int(number in self.busy)

    def tide_report(self, handle: Any) -> list[int]:
        return [0, 0, 0, 0]

    def tide_peek(self, handle: Any, address: int, out: np.ndarray) -> int:
        ctypes.memmove(out.ctypes.data, address, out.nbytes)
        return 0 if self.answers else 1


class Arena:
    """Every rank's memory, here; `dead` and `left` are ranks."""

    def __init__(
        self,
        rank: int,
        device: int,
        nbytes: int,
        exchange: Any,
        timeout_s: float,
        topology: Any = None,
        lanes: Any = (),
    ) -> None:
        self.together, self.apart = 0, ""
        self.memory = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(exchange(None))]
        mates = range(len(self.memory)) if topology is None else (rank, *topology.mates(rank))
        self.addresses = [m.data_ptr() if r in mates else 0 for r, m in enumerate(self.memory)]
        self.arena_bytes = nbytes
        self.dead: int | None = None
        self.left: list[int] = []
        self.told: str | None = ""
        self.how, self.reason = "this process's memory", ""

    def check(self) -> None:
        if self.dead is not None:
            raise PeerGone(f"rank {self.dead} has died: its process closed the connection")

    def has_left(self) -> list[int]:
        return self.left

    def tell(self, failed: str | None) -> None:
        self.told = failed

    def close(self) -> None:
        pass

    free = close


def make(
    monkeypatch: pytest.MonkeyPatch,
    spec: ArenaSpec,
    rank: int = 0,
    timeout_s: float = 60.0,
    library: Library | None = None,
    rail: str = "loopback",
) -> CudaEngine:
    """An engine whose watchdog does not run: tests call `engine._watch.look()`."""
    library = library or Library()
    monkeypatch.setattr(engine_module, "load", lambda: library)
    monkeypatch.setattr(engine_module, "CudaArena", Arena)
    monkeypatch.setattr(engine_module.Watchdog, "start", lambda self: None)
    monkeypatch.setattr(engine_module, "note_failure", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *unused: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda *unused: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    return CudaEngine(spec, rank, lambda mine: spec.topology.world, timeout_s, torch.device("cuda", 0), rail)  # type: ignore
