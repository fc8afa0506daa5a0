"""The checker's memory: what each byte holds, who wrote it and who has read it since.

Contents are symbolic and linear: a run of bytes holds elements `element`, `element + 1`, ... of `tag`, `item` bytes each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Thread = tuple[int, str]
Clock = Mapping[Thread, int]


class Content(NamedTuple):
    """Elements of `tag` from `element` on, `item` bytes each. `tag` is a tuple that says what the elements are."""

    tag: Any
    element: int
    item: int

    def at(self, nbytes: int) -> Content:
        """The same run, `nbytes` further on. Raises `RaceError` inside an element: programs move whole ones."""
        if nbytes % self.item:
            raise RaceError(f"a region cuts an element of {self.item} bytes after {nbytes % self.item}")
        return Content(self.tag, self.element + nbytes // self.item, self.item)


HOLE = Content(("nothing",), 0, 1)
"""Bytes that nobody wrote and that travel as padding between blocks."""


class Stamp(NamedTuple):
    """When and by whom: `tick` of a thread, in launch number `launch`."""

    thread: Thread
    tick: int
    launch: int

    def before(self, clock: Clock) -> bool:
        return clock.get(self.thread, 0) >= self.tick


@dataclass
class Run:
    start: int
    end: int
    content: Content
    writer: Stamp
    readers: dict[Thread, Stamp] = field(default_factory=dict)

    def cut(self, start: int, end: int) -> Run:
        return Run(start, end, self.content.at(start - self.start), self.writer, dict(self.readers))


def total(summands: tuple) -> tuple:
    """The tag of an fp32 sum of (tag, offset in elements) from left to right: one summand alone is itself, and (a + b) + c is a + b + c."""
    first, offset = summands[0]
    if len(summands) == 1 and not offset:
        return first
    if first[0] == "sum" and not offset:
        summands = (*first[1], *summands[1:])
    return ("sum", summands)


class RaceError(Exception):
    """Two accesses that nothing orders, or bytes read that nobody wrote."""


class Space:
    """One area of one rank: disjoint runs in order of address."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.runs: list[Run] = []

    def _touching(self, start: int, end: int) -> slice:
        first = max(0, bisect_right(self.starts, start) - 1)
        if first < len(self.runs) and self.runs[first].end <= start:
            first += 1
        last = first
        while last < len(self.runs) and self.runs[last].start < end:
            last += 1
        return slice(first, last)

    def _replace(self, where: slice, runs: list[Run]) -> None:
        self.runs[where] = runs
        self.starts[where] = [run.start for run in runs]

    def peek(self, start: int, end: int, holes: bool = False) -> list[tuple[int, Content]]:
        """(bytes, content) from start to end; raises `RaceError` at bytes that nobody wrote, unless `holes` may be among them."""
        found: list[tuple[int, Content]] = []
        at = start
        for run in self.runs[self._touching(start, end)]:
            if run.start > at:
                if not holes:
                    break
                found.append((run.start - at, HOLE))
                at = run.start
            stop = min(run.end, end)
            found.append((stop - at, run.content.at(at - run.start)))
            at = stop
        if at < end and holes:
            found.append((end - at, HOLE))
        elif at < end:
            raise RaceError(f"bytes {at}..{end} were never written")
        return found

    def read(
        self, start: int, end: int, stamp: Stamp, clock: Clock, then_written: bool = False, holes: bool = False
    ) -> list[tuple[int, Content]]:
        """As `peek`, by `stamp`; raises `RaceError` unless every writer comes before.

        `then_written`: the same operation goes on to write these bytes itself, element by element (a running sum).
        """
        if start == end:
            return []
        where = self._touching(start, end)
        pieces: list[Run] = []
        for run in self.runs[where]:
            lo, hi = max(run.start, start), min(run.end, end)
            if not run.writer.before(clock) or (run.writer.thread, run.writer.tick) == (stamp.thread, stamp.tick):
                raise RaceError(f"bytes {lo}..{hi} are read before the write by {_who(run.writer)} is awaited")
            if run.start < lo:
                pieces.append(run.cut(run.start, lo))
            middle = run.cut(lo, hi)
            if not then_written:
                middle.readers[stamp.thread] = stamp
            pieces.append(middle)
            if hi < run.end:
                pieces.append(run.cut(hi, run.end))
        found = self.peek(start, end, holes)
        self._replace(where, pieces)
        return found

    def write(self, start: int, pieces: Iterable[tuple[int, Content]], stamp: Stamp, clock: Clock, once: bool) -> None:
        """Write runs one after another from `start`; raises `RaceError` unless all earlier writers and readers come before.

        `once`: a byte that this launch wrote already may not be written again.
        """
        new: list[Run] = []
        at = start
        for nbytes, content in pieces:
            if nbytes:
                new.append(Run(at, at + nbytes, content, stamp))
                at += nbytes
        if at == start:
            return
        where = self._touching(start, at)
        kept: list[Run] = []
        tail: list[Run] = []
        for run in self.runs[where]:
            lo, hi = max(run.start, start), min(run.end, at)
            if not run.writer.before(clock) or (run.writer.thread, run.writer.tick) == (stamp.thread, stamp.tick):
                raise RaceError(f"bytes {lo}..{hi} are overwritten while {_who(run.writer)} writes them")
            if once and run.writer.launch == stamp.launch:
                raise RaceError(f"bytes {lo}..{hi} are written twice in one launch")
            for reader in run.readers.values():
                if not reader.before(clock) or (reader.thread, reader.tick) == (stamp.thread, stamp.tick):
                    raise RaceError(f"bytes {lo}..{hi} are overwritten before {_who(reader)} has read them")
            if run.start < lo:
                kept.append(run.cut(run.start, lo))
            if hi < run.end:
                tail.append(run.cut(hi, run.end))
        self._replace(where, kept + new + tail)


def _who(stamp: Stamp) -> str:
    rank, stream = stamp.thread
    return f"rank {rank}'s stream {stream!r}"
