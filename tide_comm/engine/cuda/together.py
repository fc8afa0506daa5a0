"""The arenas of a machine at one address: what is written there reaches all its GPUs, what is read there is their sum.

A multicast object takes several steps that all lanes take together: one makes it and hands its descriptor to the others, each adds its GPU,
then each binds its arena, then each maps it. Every step ends in an exchange, so that where one lane fails all of them give up alike. On
some hosts such an object does harm: whether one may be made at all is decided before (`multicast.py`), and each call looks again.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tide_comm.engine.base import Engine, Exchange
from tide_comm.engine.cuda.agreement import first_objection
from tide_comm.engine.cuda.library import check, load
from tide_comm.errors import TideError
from tide_comm.plan.program import Area, Program
from tide_comm.plan.trial import TRIAL_BYTES, lanes_trial

_OBJECT = b"m"
"""Comes with the object's descriptor."""


class MulticastObject:
    """One rank's part of the object. `device`: its GPU; `lanes`: how many GPUs. All raise `TideError`, on this rank alone."""

    def __init__(self, device: int, lanes: int) -> None:
        self.device, self.lanes = device, lanes
        self.object = self.made = self.address = self.nbytes = 0
        self.bound = False

    def bytes_for(self, nbytes: int) -> int:
        """The arena's size so that it fits an object."""
        code, rounded = load().tide_multicast_bytes(self.lanes, nbytes)
        check(code, "the size of a multicast object")
        return int(rounded)

    def create(self, nbytes: int) -> int:
        """Returns a descriptor that the caller closes, for all lanes to open, this one too."""
        code, made, fd = load().tide_multicast_create(self.lanes, nbytes)
        check(code, "a multicast object")
        self.made, self.nbytes = made, nbytes
        return int(fd)

    def open(self, fd: int, nbytes: int) -> None:
        """Through the object as it was made, GPU 0's copies would run on the engines that serve the host (pytorch #192530); it is kept all
        the same, for others may open it as long as it lives (torchcomms #3506)."""
        code, self.object = load().tide_multicast_import(fd)
        check(code, "another rank's multicast object")
        self.nbytes = nbytes

    def add(self) -> None:
        check(load().tide_multicast_add(self.object, self.device), "this GPU")

    def bind(self, memory: int) -> None:
        """`memory`: the handle of this rank's arena."""
        check(load().tide_multicast_bind(self.object, memory, self.nbytes), "this arena")
        self.bound = True

    def map(self) -> None:
        code, self.address = load().tide_multicast_map(self.object, self.device, self.lanes, self.nbytes)
        check(code, "mapping all lanes' arenas")

    def unmap(self) -> None:
        """This rank writes to the others no more."""
        address, self.address = self.address, 0
        if address:
            check(load().tide_multicast_unmap(address, self.nbytes), "unmapping all lanes' arenas")

    def free(self) -> None:
        """The others must have unmapped it: what they write would have nowhere to go."""
        self.unmap()
        handles, bound = (self.object, self.made), self.bound
        self.object, self.made, self.bound = 0, 0, False
        failed: list[TideError] = []
        for handle, held in zip(handles, (bound, False), strict=True):
            try:
                if handle:
                    code = load().tide_multicast_free(handle, self.device, int(held), self.nbytes)
                    check(code, "freeing a multicast object")
            except TideError as error:
                failed.append(error)
        if failed:
            raise failed[0]


def join(
    rank: int,
    lanes: Sequence[int],
    part: MulticastObject,
    memory: int,
    nbytes: int,
    sockets: Mapping[int, socket.socket],
    exchange: Exchange,
    timeout_s: float,
) -> str:
    """Map the arenas of this machine's `lanes` (ranks) at `part.address`. Collective over the arena's ranks, of whatever machine. Returns
    why it cannot be, the same on all ranks, everything given back; "" if it is done. `memory`: the handle of this rank's arena, of
    `nbytes`, which must be what `bytes_for` said.
    """
    first, others = lanes[0], lanes[1:]

    def make() -> None:
        if rank != first:
            return
        fd = part.create(nbytes)
        try:
            for other in others:
                socket.send_fds(sockets[other], [_OBJECT], [fd])
            part.open(fd, nbytes)
        finally:
            os.close(fd)

    def take() -> None:
        if rank == first:
            return
        fd = _taken(sockets[first], first, timeout_s)
        try:
            part.open(fd, nbytes)
        finally:
            os.close(fd)

    # Binding waits in the driver, without a limit, until every GPU has been added: so all agree before it.
    steps: tuple[Callable[[], None], ...] = (make, take, part.add, lambda: part.bind(memory), part.map)
    for step in steps:
        objection = _agreed(step, exchange)
        if objection:
            if step in (make, take) and rank != first:
                _unread(sockets[first])
            # Nobody's mapping is left when memory is unbound.
            undone = [_agreed(undo, exchange) for undo in (part.unmap, part.free)]
            return "; ".join([objection, *(why for why in undone if why)])
    return ""


def _agreed(step: Callable[[], None], exchange: Exchange) -> str:
    failed = ""
    try:
        step()
    except Exception as error:  # whatever it is, the others wait in the exchange
        failed = str(error) or type(error).__name__
    return first_objection(exchange, failed)


def _unread(connection: socket.socket) -> None:
    """Takes away a descriptor that was sent before all gave up: what is left there would be read as a peer's farewell."""
    try:
        for fd in socket.recv_fds(connection, 1, 1)[1]:
            os.close(fd)
    except OSError:
        pass


def _taken(connection: socket.socket, source: int, timeout_s: float) -> int:
    """The descriptor that `source` sends. All of its lanes have agreed that it was sent, so it is on its way."""
    deadline = time.monotonic() + timeout_s
    while not select.select([connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if time.monotonic() >= deadline:
            raise TideError(f"rank {source} sent no multicast object within {timeout_s:g} s")
    message, received, _, _ = socket.recv_fds(connection, 1, 1)
    if message != _OBJECT or len(received) != 1:
        raise TideError(f"rank {source} sent {message!r} with {len(received)} descriptors; expected a multicast object")
    return received[0]


def try_lanes(engine: Engine, exchange: Exchange, synchronize: Callable[[], None]) -> str:
    """Write to all lanes, and read their sum where programs will, before anything depends on it. Collective; returns what came out wrong,
    the same on all ranks, or "". `synchronize` waits for the device. Raises `TideError`, on all ranks alike, if the engine fails at it."""
    spec, rank = engine.spec, engine.rank
    lanes = spec.topology.table[spec.topology.machine_of(rank)]
    lane = spec.topology.lane_of(rank)
    program = lanes_trial(spec.topology, rank, gathers=spec.slots > 0, adds=spec.inbox is not None)
    if not program.ops:
        return ""

    def words(area: Area, count: int, dtype: torch.dtype) -> torch.Tensor:
        storage: Any = engine.window(area, 0, 0, count * TRIAL_BYTES)
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage).view(count, -1)

    slot = words(Area.SLOT, len(lanes), torch.int32) if spec.slots else None
    seat, total = (words(a, 1, torch.float32) if spec.inbox else None for a in (Area.INBOX, Area.PARTIAL))
    if slot is not None:
        slot[lane] = rank + 1
    if seat is not None:
        seat.fill_(float(2**lane))
    synchronize()
    exchange(None)  # every lane's values stand there
    failed = _ended(engine, program)
    if stuck := first_objection(exchange, failed):
        raise TideError(f'multicast was set up, but a trial of it did not end: {stuck}; take multicast = "off"')
    synchronize()
    wrong: list[str] = []
    if slot is not None and (got := slot.tolist()) != (want := [[r + 1] * 4 for r in lanes]):
        wrong.append(f"lanes wrote {want}, here stands {got}")
    if total is not None and (added := total.tolist()) != [[float(2 ** len(lanes) - 1)] * 4]:
        wrong.append(f"the lanes' sum is {2 ** len(lanes) - 1}, read was {added}")
    for used in (slot, seat, total):
        if used is not None:
            used.zero_()
    synchronize()
    return first_objection(exchange, "; ".join(wrong))


def _ended(engine: Engine, program: Program) -> str:
    """Why a program did not get to its points, or ""; the engine's own limit ends the wait."""
    try:
        launched = engine.launch(program, 0 if engine.spec.slots else -1)
        while not all(launched.reached(point) for point in program.points):
            time.sleep(0.0005)
    except TideError as error:
        return str(error)
    return ""
