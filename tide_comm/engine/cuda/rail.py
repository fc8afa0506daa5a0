"""The rail between machines over NCCL's one-sided puts: its communicators and the arena's windows.

A rail is the ranks of one lane on all machines. It has a communicator for each stream that writes to other machines (why: `rail_ops`),
in which a rank's number is its machine's. Through each of them the whole arena is one symmetric window.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from tide_comm.engine.base import ArenaSpec, Exchange
from tide_comm.engine.cuda.agreement import first_objection
from tide_comm.engine.cuda.nccl import Nccl
from tide_comm.errors import TideError
from tide_comm.limited import within
from tide_comm.plan import names
from tide_comm.progress import progress

CLOSE_S = 10.0
"""How long NCCL may take to let go: it waits for the other machines, which may have died."""

logger = logging.getLogger("tide")
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Channel:
    """What one stream puts through: handles of NCCL's."""

    comm: int
    window: int


class NcclRail:
    """Collective over the arena's ranks, with `device` current. `address`, `nbytes`: this rank's arena, a single cuMemCreate allocation.

    Raises `TideError`, on all ranks alike, naming the first rank that failed and NCCL's words; also past `timeout_s`, for NCCL itself waits
    for ever for a machine that does not come.
    """

    def __init__(
        self,
        spec: ArenaSpec,
        rank: int,
        exchange: Exchange,
        device: torch.device,
        address: int,
        nbytes: int,
        timeout_s: float,
        make: Callable[[], Nccl] = Nccl,
    ) -> None:
        self.spec, self.rank, self.exchange = spec, rank, exchange
        self.device, self.timeout_s = device, timeout_s
        self.address, self.nbytes = address, nbytes
        topology = spec.topology
        self.machine, self.lane = topology.machine_of(rank), topology.lane_of(rank)
        self.channels: dict[str, Channel] = {}
        self.nccl = self._together("NCCL", make)
        what = f"a rail of {topology.machines} machines ({len(names.RAIL_STREAMS)} communicators, {nbytes / 2**20:.0f} MiB)"
        with progress(logger, f"making {what}"):
            self._connect()

    @property
    def about(self) -> str:
        return f"NCCL {self.nccl.version}"

    def functions(self) -> np.ndarray:
        """For the executor's `tide_rail`."""
        return np.array(self.nccl.addresses(), np.uint64)

    def _connect(self) -> None:
        topology, nccl = self.spec.topology, self.nccl
        first = self.machine == 0
        mine = self._together(
            "ncclGetUniqueId", lambda: [nccl.unique_id() for _ in names.RAIL_STREAMS] if first else []
        )
        offered = self.exchange(mine)[topology.rank(0, self.lane)]
        for stream, unique in zip(names.RAIL_STREAMS, offered, strict=True):

            def init(unique: bytes = unique) -> int:
                return nccl.init(topology.machines, unique, self.machine)

            comm = self._together(f"communicator {stream!r}", init)
            self.channels[stream] = Channel(comm, 0)

            def register(comm: int = comm) -> int:
                return nccl.register(comm, self.address, self.nbytes)

            window = self._together(f"the arena's window of {stream!r}", register)
            self.channels[stream] = Channel(comm, window)

    def _together(self, what: str, make: Callable[[], _Made]) -> _Made:
        """Collective: what `make` returned, if it did on all ranks."""

        def here() -> _Made:
            # A thread begins with device 0.
            with torch.cuda.device(self.device):
                return make()

        made, failed = within(self.timeout_s, here, None)
        objection = first_objection(self.exchange, failed)
        if objection:
            raise TideError(f"the nccl rail cannot be made: {what}: {objection}")
        assert made is not None
        return made

    def check(self) -> None:
        """Raises `TideError` if NCCL reports that a communicator is broken. Does not wait."""
        for stream, channel in self.channels.items():
            if trouble := self.nccl.trouble(channel.comm):
                raise TideError(f"the nccl rail of lane {self.lane} is broken (stream {stream!r}): {trouble}")

    def close(self) -> None:
        """Collective in effect; nothing of this rank may be under way. What NCCL does not let go of in time is left to the process."""

        def here() -> bool:
            with torch.cuda.device(self.device):
                for channel in self.channels.values():
                    self.nccl.deregister(channel.comm, channel.window)
                    self.nccl.destroy(channel.comm)
            return True

        _, failed = within(CLOSE_S, here, False)
        if failed:
            logger.warning("TIDE: the nccl rail was not closed (%s): left to the end of the process", failed)
        self.channels = {}
