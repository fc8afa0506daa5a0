"""An arena on GPUs: one allocation a rank, mapped by all; descriptors travel over the same sockets as the host engine's memory.

Normally the memory is cuMemCreate's. Where one rank cannot export it or map another's (some drivers, virtual GPUs and containers), all
ranks take cudaMalloc and CUDA IPC handles instead: peers reach it just as well, but it fits no multicast object and no NCCL window.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

from tide_comm.engine.base import AREA_ALIGN_BYTES, Exchange
from tide_comm.engine.cuda.agreement import first_objection
from tide_comm.engine.cuda.allocations import IpcMemory, VmmMemory
from tide_comm.engine.cuda.lines import connect_lines
from tide_comm.engine.cuda.together import MulticastObject, join
from tide_comm.engine.host.shared import Connections
from tide_comm.errors import TideError
from tide_comm.plan.layout import align
from tide_comm.plan.topology import Topology

MEMORY_ENV = "TIDE_MEMORY"
"""`ipc` takes CUDA IPC without trying cuMemCreate, to test it. On one rank is enough: all follow."""
CLOSED_WAIT_S = 10.0
"""How long to wait at the end for peers to close memory that may be freed only then."""
_CLOSED = b"c"

logger = logging.getLogger("tide")
_Made = TypeVar("_Made")


@cache
def _say_once(message: str) -> None:
    logger.warning(message)


class CudaArena(Connections):
    """`addresses[r]` is where rank r's arena starts in this process. The current device must be `device`. Collective.

    `how` says what the memory is, `reason` why it is not cuMemCreate's ("" if it is). Raises `TideError`, on all ranks alike, if
    neither kind works. `vmm` and `ipc` make the memory; tests put their own in.

    `topology`: of several machines between which nothing is mapped, because a rail carries what crosses them. Then only mates' arenas have
    an address, the others' is 0; besides mates, the ranks of the same rail are connected (`lines`); and the memory must be cuMemCreate's,
    for no other becomes an NCCL window.

    `lanes`: the ranks of this machine in the order of their lanes, if their arenas are to lie at one address too: `together`; 0 where that
    failed, with the reason in `apart`, the same on all ranks. `part` stands for the driver in tests.
    """

    def __init__(
        self,
        rank: int,
        device: int,
        nbytes: int,
        exchange: Exchange,
        timeout_s: float,
        vmm: VmmMemory | None = None,
        ipc: Callable[[], IpcMemory] = IpcMemory,
        topology: Topology | None = None,
        lanes: Sequence[int] = (),
        part: MulticastObject | None = None,
    ) -> None:
        self.apart = ""
        self.part = part or MulticastObject(device, len(lanes)) if lanes else None
        self.memory: VmmMemory | IpcMemory = vmm or VmmMemory(device)
        self.topology = topology
        try:
            self.reason = self._make_vmm(rank, nbytes, exchange, timeout_s, self.memory)
        except BaseException:
            self.memory.close_opened()
            self.memory.free()
            raise
        if self.reason and topology is not None:
            self.tell(self.reason)
            self.close()
            raise TideError(f"an arena that NCCL's rail can reach takes cuMemCreate's memory: {self.reason}")
        if self.reason:
            if rank == 0:
                _say_once(f"arenas are shared by CUDA IPC instead of cuMemCreate: {self.reason}")
            self.memory = ipc()
            self._make_ipc(rank, nbytes, exchange, self.memory)
        self.how = self.memory.how
        self.arena_bytes = self.memory.nbytes
        if topology is not None:
            self._connect_rail(rank, exchange, timeout_s, topology)
        if self.part is not None:
            self._join_lanes(rank, lanes, self.part, exchange, timeout_s)

    @property
    def together(self) -> int:
        """The address at which all lanes' arenas lie, or 0."""
        return self.part.address if self.part is not None else 0

    def _join_lanes(
        self, rank: int, lanes: Sequence[int], part: MulticastObject, exchange: Exchange, timeout_s: float
    ) -> None:
        if not isinstance(self.memory, IpcMemory) and not self.apart:
            handle = self.memory.own[1] if self.memory.own else 0
            self.apart = join(rank, lanes, part, handle, self.arena_bytes, self.sockets, exchange, timeout_s)
        else:
            self.apart = self.apart or "memory shared by CUDA IPC fits no multicast object"
        if self.apart:
            self.part = None

    def _size_for_lanes(self, nbytes: int, exchange: Exchange) -> int:
        """The arena's size so that it fits a multicast object; as asked where there will be none."""
        part = self.part
        if part is None:
            return nbytes
        failed, fitting = _attempt(lambda: part.bytes_for(nbytes), 0)
        self.apart = first_objection(exchange, failed)
        return nbytes if self.apart else max(exchange(fitting))

    def _connect_rail(self, rank: int, exchange: Exchange, timeout_s: float, topology: Topology) -> None:
        """The ranks of this rail; after that all know whether everybody's connections are there."""
        peers = [p for p in topology.rail(rank) if p != rank]
        nothing: dict[int, socket.socket] = {}
        failed, lines = _attempt(lambda: connect_lines(rank, peers, exchange, timeout_s), nothing)
        self.sockets |= lines
        objection = first_objection(exchange, failed)
        if objection:
            self.tell(objection)
            self.memory.close_opened()
            self.memory.free()
            self.close()
            raise TideError(f"machines do not reach each other: {objection}")

    def _make_vmm(self, rank: int, nbytes: int, exchange: Exchange, timeout_s: float, memory: VmmMemory) -> str:
        """Connects the ranks. Returns why cuMemCreate cannot be used, the same on all ranks; what was made for it is freed then."""
        asked, own = os.environ.get(MEMORY_ENV, ""), 0
        wrong = first_objection(exchange, f'takes "ipc", or nothing; got {asked!r}' if asked not in ("", "ipc") else "")
        if wrong:
            raise TideError(f"{MEMORY_ENV}: {wrong}")
        failed = f"{MEMORY_ENV}=ipc" if asked else ""
        nbytes = self._size_for_lanes(nbytes, exchange)
        if not failed:
            failed, own = _attempt(lambda: memory.create(nbytes), 0)
        reason = first_objection(exchange, failed)
        # Each connection carries a descriptor, if only one that says nothing: the connections themselves are needed in any case.
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if reason else -1
        try:
            size = align(nbytes, AREA_ALIGN_BYTES) if reason else memory.nbytes
            mates = None if self.topology is None else self.topology.mates(rank)
            super().__init__(rank, nothing if reason else memory.fd, size, exchange, timeout_s, mates)
            if not reason:
                mapped, failed = _open_all(rank, own, self.fds, memory.open)
                if self.topology is None:
                    self.addresses = mapped
                else:
                    known = dict(zip(sorted(self.fds), mapped, strict=False))
                    self.addresses = [known.get(peer, 0) for peer in range(self.topology.world)]
                reason = first_objection(exchange, failed)
        finally:
            self.close_fds()
            memory.close_fd()
            if nothing >= 0:
                os.close(nothing)
        if reason:
            memory.close_opened()
            memory.free()
        return reason

    def _make_ipc(self, rank: int, nbytes: int, exchange: Exchange, memory: IpcMemory) -> None:
        failed, (own, handle) = _attempt(lambda: memory.create(nbytes), (0, b""))
        offers = exchange((failed, handle))
        failures = [f"rank {peer}: {theirs}" for peer, (theirs, _) in enumerate(offers) if theirs]
        if not failures:
            handles = {peer: offered for peer, (_, offered) in enumerate(offers)}
            self.addresses, failed = _open_all(rank, own, handles, memory.open)
            failures = [text for text in [first_objection(exchange, failed)] if text]
            if failures:
                memory.close_opened()
                exchange(None)  # the peers have closed this rank's
        if failures:
            memory.free()
            self.tell(failures[0])
            self.close()
            raise TideError(f"no memory that all ranks reach. cuMemCreate: {self.reason}. CUDA IPC: {failures[0]}")

    def free(self) -> None:
        """Unmap everything. Nothing on this rank's GPU may touch an arena any more. To be called after `tell` and before `close`.

        With CUDA IPC, and where all lanes lie at one address, this waits until the peers have closed this rank's memory; where one does
        not, its process having died or being stuck, the memory is left to the end of this process.
        """
        if self.part is not None:
            self.part.unmap()
        self.memory.close_opened()
        if isinstance(self.memory, IpcMemory) or self.part is not None:
            for connection in self.sockets.values():
                try:
                    connection.send(_CLOSED)
                except OSError:
                    pass
            holding = self._not_closed()
            if holding:
                logger.warning("ranks %s still hold this rank's arena: left to the end of the process", holding)
                return
        try:
            if self.part is not None:
                self.part.free()
        finally:
            self.memory.free()

    def _not_closed(self) -> list[int]:
        """Waits for every peer's word that it has closed this rank's memory; returns those from which it did not come."""
        deadline = time.monotonic() + CLOSED_WAIT_S
        waiting, gone = dict(self.sockets), []
        heard = {peer: self.after_bye.get(peer, b"") for peer in waiting}
        while waiting:
            for peer, connection in list(waiting.items()):
                try:
                    data = connection.recv(4096)
                    ended = not data
                except BlockingIOError:
                    data, ended = b"", False
                except OSError:
                    data, ended = b"", True
                # A peer that has not been heard so far says first that it leaves (shared.py); one that failed says that, and frees nothing.
                heard[peer] += data
                if heard[peer][-1:] == _CLOSED and heard[peer][:1] != b"!":
                    del waiting[peer]
                elif ended:
                    gone.append(peer)
                    del waiting[peer]
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if waiting:
                select.select(list(waiting.values()), [], [], min(left, 0.5))
        return sorted([*gone, *waiting])


def _attempt(make: Callable[[], _Made], otherwise: _Made) -> tuple[str, _Made]:
    """(why it failed or "", what was made)."""
    try:
        return "", make()
    except TideError as error:
        return str(error), otherwise


def _open_all(rank: int, own: int, tokens: dict[int, _Made], open_one: Callable[[_Made], int]) -> tuple[list[int], str]:
    """Map every peer's memory: (addresses by rank, why one could not be mapped or "")."""
    addresses = []
    for peer in sorted(tokens):
        if peer == rank:
            addresses.append(own)
            continue
        try:
            addresses.append(open_one(tokens[peer]))
        except TideError as error:
            return addresses, f"rank {peer}'s arena: {error}"
    return addresses, ""
