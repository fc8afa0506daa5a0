"""What launches and waits took, for metrics. Rank-local: nothing here talks to a peer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tide_comm.plan.program import Program

Interval = tuple[float, float]
"""Start and end, seconds of the machine's monotonic clock."""


def timed_point(program: Program) -> str:
    """The point at which a collective has ended for its consumer; "" for programs that are none (vacate)."""
    return next((point for point in ("arrived", "done") if point in program.points), "")


def covered_s(intervals: Iterable[Interval]) -> float:
    """Seconds in at least one of them. Collectives overlap: a plain sum could exceed the step that they ran in."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@dataclass
class Timings:
    """`launches`: collectives, from where their operands are ready to where their consumer may go on. `waits`: the caller stood still."""

    launches: list[Interval] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)

    def add(self, other: Timings) -> None:
        self.launches += other.launches
        self.waits += other.waits

    @property
    def communication_s(self) -> float:
        """With at least one collective under way."""
        return covered_s(self.launches)

    @property
    def waited_s(self) -> float:
        return covered_s(self.waits)


class HostClock:
    """Intervals that threads note as they end; the caller drains them. Off: nothing is kept."""

    def __init__(self) -> None:
        self.on = False
        # Appending to and popping from a deque take no lock.
        self.launches: deque[Interval] = deque()
        self.waits: deque[Interval] = deque()

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def drain(self) -> Timings:
        return Timings(*([ended.popleft() for _ in range(len(ended))] for ended in (self.launches, self.waits)))
