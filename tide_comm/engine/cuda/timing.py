"""Timing of sampled launches with events on the streams that run them. Nothing on the host or on the GPU waits for these events.

Importing this needs no GPU.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from tide_comm.engine.timing import Timings


@dataclass(frozen=True)
class Start:
    """Where a sample began: a GPU's times are told against this event, and the host's clock when it was recorded.

    Each sample has its own: differences of events are single precision, and an hour away they are a quarter of a millisecond coarse.
    """

    event: Any
    host_s: float


@dataclass(frozen=True)
class Pair:
    since: Start
    first: Any
    last: Any
    waited: bool


def recorded(stream: Any = None) -> Any:
    """A new event with a time, on a stream of PyTorch's or on the current one."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(*([] if stream is None else [stream]))
    return event


class Stopwatch:
    """Pairs of events, read once they have been reached."""

    def __init__(self) -> None:
        self._start: Start | None = None
        self._pairs: deque[Pair] = deque()
        self._last_reduce: Any = None

    @property
    def on(self) -> bool:
        return self._start is not None

    def switch(self, on: bool) -> None:
        """A new sample begins here, or none."""
        self._start = Start(recorded(), time.monotonic()) if on else None
        self._last_reduce = None

    def launched(self, begin: Any, stream: Any, reduces: bool) -> None:
        """A launch whose `begin` is behind its operands has been issued; `stream` is where its point lies."""
        self._pair(begin, recorded(stream), waited=False)
        if reduces:
            self._last_reduce = begin

    def waited(self, before: Any) -> None:
        """The current stream was made to wait after `before`: how far the two lie apart is how long it stood still."""
        self._pair(before, recorded(), waited=True)

    def backward_ended(self) -> None:
        """FSDP2 has let the current stream wait for the reduce-scatters: what it stood still for began where the last one was launched."""
        if self._last_reduce is not None:
            self.waited(self._last_reduce)
            self._last_reduce = None

    def _pair(self, first: Any, last: Any, waited: bool) -> None:
        if self._start is not None:
            self._pairs.append(Pair(self._start, first, last, waited))

    def drain(self) -> Timings:
        """What the GPU has reached by now; the rest comes with a later call."""
        found = Timings()
        for _ in range(len(self._pairs)):
            pair = self._pairs.popleft()
            if not (pair.since.event.query() and pair.first.query() and pair.last.query()):
                self._pairs.append(pair)
                continue
            first, last = (pair.since.host_s + pair.since.event.elapsed_time(e) * 1e-3 for e in (pair.first, pair.last))
            (found.waits if pair.waited else found.launches).append((first, last))
        return found
