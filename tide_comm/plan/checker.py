"""The checker: proves programs and sequences of them before any engine runs them.

It carries out every rank's operations on symbolic memory with vector clocks. Signals only count up and nothing consumes them, so what an
operation waits for does not depend on the interleaving: one run decides for all whether the sequence can deadlock, and the clocks
decide whether every pair of conflicting accesses is ordered. It accepts if

- no read meets a write that is not ordered before it, no write meets a read or write that is not ordered before it;
- each destination byte (SLOT, OUT) is written once a launch, and everything that is used holds what the layout alone
  demands (`demands`);
- all operations complete, also when each rank runs them strictly in issue order, one at a time (hardware queues can be
  shared);
- every word has one writer stream, and `arrivals` says how many signals it sees; every tag posted is compared; nothing
  lies outside its area.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.memory import Clock, Content, RaceError, Space, Stamp, Thread, total
from tide_comm.plan.program import (
    After,
    Agree,
    Area,
    Binding,
    Cast,
    Copy,
    EventKey,
    Op,
    Post,
    Program,
    Put,
    Record,
    Reduce,
    Region,
    Remote,
    Signal,
    Source,
    Use,
    Wait,
    WordKey,
    tag_place,
)
from tide_comm.plan.render import op_text


class CheckError(Exception):
    """What is wrong with a sequence, with rank, launch and operation."""


@dataclass(frozen=True)
class Launch:
    """One bound program (or a caller's step) of one rank. `group` separates the callers' memory (PARAM, GRAD, OUT) of different groups."""

    program: Program
    binding: Binding
    group: str
    number: int


@dataclass(frozen=True)
class Issued:
    op: Op
    launch: Launch


DESTINATIONS = (Area.SLOT, Area.OUT)


class Checker:
    """Checks one sequence: `issued[r]` are rank r's operations in issue order. `ring`: places in STAGE. `limits`: bytes of an area (of one
    slot, place, inbox set), for those that have a limit."""

    def __init__(
        self, issued: Sequence[Sequence[Issued]], ring: int = 1, limits: Mapping[Area, int] | None = None
    ) -> None:
        self.issued = issued
        self.ring = ring
        self.limits = limits or {}

    def check(self) -> None:
        """Raises `CheckError` if the sequence is not accepted."""
        self._check_arrivals()
        self._check_writers()
        self._check_tags()
        self._run(in_issue_order=False, memory=True)
        self._run(in_issue_order=True, memory=False)

    # Static checks

    def _launches(self) -> dict[int, dict[int, Launch]]:
        by_number: dict[int, dict[int, Launch]] = defaultdict(dict)
        for rank, items in enumerate(self.issued):
            for item in items:
                by_number[item.launch.number][rank] = item.launch
        return by_number

    def _check_arrivals(self) -> None:
        for launches in self._launches().values():
            sent: Counter[tuple[int, WordKey]] = Counter()
            declared: Counter[tuple[int, WordKey]] = Counter()
            for rank, launch in launches.items():
                for (peer, word), count in launch.program.signals.items():
                    sent[peer, launch.binding.word(word)] += count
                for word, count in launch.program.arrivals.items():
                    declared[rank, launch.binding.word(word)] += count
            if sent != declared:
                wrong = next(k for k in sent | declared if sent[k] != declared[k])
                name = next(iter(launches.values())).program.name
                raise CheckError(
                    f"{name}: rank {wrong[0]}'s word {wrong[1]} is signalled {sent[wrong]} times, its program counts on {declared[wrong]}"
                )

    def _check_writers(self) -> None:
        writer: dict[tuple[int, WordKey], Thread] = {}
        for rank, items in enumerate(self.issued):
            for item in items:
                if isinstance(item.op, (Signal, Put)):
                    key = (item.op.peer, item.launch.binding.word(item.op.word))
                    first = writer.setdefault(key, (rank, item.op.stream))
                    if first != (rank, item.op.stream):
                        raise CheckError(
                            f"rank {key[0]}'s word {key[1]} has two writers: {first} and {(rank, item.op.stream)}"
                        )

    def _check_tags(self) -> None:
        """Every tag that is posted in a launch is compared in it, or ranks could disagree unnoticed."""
        open_tags: Counter[tuple[int, int, int, int]] = Counter()
        for rank, items in enumerate(self.issued):
            for item in items:
                number = item.launch.number
                if isinstance(item.op, Post):
                    open_tags[number, rank, item.op.peer, item.op.index] += 1
                elif isinstance(item.op, Agree):
                    for peer in item.op.peers:
                        open_tags[number, peer, rank, item.op.index] -= 1
        for (number, source, owner, index), count in open_tags.items():
            if count:
                what = "posted and never compared" if count > 0 else "compared and never posted"
                raise CheckError(f"launch {number}: tag {index} of rank {source} at rank {owner} is {what}")

    # The run

    def _run(self, in_issue_order: bool, memory: bool) -> None:
        self.memory = memory
        self.spaces: dict[tuple[int, object], Space] = defaultdict(Space)
        self.clocks: dict[Thread, dict[Thread, int]] = defaultdict(dict)
        self.signalled: dict[tuple[int, WordKey], list[Clock]] = defaultdict(list)
        self.recorded: dict[tuple[int, int], Clock] = {}
        self.in_batch: set[Thread] = set()
        waits_for = self._resolve_events()
        queues: dict[Thread, list[tuple[int, Issued]]] = defaultdict(list)
        for rank, items in enumerate(self.issued):
            for index, item in enumerate(items):
                queues[rank, "" if in_issue_order else item.op.stream].append((index, item))
        heads = dict.fromkeys(queues, 0)
        progress = True
        while progress:
            progress = False
            for thread, queue in queues.items():
                while heads[thread] < len(queue):
                    index, item = queue[heads[thread]]
                    if not self._ready(thread[0], item, waits_for.get((thread[0], index))):
                        break
                    try:
                        self._execute(thread[0], index, item, waits_for.get((thread[0], index)))
                    except RaceError as error:
                        raise CheckError(f"{self._where(thread[0], item)}: {error}") from None
                    heads[thread] += 1
                    progress = True
        stuck = [(thread, queue[heads[thread]][1]) for thread, queue in queues.items() if heads[thread] < len(queue)]
        if stuck:
            order = " when each rank runs strictly in issue order" if in_issue_order else ""
            shown = "; ".join(self._where(thread[0], item) for thread, item in stuck[:4])
            raise CheckError(f"deadlock{order}: {shown}")

    @staticmethod
    def _where(rank: int, item: Issued) -> str:
        return f"rank {rank}, launch {item.launch.number} ({item.launch.program.name}), {item.op.stream}: {op_text(item.op)}"

    def _resolve_events(self) -> dict[tuple[int, int], int]:
        """For each After: the issue index of the Record that it waits for; CUDA decides this at issue."""
        found: dict[tuple[int, int], int] = {}
        for rank, items in enumerate(self.issued):
            last: dict[EventKey, int] = {}
            for index, item in enumerate(items):
                if isinstance(item.op, Record):
                    last[item.launch.binding.event(item.op.event)] = index
                elif isinstance(item.op, After):
                    key = item.launch.binding.event(item.op.event)
                    if key in last:
                        found[rank, index] = last[key]
        return found

    def _ready(self, rank: int, item: Issued, record: int | None) -> bool:
        op = item.op
        if isinstance(op, Wait):
            return len(self.signalled[rank, item.launch.binding.word(op.word)]) >= item.launch.binding.wait_value(op)
        if isinstance(op, After) and record is not None:
            return (rank, record) in self.recorded
        return True

    def _execute(self, rank: int, index: int, item: Issued, record: int | None) -> None:
        op, launch = item.op, item.launch
        if not self.memory:  # whether everything completes needs counts alone
            if isinstance(op, Record):
                self.recorded[rank, index] = {}
            elif isinstance(op, (Signal, Put)):
                self.signalled[op.peer, launch.binding.word(op.word)].append({})
            return
        thread = (rank, op.stream)
        clock = self.clocks[thread]
        # A run of copies on one stream is one unordered batch: they share a tick.
        if not (isinstance(op, Copy) and thread in self.in_batch):
            clock[thread] = clock.get(thread, 0) + 1
        (self.in_batch.add if isinstance(op, Copy) else self.in_batch.discard)(thread)
        if isinstance(op, Wait):
            value = launch.binding.wait_value(op)
            if value:
                self._join(clock, self.signalled[rank, launch.binding.word(op.word)][value - 1])
        elif isinstance(op, After):
            if record is not None:
                self._join(clock, self.recorded[rank, record])
        elif isinstance(op, Record):
            self.recorded[rank, index] = dict(clock)
        elif isinstance(op, Put):
            self._put(rank, op, launch, Stamp(thread, clock[thread], launch.number), clock)
        elif isinstance(op, Signal):
            seen = dict(clock)
            self._join(seen, self.clocks[self._wire(rank, op)])
            self.signalled[op.peer, launch.binding.word(op.word)].append(seen)
        else:
            self._move(rank, op, launch, Stamp(thread, clock[thread], launch.number), clock)

    @staticmethod
    def _wire(rank: int, op: Put | Signal) -> Thread:
        return (rank, f"{op.stream} to rank {op.peer}")

    def _put(self, rank: int, op: Put, launch: Launch, stamp: Stamp, clock: Clock) -> None:
        """The stream goes on when the source has been read. The write happens on the wire, which keeps the order of puts and signals
        from one stream to one peer; only a word raised over the same wire says that it has ended."""
        wire = self._wire(rank, op)
        at_peer = self.clocks[wire]
        self._join(at_peer, clock)
        at_peer[wire] = at_peer.get(wire, 0) + 1
        written = Stamp(wire, at_peer[wire], launch.number)
        # Padding between the blocks of a partial sum travels along and is never used.
        pieces = self._read(rank, op.src, launch, stamp, clock, holes=op.src.area is Area.PARTIAL)
        self._write(op.peer, op.dst, launch, pieces, written, at_peer)
        self.signalled[op.peer, launch.binding.word(op.word)].append(dict(at_peer))

    @staticmethod
    def _join(clock: dict[Thread, int], other: Clock) -> None:
        for thread, tick in other.items():
            if clock.get(thread, 0) < tick:
                clock[thread] = tick

    # Memory

    def _space(self, rank: int, region: Region, launch: Launch) -> Space:
        area, index = region.area, region.index
        last = region.offset + (region.rows - 1) * region.pitch + region.row_bytes
        if region.offset < 0 or last > self.limits.get(area, last):
            raise RaceError(f"bytes {region.offset}..{last} lie outside {area.value}'s {self.limits.get(area)}")
        key: object
        if area is Area.SLOT:
            key = (area, launch.binding.slot)
        elif area is Area.STAGE:
            key = (area, (launch.binding.stage_piece + index) % self.ring)
        elif area is Area.INBOX:
            key = (area, (launch.binding.inbox_batch + index) % 2)
        elif area in (Area.PARAM, Area.GRAD):
            key = (area, launch.group, index)
        elif area is Area.OUT:
            key = (area, launch.group)
        elif area is Area.TAG:
            key = (area, *tag_place(launch.binding, index, self.ring))
        else:
            key = (area, index if area is Area.PARTIAL else 0)
        return self.spaces[rank, key]

    def _read(
        self,
        rank: int,
        source: Source,
        launch: Launch,
        stamp: Stamp,
        clock: Clock,
        then_written: bool = False,
        holes: bool = False,
    ) -> list[tuple[int, Content]]:
        owner, region = (source.rank, source.region) if isinstance(source, Remote) else (rank, source)
        space = self._space(owner, region, launch)
        return [
            piece
            for start, end in region.spans()
            for piece in space.read(start, end, stamp, clock, then_written, holes)
        ]

    def _write(
        self,
        rank: int,
        region: Region,
        launch: Launch,
        pieces: Iterable[tuple[int, Content]],
        stamp: Stamp,
        clock: Clock,
    ) -> None:
        space = self._space(rank, region, launch)
        left = list(pieces)
        total = sum(n for n, _ in left)
        if total != region.nbytes:
            raise RaceError(f"{total} bytes are written where {region.nbytes} belong")
        once = region.area in DESTINATIONS
        for start, end in region.spans():
            row: list[tuple[int, Content]] = []
            need = end - start
            while need:
                nbytes, content = left.pop(0)
                take = min(nbytes, need)
                row.append((take, content))
                need -= take
                if take < nbytes:
                    left.insert(0, (nbytes - take, content.at(take)))
            space.write(start, row, stamp, clock, once)

    def _move(self, rank: int, op: Op, launch: Launch, stamp: Stamp, clock: Clock) -> None:
        if isinstance(op, Copy):
            if (op.src.rows, op.src.row_bytes) != (op.dst.rows, op.dst.row_bytes) and op.src.nbytes != op.dst.nbytes:
                raise RaceError("source and destination differ in size")
            self._write(op.peer, op.dst, launch, self._read(rank, op.src, launch, stamp, clock), stamp, clock)
        elif isinstance(op, Cast):
            for part in op.parts:
                self._cast(rank, part.src, part.dst, part.dst_dtype, launch, stamp, clock)
        elif isinstance(op, Reduce):
            self._reduce(rank, op, launch, stamp, clock)
        elif isinstance(op, Post):
            tag = Region(Area.TAG, rank * 4, 4, index=op.index)
            self._write(op.peer, tag, launch, [(4, Content(("tag", launch.number), 0, 4))], stamp, clock)
        elif isinstance(op, Agree):
            for peer in op.peers:
                ((_, content),) = self._read(rank, Region(Area.TAG, peer * 4, 4, index=op.index), launch, stamp, clock)
                if content.tag != ("tag", launch.number):
                    raise RaceError(f"the tag of rank {peer} is of launch {content.tag[1]}")
        elif isinstance(op, Use):
            for region in op.reads:
                self._read(rank, region, launch, stamp, clock)
            for region, want in op.expects:
                self._expect(self._read(rank, region, launch, stamp, clock), want)
            for region, fresh in op.writes:
                assert isinstance(fresh, Content)
                self._write(rank, region, launch, [(region.nbytes, fresh)], stamp, clock)

    def _cast(
        self, rank: int, src: Region, dst: Region, dtype: str, launch: Launch, stamp: Stamp, clock: Clock
    ) -> None:
        item = ITEM_BYTES[dtype]
        pieces = [
            (nbytes // content.item * item, Content(content.tag, content.element, item))
            for nbytes, content in self._read(rank, src, launch, stamp, clock)
        ]
        self._write(rank, dst, launch, pieces, stamp, clock)

    def _reduce(self, rank: int, op: Reduce, launch: Launch, stamp: Stamp, clock: Clock) -> None:
        item, out = ITEM_BYTES[op.src_dtype], ITEM_BYTES[op.dst_dtype]
        for segment in op.segments:
            terms = [self._read(rank, source, launch, stamp, clock) for source in segment.sources]
            if op.carry:
                running = self._read(rank, segment.dst, launch, stamp, clock, then_written=True)
                terms.insert(0, [(n // c.item * item, Content(c.tag, c.element, c.item)) for n, c in running])
            if len({sum(n for n, _ in term) for term in terms}) != 1:
                raise RaceError("the sources of a sum differ in size")
            pieces = []
            while terms[0]:
                step = min(term[0][0] for term in terms)
                if step % item or any(t[0][1].item != item for t in terms[1 if op.carry else 0 :]):
                    raise RaceError("a sum reads across elements or in another dtype than its source's")
                base = terms[0][0][1].element
                summands: tuple = tuple((t[0][1].tag, t[0][1].element - base) for t in terms)
                tag = total(summands)
                if op.scaled:
                    tag = ("scaled", tag)
                elif tag[0] == "sum" and out != ITEM_BYTES["float32"]:
                    tag = ("rounded", tag)
                pieces.append((step // item * out, Content(tag, base, out)))
                for term in terms:
                    nbytes, content = term.pop(0)
                    if nbytes > step:
                        term.insert(0, (nbytes - step, content.at(step)))
            self._write(rank, segment.dst, launch, pieces, stamp, clock)

    @staticmethod
    def _expect(found: list[tuple[int, Content]], want: object) -> None:
        at = 0
        for nbytes, content in found:
            assert isinstance(want, Content)
            if content != want.at(at):
                raise RaceError(f"byte {at} of what is used holds {content}, the layout demands {want.at(at)}")
            at += nbytes
