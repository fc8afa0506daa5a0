"""Vector clocks: what a stream knows to have happened.

A thread is a stream of a rank, numbered rank by rank. Its clock has a tick for every thread. The own tick stands apart and the rest is an
array that is never written again once others may hold it, so that a signal carries a clock without copying it.

A **wire** is the way of puts and tags from one stream to one peer: it keeps their order, but a write on it has happened only for those who
have seen a word that was raised on it later. Wires have no component in the arrays (there are as many as pairs of ranks). None is
needed: whoever knows of a write on a wire learned it through a wait of the receiver for a word of that wire, so it is enough to remember
which waits those were (`Wire.seen`) and to ask whether one of them is known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Snapshot(NamedTuple):
    """A thread's clock at one tick, and how far a wire was then. `offset`: the thread stands that many numbers further on (a signal from
    another machine that is an image of one sent here, `symmetry`)."""

    known: np.ndarray
    thread: int
    tick: int
    wire: Wire | None = None
    wire_tick: int = 0
    offset: int = 0


class Thread:
    """One stream of one rank."""

    __slots__ = ("index", "tick", "known", "view", "wires", "in_batch")

    def __init__(self, index: int, zeros: np.ndarray, wires: list[Wire]) -> None:
        self.index = index
        self.tick = 0
        self.known = zeros
        self.view = zeros.data  # indexing a memoryview makes no numpy scalar
        self.wires = wires
        self.in_batch = False

    def covers(self, thread: int, tick: int) -> bool:
        """Whether that tick is ordered before what this thread does now; what it does in this very tick is not."""
        if thread == self.index:
            return tick < self.tick
        if thread < len(self.view):
            return self.view[thread] >= tick
        return self.wires[thread - len(self.view)].seen_by(self, tick)

    def snapshot(self, wire: Wire | None = None, offset: int = 0) -> Snapshot:
        return Snapshot(self.known, self.index, self.tick, wire, wire.tick if wire else 0, offset)

    def join(self, other: Snapshot) -> None:
        """From here on this thread knows what `other` knew."""
        if other.wire is not None and other.wire_tick:
            other.wire.note(self.index, other.wire_tick, self.tick)
        offset, size = other.offset, len(self.view)
        thread = (other.thread - offset) % size
        # Who knows a tick of a thread knows all that this thread knew then.
        if thread == self.index or self.view[thread] >= other.tick:
            return
        if offset:
            known = np.empty_like(self.known)
            np.maximum(self.known[: size - offset], other.known[offset:], out=known[: size - offset])
            np.maximum(self.known[size - offset :], other.known[:offset], out=known[size - offset :])
        else:
            known = np.maximum(self.known, other.known)
        known[thread] = other.tick
        self.known = known
        self.view = known.data


class Wire:
    """The way from one stream to one peer. As an accessor: what it writes comes after all that its stream knew, and after its own
    earlier writes. `offset` as in `Snapshot`."""

    __slots__ = ("index", "tick", "sender", "offset", "seen")

    def __init__(self, index: int, sender: Thread, offset: int = 0) -> None:
        self.index = index
        self.tick = 0
        self.sender = sender
        self.offset = offset
        self.seen: dict[int, tuple[list[int], list[int]]] = {}

    def note(self, thread: int, wire_tick: int, tick: int) -> None:
        """Receiver's `thread` has waited, at its own `tick`, for what the wire had done by `wire_tick`."""
        wire_ticks, ticks = self.seen.setdefault(thread, ([], []))
        if not wire_ticks or wire_ticks[-1] < wire_tick:
            wire_ticks.append(wire_tick)
            ticks.append(tick)

    def seen_by(self, who: Thread | Wire, wire_tick: int) -> bool:
        """Whether one of the receiver's waits that cover `wire_tick` is known to `who`."""
        for thread, (wire_ticks, ticks) in self.seen.items():
            first = bisect_left(wire_ticks, wire_tick)
            if first < len(ticks) and who.covers(thread, ticks[first]):
                return True
        return False

    def covers(self, thread: int, tick: int) -> bool:
        if thread == self.index:
            return tick < self.tick
        size = len(self.sender.view)
        if thread >= size:
            return self.sender.wires[thread - size].seen_by(self, tick)
        thread = (thread + self.offset) % size
        return tick <= self.sender.tick if thread == self.sender.index else self.sender.view[thread] >= tick


class Clocks:
    """All threads and wires of a run: `local` ranks are run, of `world` that clocks speak of."""

    def __init__(self, local: int, world: int, streams: Sequence[str]) -> None:
        self.streams = list(streams)
        zeros = np.zeros(world * len(self.streams), np.int32)
        self._wires: list[Wire] = []
        self._wire_of: dict[tuple[int, int], Wire] = {}
        self._wire_names: list[str] = []
        self._number = {stream: number for number, stream in enumerate(self.streams)}
        self.threads = [Thread(index, zeros, self._wires) for index in range(local * len(self.streams))]

    def thread(self, rank: int, stream: str) -> Thread:
        return self.threads[rank * len(self.streams) + self._number[stream]]

    def wire(self, sender: Thread, peer: int, offset: int = 0) -> Wire:
        """The wire from a stream to a peer. `offset` (of the peer's machine) makes it the image that arrives here."""
        found = self._wire_of.get((sender.index, peer))
        if found is None:
            size = len(sender.view)
            found = self._wire_of[sender.index, peer] = Wire(size + len(self._wires), sender, offset)
            self._wires.append(found)
            rank, stream = divmod((sender.index - offset) % size, len(self.streams))
            to = (peer - offset // len(self.streams)) % (size // len(self.streams))
            self._wire_names.append(f"rank {rank}'s stream {f'{self.streams[stream]} to rank {to}'!r}")
        return found

    def existing_wire(self, sender: Thread, peer: int) -> Wire | None:
        return self._wire_of.get((sender.index, peer))

    def name(self, index: int) -> str:
        """Whose thread it is, for messages."""
        size = len(self.threads[0].view)
        if index >= size:
            return self._wire_names[index - size]
        rank, stream = divmod(index, len(self.streams))
        return f"rank {rank}'s stream {self.streams[stream]!r}"
