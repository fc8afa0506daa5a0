"""Programs as flat arrays: what `tide_launch` walks.

Addresses are the number of a base and an offset. Bases are what a launch binds: arenas, the bound slot at each rank, places of the STAGE
ring by their position in this launch, the caller's tensors. Words' values are counters before the launch plus a constant. So a program is
compiled once, patched once a slot, and a launch fills two short arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tide_comm.engine.base import ArenaSpec
from tide_comm.engine.cuda.numbers import BaseNumbers, WordTable, params_of
from tide_comm.engine.cuda.rail_ops import Data, Raise, Send, Stage, channel_of, over_rail
from tide_comm.engine.cuda.records import (
    AFTER,
    AGREE,
    BYTES,
    CARRY,
    CAST,
    CAST_BLOCKS,
    CHECKED,
    CLEAR,
    COPY,
    COPY2D,
    DTYPES,
    FILL,
    MAX_SOURCES,
    MULTIMEM,
    OP,
    PUT,
    RECORD,
    REDUCE,
    SCALED,
    SEGMENT,
    SUM_BLOCKS,
    TAG_VALUE,
    TILE,
    WAIT,
    WORD_VALUE_BYTES,
    WRITE,
)
from tide_comm.engine.cuda.tighten import tighten
from tide_comm.errors import TideError
from tide_comm.plan import names
from tide_comm.plan.all_gather import SLOT_TAG
from tide_comm.plan.apart import apart
from tide_comm.plan.copies import copy
from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.program import (
    After,
    Agree,
    Area,
    Cast,
    Clear,
    Copy,
    CopyAll,
    Event,
    EventKey,
    LaneSum,
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
    Wait,
    Word,
)


def _contiguous(region: Region) -> bool:
    return region.rows == 1 or region.pitch == region.row_bytes


@dataclass
class Bound:
    """A program for one slot. `values`: where each starts in the counters, and what is added; `updates`: how counters move on."""

    ops: np.ndarray
    value_from: np.ndarray
    value_add: np.ndarray
    update_at: np.ndarray
    update_by: np.ndarray
    points: dict[str, int]
    awaited: list[tuple[Word, int, int]]
    """Each word that the program waits for: its offset in the arena, its index in the values."""
    tags: dict[int, int]
    """Whose tags the launch must find in the slot: peer -> offset in the arena."""


class Compiled:
    """One program. `upload` brings a segment table to the GPU and returns its address; `stream` and `event` number names.

    `nccl`: what crosses machines is put by NCCL (`rail_ops`); else it is copied, which needs machines that are emulated on one host.
    `multicast`: what is written to all lanes, or read from all, goes to the arena's multicast address; else lane by lane (`apart`).
    """

    def __init__(
        self,
        program: Program,
        spec: ArenaSpec,
        upload: Callable[[np.ndarray], int],
        stream: Callable[[str], int],
        poison: bool,
        nccl: bool = False,
        multicast: bool = False,
    ) -> None:
        self.program = program
        self.spec = spec
        self.upload = upload
        self.stream = stream
        self.poison = poison
        self.numbers = BaseNumbers(spec, params_of(program), multicast)
        self.rows: list[tuple[Op | None, dict[str, int]]] = []
        self.checked: dict[str, tuple[int, int]] = {}
        """By stream, the tags that its next sum compares: (first, how many). Another stream's sum may run before they have come."""
        self.tags: list[tuple[int, int]] = []
        """(rank, index) of each tag that sums compare."""
        self.out_stream = names.SUM
        """The stream that writes OUT."""
        tightened = tighten(program if multicast else apart(program), spec.stage.ring).ops
        for op in over_rail(tightened, spec.topology, program.rank) if nccl else tightened:
            self._add(op)
        self.bound: dict[int, Bound] = {}

    def _row(self, op: Op | None, kind: int, stream: str, **fields: int) -> None:
        self.rows.append((op, {"kind": kind, "stream": self.stream(stream), **fields}))

    def _add(self, op: Op) -> None:
        me = self.program.rank
        if isinstance(op, Record):
            if self.poison and op.event == names.VACATED:
                self._row(None, FILL, op.stream, dst_base=self.numbers.slots + me, bytes=self.spec.slot_bytes)
            self._row(op, RECORD, op.stream)
        elif isinstance(op, After):
            self._row(op, AFTER, op.stream)
        elif isinstance(op, Signal):
            self._row(op, WRITE, op.stream, dst_base=op.peer)
        elif isinstance(op, Wait):
            self._row(op, WAIT, op.stream, dst_base=me)
        elif isinstance(op, Copy):
            self._copy(op, self.numbers.of(op.dst, op.peer))
        elif isinstance(op, CopyAll):
            self._copy(op, self.numbers.of_all(op.dst))
        elif isinstance(op, Clear):
            place = {"dst_base": self.numbers.of(op.dst, me)}
            for start, end in op.dst.spans():
                self._row(None, CLEAR, op.stream, dst=start, bytes=end - start, **place)
        elif isinstance(op, Put):
            # The loopback rail: a copy, and the word behind it on the same stream.
            self._copy(copy(op.stream, op.src, op.dst, op.peer), self.numbers.of(op.dst, op.peer))
            self._row(op, WRITE, op.stream, dst_base=op.peer)
        elif isinstance(op, Data):
            self._data(op)
        elif isinstance(op, Stage):
            value = {"aux": TAG_VALUE} if isinstance(op.what, Post) else {}
            self._row(op, WRITE, op.stream, dst_base=me, dst=self._outbox(op), **value)
        elif isinstance(op, Send):
            place = self._tag_place(op.what) if isinstance(op.what, Post) else {"dst_base": op.what.peer}
            self._put(op, op.what.peer, src_base=me, src=self._outbox(op), bytes=WORD_VALUE_BYTES, **place)
        elif isinstance(op, Cast):
            self._cast(op)
        elif isinstance(op, Reduce):
            self._reduce(op)
        elif isinstance(op, Post):
            self._row(op, WRITE, op.stream, aux=TAG_VALUE, **self._tag_place(op))
        elif isinstance(op, Agree):
            if op.index == SLOT_TAG:
                # The stream waits for the very value: no kernel is needed, and what disagrees is never used.
                for peer in op.peers:
                    self._row(Agree(op.stream, (peer,), op.index), AGREE, op.stream, dst_base=me, aux=TAG_VALUE)
            else:
                # The next sum compares before it writes.
                self.checked[op.stream] = (len(self.tags), len(op.peers))
                self.tags += [(peer, op.index) for peer in op.peers]
        else:
            raise TideError(f"the CUDA engine cannot carry out {op!r}")

    def _tag_place(self, op: Post) -> dict[str, int]:
        """A slot's tag has a place that `for_slot` knows; a STAGE place's moves with the ring."""
        if op.index == SLOT_TAG:
            return {"dst_base": op.peer}
        return {"dst_base": self.numbers.tag(op.peer, op.index), "dst": 4 * self.program.rank}

    def _outbox(self, op: Stage | Send) -> int:
        return self.spec.outbox(channel_of(op.stream), op.place)

    def _put(self, op: Op, peer: int, **fields: int) -> None:
        """Ranks of a rail's communicator are numbered by machine."""
        self._row(op, PUT, op.stream, aux=self.spec.topology.machine_of(peer), **fields)

    def _data(self, op: Data) -> None:
        if op.src.area in (Area.PARAM, Area.GRAD, Area.OUT):
            raise TideError(f"{self.program.name}: {op.src.area} is not in the arena, so no rail can put it")
        src = {"src": self.numbers.offset(op.src), "src_base": self.numbers.of(op.src, self.program.rank)}
        dst = {"dst": self.numbers.offset(op.dst), "dst_base": self.numbers.of(op.dst, op.peer)}
        self._put(op, op.peer, bytes=op.src.nbytes, **src, **dst)

    def _copy(self, op: Copy | CopyAll, dst_base: int) -> None:
        me = self.program.rank
        if not op.src.nbytes:
            return
        fields = {
            "dst": self.numbers.offset(op.dst),
            "dst_base": dst_base,
            "src": self.numbers.offset(op.src),
            "src_base": self.numbers.of(op.src, me),
        }
        if _contiguous(op.src) and _contiguous(op.dst):
            self._row(None, COPY, op.stream, bytes=op.src.nbytes, **fields)
            return
        rows = max(1 if _contiguous(r) else r.rows for r in (op.src, op.dst))
        width = op.src.nbytes // rows
        pitches = {
            "src_pitch": width if _contiguous(op.src) else op.src.pitch,
            "dst_pitch": width if _contiguous(op.dst) else op.dst.pitch,
        }
        self._row(None, COPY2D, op.stream, bytes=width, rows=rows, **fields, **pitches)

    def _segment(self, dst: Region, sources: Sequence[Source], src_dtype: str, dst_dtype: str, as_bytes: bool) -> tuple:
        """One row of a segment table (its first tile still 0)."""
        me = self.program.rank
        src_item, dst_item = (1, 1) if as_bytes else (ITEM_BYTES[src_dtype], ITEM_BYTES[dst_dtype])
        regions = [(dst, dst_item)]
        bases = [self.numbers.of(dst, me)]
        for source in sources:
            if isinstance(source, LaneSum):
                regions.append((source.region, src_item))
                bases.append(self.numbers.of_all(source.region))
                continue
            region, rank = (source.region, source.rank) if isinstance(source, Remote) else (source, me)
            if isinstance(source, Remote) and region.area in (Area.PARAM, Area.GRAD, Area.OUT):
                raise TideError(
                    f"{self.program.name}: rank {rank}'s {region.area} is its own memory, no lane can read it"
                )
            regions.append((region, src_item))
            bases.append(self.numbers.of(region, rank))
        elements = dst.nbytes // dst_item
        rows = max(1 if _contiguous(r) else r.rows for r, _ in regions)
        width = elements // rows

        def place(region: Region, item: int, base: int) -> tuple[int, int, int, int]:
            pitch = width if _contiguous(region) else region.pitch // item
            return (self.numbers.offset(region), pitch, base, 0)

        found = [place(r, item, base) for (r, item), base in zip(regions, bases, strict=True)]
        blank = (0, 0, 0, 0)
        codes = (BYTES, BYTES) if as_bytes else (DTYPES[src_dtype], DTYPES[dst_dtype])
        sources_row = found[1:] + [blank] * (MAX_SOURCES - len(sources))
        return (elements, width, 0, *codes, found[0], sources_row)

    def _table(self, rows: list[tuple]) -> tuple[int, int]:
        """(address, tiles) of an uploaded table."""
        table = np.array(rows, SEGMENT)
        tiles = 0
        for row in table:
            row["first_tile"] = tiles
            tiles += -(-int(row["elements"]) // (2 * TILE if row["src_dtype"] == BYTES else TILE))
        return self.upload(table), tiles

    def _cast(self, op: Cast) -> None:
        rows = [
            self._segment(p.dst, [p.src], p.src_dtype, p.dst_dtype, p.src_dtype == p.dst_dtype)
            for p in op.parts
            if p.dst.nbytes
        ]
        if rows:
            address, tiles = self._table(rows)
            self._row(None, CAST, op.stream, src=address, rows=len(rows), bytes=tiles, aux=CAST_BLOCKS)

    def _reduce(self, op: Reduce) -> None:
        rows = [self._segment(s.dst, s.sources, op.src_dtype, op.dst_dtype, False) for s in op.segments if s.dst.nbytes]
        if not rows:
            return
        counts = {len(s.sources) for s in op.segments if s.dst.nbytes}
        if len(counts) != 1 or max(counts) > MAX_SOURCES:
            raise TideError(f"{self.program.name}: one sum has {sorted(counts)} sources a segment")
        address, tiles = self._table(rows)
        first, checked = self.checked.pop(op.stream, (0, 0))
        flags = CARRY * op.carry + SCALED * op.scaled + CHECKED * bool(checked)
        switched = {isinstance(source, LaneSum) for s in op.segments for source in s.sources}
        if switched == {True} and counts == {1} and op.src_dtype == "float32":
            flags += MULTIMEM
        elif True in switched:
            raise TideError(f"{self.program.name}: the switch adds one fp32 source a segment, and nothing else with it")
        if any(s.dst.area is Area.OUT for s in op.segments):
            self.out_stream = op.stream
        self._row(
            None,
            REDUCE,
            op.stream,
            src=address,
            rows=len(rows),
            bytes=tiles,
            aux=op.blocks or SUM_BLOCKS,
            sources=counts.pop(),
            src_dtype=DTYPES[op.src_dtype],
            dst_dtype=DTYPES[op.dst_dtype],
            flags=flags,
            dst_pitch=checked,
            src_pitch=first,
        )
        if self.poison:
            staged = {
                s.index for seg in op.segments for s in seg.sources if isinstance(s, Region) and s.area is Area.STAGE
            }
            for index in staged:
                base = self.numbers.stage(self.program.rank, index)
                self._row(None, FILL, op.stream, dst_base=base, bytes=self.spec.stage.place_bytes)

    def for_slot(self, slot: int, words: WordTable, event: Callable[[EventKey], int]) -> Bound:
        """The program with the slot's words and events filled in."""
        if slot in self.bound:
            return self.bound[slot]

        def key(e: Event) -> EventKey:
            return (e.name, e.key, slot if e.slotted else -1)

        ops = np.zeros(len(self.rows), OP)
        starts: list[int] = []
        adds: list[int] = []
        sent: Counter[int] = Counter()
        awaited: list[tuple[Word, int, int]] = []
        tags: dict[int, int] = {}
        for row, (op, fields) in zip(ops, self.rows, strict=True):
            for name, value in fields.items():
                row[name] = value
            if isinstance(op, (Record, After)):
                row["aux"] = event(key(op.event))
            elif isinstance(op, Stage) and isinstance(op.what, Raise):
                row["aux"] = len(starts)
                at = words.sent(op.what.peer, op.what.word, slot)
                sent[at] += op.what.by
                starts.append(at)
                adds.append(sent[at])
            elif isinstance(op, Send) and isinstance(op.what, Raise):
                row["dst"] = words.offset(op.what.word, slot)
            elif isinstance(op, (Post, Send)):
                post = op.what if isinstance(op, Send) else op
                if isinstance(post, Post) and post.index == SLOT_TAG:
                    row["dst"] = self.spec.slot_tag(self.program.rank, slot)
            elif isinstance(op, Agree):
                row["dst"] = tags[op.peers[0]] = self.spec.slot_tag(op.peers[0], slot)
            elif isinstance(op, (Signal, Put, Wait)):
                row["dst"] = words.offset(op.word, slot)
                row["aux"] = len(starts)
                if isinstance(op, Wait):
                    awaited.append((op.word, words.offset(op.word, slot), len(starts)))
                    starts.append(words.received(op.word, slot))
                    adds.append(op.count)
                else:
                    at = words.sent(op.peer, op.word, slot)
                    sent[at] += 1
                    starts.append(at)
                    adds.append(sent[at])
        updates = dict(sent)
        for word, count in self.program.arrivals.items():
            updates[words.received(word, slot)] = count
        self.bound[slot] = Bound(
            ops,
            np.array(starts, np.int64),
            np.array(adds, np.int64),
            np.array(list(updates), np.int64),
            np.array(list(updates.values()), np.int64),
            {point: event(key(e)) for point, e in self.program.points.items()},
            awaited,
            tags,
        )
        return self.bound[slot]
