"""Counters of this machine's network lines before and after a run, for its summary: pause, ECN, retransmissions, order.

Each machine's first rank reads and logs its own lines: no collective is made for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from tide_comm.doctor.counters import LineCounters, difference_lines, read_all
from tide_comm.limited import within

LIMIT_S = 10.0
"""A network card's firmware can be slow to answer, and a run must not wait for it for ever."""

NOTHING: list[LineCounters] = []


class NetworkWatch:
    """`start` before the first step, `lines` after the last one. `read` and `environment` are for tests."""

    def __init__(
        self,
        read: Callable[[], list[LineCounters]] = read_all,
        environment: Mapping[str, str] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._read = read
        self._limit_s = limit_s
        env = os.environ if environment is None else environment
        self._reads = env.get("LOCAL_RANK", "0") == "0"
        self._several = int(env.get("WORLD_SIZE", "1")) > int(env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", "1")))
        self._before: list[LineCounters] | None = None
        self._problem = ""

    def start(self) -> None:
        if self._reads:
            self._before, self._problem = within(self._limit_s, self._read, NOTHING)

    def lines(self) -> list[str]:
        """[] on all ranks but each machine's first, and on a machine alone without network lines."""
        if self._before is None:
            return []
        if self._problem:
            return [f"network counters not readable: {self._problem}"]
        after, problem = within(self._limit_s, self._read, NOTHING)
        if problem:
            return [f"network counters not readable: {problem}"]
        if not self._before and not after and self._several:
            return ["network counters not readable: /sys/class/infiniband shows no network line"]
        return difference_lines(self._before, after)
