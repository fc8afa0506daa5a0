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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tide_comm.engine.base import Engine, Exchange
from tide_comm.engine.cuda.agreement import first_objection
from tide_comm.engine.cuda.library import check, load
from tide_comm.errors import TideError
from tide_comm.plan.program import Area, Program
from tide_comm.plan.trial import TRIAL_BYTES, lanes_trial

TRIAL_MOST_BYTES = 4 * 1024 * 1024
"""That each lane writes to the others in a turn of the trial: as long under way as a piece."""
TRIAL_TURNS = 8
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
    """Write to all lanes, and read their sum, as programs will, before anything depends on it. Collective; returns what came out wrong, the
    same on all ranks, or "". What arrives is looked at as compute would, right behind the wait: also that signals do not overtake it is
    tried. `synchronize` waits for the device. Raises `TideError`, on all ranks alike, if the engine fails at it."""
    spec, rank = engine.spec, engine.rank
    lanes = spec.topology.table[spec.topology.machine_of(rank)]
    lane, count = spec.topology.lane_of(rank), len(lanes)
    nbytes = min(spec.slot_bytes_aligned // count, TRIAL_MOST_BYTES) // TRIAL_BYTES * TRIAL_BYTES if spec.slots else 0
    program = lanes_trial(spec.topology, rank, nbytes, adds=spec.inbox is not None)
    if not program.ops:
        return ""

    def words(area: Area, rows: int, row_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        storage: Any = engine.window(area, 0, 0, rows * row_bytes)
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage).view(rows, -1)

    slot = words(Area.SLOT, count, nbytes, torch.int32) if nbytes else None
    seat, total = (words(a, 1, TRIAL_BYTES, torch.float32) if spec.inbox else None for a in (Area.INBOX, Area.PARTIAL))
    wrong: Counter[str] = Counter()
    for turn in range(TRIAL_TURNS):
        if slot is not None:
            slot[lane] = rank * TRIAL_TURNS + turn + 1
        if seat is not None:
            seat.fill_(float(2**lane + turn))
        synchronize()
        exchange(None)  # every lane's values stand there
        failed, right = _played(engine, program, _right(lanes, turn, slot, total))
        if stuck := first_objection(exchange, failed):
            raise TideError(f'multicast was set up, but a trial of it did not end: {stuck}; take multicast = "off"')
        synchronize()
        wrong.update(what for what, fine in right.items() if not bool(fine))
    for used in (slot, seat, total):
        if used is not None:
            used.zero_()
    synchronize()
    said = "; ".join(f"{what} in {times} of {TRIAL_TURNS} turns" for what, times in wrong.items())
    return first_objection(exchange, said)


Checks = dict[str, tuple[str, Callable[[], torch.Tensor]]]
"""By point of a program: what is wrong if the check, done right behind that point, says no."""


def _right(lanes: Sequence[int], turn: int, slot: torch.Tensor | None, total: torch.Tensor | None) -> Checks:
    checks: Checks = {}
    if slot is not None:
        want = torch.tensor([[rank * TRIAL_TURNS + turn + 1] for rank in lanes], dtype=torch.int32, device=slot.device)
        checks["arrived"] = (
            f"what lanes wrote ({slot[0].nbytes} bytes each) was not there",
            lambda: (slot == want).all(),
        )
    if total is not None:
        added = float(2 ** len(lanes) - 1 + len(lanes) * turn)
        checks["added"] = ("the lanes' sum was another", lambda: (total == added).all())
    return checks


def _played(engine: Engine, program: Program, checks: Checks) -> tuple[str, dict[str, torch.Tensor]]:
    """(why a program did not get to its points or "", by what would be wrong whether it is right); the engine's own limit ends the wait."""
    right: dict[str, torch.Tensor] = {}
    try:
        launched = engine.launch(program, 0 if engine.spec.slots else -1)
        for point, (what, look) in checks.items():
            launched.wait(point)
            right[what] = look()
        while not all(launched.reached(point) for point in program.points):
            time.sleep(0.0005)
    except TideError as error:
        return str(error), {}
    return "", right
