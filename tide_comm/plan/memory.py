"""The checker's memory: what each byte holds, who wrote it and who has read it since.

Contents are symbolic and linear: a run of bytes holds elements `element`, `element + 1`, ... of a tag, `item` bytes each. Tags are
interned (`Tags`), so that comparing what two runs hold takes no time however long a sum has become.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


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


Piece = tuple[int, int, int, int]
"""(bytes, interned tag, element, item): a Content and how far it goes."""


def cut_piece(piece: Piece, nbytes: int) -> Piece:
    """What is left of a piece after its first `nbytes`."""
    total, tag, element, item = piece
    if nbytes % item:
        raise RaceError(f"a region cuts an element of {item} bytes after {nbytes % item}")
    return (total - nbytes, tag, element + nbytes // item, item)


AROUND = ("scaled", "rounded")
"""Tags around another: its elements times the launch's scale; its elements rounded to less than fp32."""
NOTHING = ("nothing",)
"""Bytes that nobody wrote and that travel as padding between blocks."""
ZERO = ("zero",)
"""Cleared bytes: in a sum they are no term."""
SUMS = ("sum", "unordered")
"""Tags of sums, from left to right or in whatever order a switch adds."""


class Tags:
    """Tags as numbers. A sum is interned by the numbers of its terms: ("sum", ((tag, offset), ...)), and so is ("scaled", tag)."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}
        self.flat: list[tuple] = []

    def number(self, flat: tuple) -> int:
        """The number of a tag whose terms are numbers already."""
        found = self._numbers.get(flat)
        if found is None:
            found = self._numbers[flat] = len(self.flat)
            self.flat.append(flat)
        return found

    def sum_of(self, terms: tuple[tuple[int, int], ...]) -> int:
        """The number of a sum from left to right. One that starts from another sum goes on with it: (a + b) + c is a + b + c, to the
        bit; and a sum of one term is that term. That is what running sums over several batches come to."""
        first, offset = terms[0]
        if offset == 0:
            if len(terms) == 1:
                return first
            if self.flat[first][0] == "sum":
                terms = (*self.flat[first][1], *terms[1:])
        return self.number(("sum", terms))

    def unordered_sum_of(self, terms: tuple[tuple[int, int], ...]) -> int:
        """The number of a sum in no defined order. One that starts from another such sum has its terms too, and one of one term is it."""
        if len(terms) == 1 and not terms[0][1]:
            return terms[0][0]
        flat: list[tuple[int, int]] = []
        for tag, offset in terms:
            inside = self.flat[tag]
            flat += [(t, o + offset) for t, o in inside[1]] if inside[0] == "unordered" else [(tag, offset)]
        return self.number(("unordered", tuple(sorted(flat))))

    def intern(self, tag: tuple) -> int:
        """The number of a tag that is written out."""
        if tag[0] == "unordered":
            return self.unordered_sum_of(tuple((self.intern(term), offset) for term, offset in tag[1]))
        if tag[0] == "sum":
            return self.sum_of(tuple((self.intern(term), offset) for term, offset in tag[1]))
        if tag[0] in AROUND:
            return self.number((tag[0], self.intern(tag[1])))
        return self.number(tag)

    def written_out(self, number: int) -> tuple:
        flat = self.flat[number]
        if flat[0] in SUMS:
            return (flat[0], tuple((self.written_out(term), offset) for term, offset in flat[1]))
        if flat[0] in AROUND:
            return (flat[0], self.written_out(flat[1]))
        return flat

    def content(self, piece: Piece) -> Content:
        return Content(self.written_out(piece[1]), piece[2], piece[3])


class Accessor(Protocol):
    """Who reads or writes: a thread at its present tick (`clocks`)."""

    index: int
    tick: int

    def covers(self, thread: int, tick: int) -> bool:
        """Whether that tick of that thread is ordered before this access."""


class Run:
    """Bytes with one history. `readers`: the last tick at which each thread read them since they were written; None: nobody did."""

    __slots__ = ("start", "end", "tag", "element", "item", "writer", "tick", "launch", "readers")

    def __init__(
        self,
        start: int,
        end: int,
        content: tuple[int, int, int],
        stamp: tuple[int, int, int],
        readers: dict[int, int] | None = None,
    ) -> None:
        self.start = start
        self.end = end
        self.tag, self.element, self.item = content
        self.writer, self.tick, self.launch = stamp
        self.readers = readers

    def cut(self, start: int, end: int) -> Run:
        before = start - self.start
        if before % self.item:
            raise RaceError(f"a region cuts an element of {self.item} bytes after {before % self.item}")
        content = (self.tag, self.element + before // self.item, self.item)
        readers = dict(self.readers) if self.readers else None
        return Run(start, end, content, (self.writer, self.tick, self.launch), readers)


class RaceError(Exception):
    """Two accesses that nothing orders, or bytes read that nobody wrote."""


class Tenants:
    """The groups that use one slot of one rank, one after another, where only machine 0 is run.

    A renumbering of machines moves each group's pieces by that group's layout, so bytes that two groups do not share on machine 0 may be
    shared on another machine. Here every access for one group must therefore be ordered with every access for another, whatever the bytes.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        self._name = name
        self._tenant: str | None = None
        self._clock = 0
        self._used: dict[str, dict[int, int]] = {}
        """By group: the last tick of each thread that used the slot for it."""
        self._latest: dict[str, int] = {}
        self._compared: dict[tuple[int, str], int] = {}

    def enter(self, group: str, who: Accessor) -> bool:
        """`who` uses the slot for a group; whether that is a change. Raises `RaceError` unless all uses for others come before."""
        known = self._compared.get((who.index, group), 0)
        for other, latest in self._latest.items():
            if other != group and latest > known:  # what came before once comes before for ever
                for thread, tick in self._used[other].items():
                    if not who.covers(thread, tick):
                        raise RaceError(f"{group} takes the slot while {self._name(thread)} uses it for {other}")
        self._clock += 1
        self._compared[who.index, group] = self._latest[group] = self._clock
        self._used.setdefault(group, {})[who.index] = who.tick
        changed = self._tenant != group
        self._tenant = group
        return changed


class Space:
    """One area of one rank: disjoint runs in order of address. `name` says for messages who a thread is."""

    def __init__(self, name: Callable[[int], str]) -> None:
        self.starts: list[int] = []
        self.runs: list[Run] = []
        self._name = name

    def _touching(self, start: int, end: int) -> tuple[int, int]:
        """Indices [first, last) of the runs that overlap [start, end)."""
        runs = self.runs
        first = bisect_right(self.starts, start) - 1
        if first < 0 or runs[first].end <= start:
            first += 1
        last, count = first, len(runs)
        while last < count and runs[last].start < end:
            last += 1
        return first, last

    def _replace(self, first: int, last: int, runs: list[Run]) -> None:
        self.runs[first:last] = runs
        self.starts[first:last] = [run.start for run in runs]

    def read(
        self, start: int, end: int, who: Accessor, then_written: bool = False, hole: int | None = None
    ) -> list[Piece]:
        """What stands from start to end; raises `RaceError` unless every writer comes before, and at bytes that nobody wrote.

        `then_written`: the same operation goes on to write these bytes itself, element by element (a running sum). `hole`: the tag that
        stands for bytes that nobody wrote, where they are no error.
        """
        if start == end:
            return []
        first, last = self._touching(start, end)
        runs = self.runs[first:last]
        for run in runs:
            if not who.covers(run.writer, run.tick):
                lo, hi = max(run.start, start), min(run.end, end)
                raise RaceError(f"bytes {lo}..{hi} are read before the write by {self._name(run.writer)} is awaited")
        if runs and (runs[0].start < start or runs[-1].end > end):
            runs = self._split(first, last, start, end)
        found: list[Piece] = []
        at = start
        for run in runs:
            if run.start > at:
                found.append(self._hole(at, run.start, end, hole))
            found.append((run.end - run.start, run.tag, run.element, run.item))
            at = run.end
        if at < end:
            found.append(self._hole(at, end, end, hole))
        if not then_written:
            index, tick = who.index, who.tick
            for run in runs:
                if run.readers is None:
                    run.readers = {index: tick}
                else:
                    run.readers[index] = tick
        return found

    @staticmethod
    def _hole(start: int, stop: int, end: int, hole: int | None) -> Piece:
        if hole is None:
            raise RaceError(f"bytes {start}..{end} were never written")
        return (stop - start, hole, 0, 1)

    def _split(self, first: int, last: int, start: int, end: int) -> list[Run]:
        """Cut the runs first..last at start and end; returns those between."""
        parts: list[Run] = []
        middle: list[Run] = []
        for run in self.runs[first:last]:
            lo, hi = max(run.start, start), min(run.end, end)
            if run.start < lo:
                parts.append(run.cut(run.start, lo))
            inside = run if run.start == lo and run.end == hi else run.cut(lo, hi)
            parts.append(inside)
            middle.append(inside)
            if hi < run.end:
                parts.append(run.cut(hi, run.end))
        self._replace(first, last, parts)
        return middle

    def write(self, start: int, pieces: Sequence[Piece], who: Accessor, launch: int, once: bool) -> None:
        """Write pieces one after another from `start`; raises `RaceError` unless all earlier writers and readers come before.

        `once`: a byte that this launch wrote already may not be written again.
        """
        stamp = (who.index, who.tick, launch)
        new: list[Run] = []
        at = start
        for nbytes, tag, element, item in pieces:
            if nbytes:
                new.append(Run(at, at + nbytes, (tag, element, item), stamp))
                at += nbytes
        if at == start:
            return
        first, last = self._touching(start, at)
        covers = who.covers
        for run in self.runs[first:last]:
            if not covers(run.writer, run.tick):
                raise RaceError(
                    f"bytes {self._overlap(run, start, at)} are overwritten while {self._name(run.writer)} writes them"
                )
            if once and run.launch == launch:
                raise RaceError(f"bytes {self._overlap(run, start, at)} are written twice in one launch")
            if run.readers:
                for reader, tick in run.readers.items():
                    if not covers(reader, tick):
                        overlap, name = self._overlap(run, start, at), self._name(reader)
                        raise RaceError(f"bytes {overlap} are overwritten before {name} has read them")
        if first < last:
            head, tail = self.runs[first], self.runs[last - 1]
            if head.start < start:
                new.insert(0, head.cut(head.start, start))
            if tail.end > at:
                new.append(tail.cut(at, tail.end))
        self._replace(first, last, new)

    @staticmethod
    def _overlap(run: Run, start: int, end: int) -> str:
        return f"{max(run.start, start)}..{min(run.end, end)}"
