"""What operations do to the checker's memory: which bytes they read, and what they write from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tide_comm.plan.clocks import Thread, Wire
from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.memory import (
    NOTHING,
    SUMS,
    ZERO,
    Accessor,
    Content,
    Piece,
    RaceError,
    Space,
    Tags,
    Tenants,
    cut_piece,
)
from tide_comm.plan.program import (
    Agree,
    Area,
    Binding,
    Cast,
    Clear,
    Copy,
    CopyAll,
    LaneSum,
    Op,
    Post,
    Program,
    Put,
    Reduce,
    Region,
    Remote,
    Use,
    copies_of,
    tag_place,
)
from tide_comm.plan.symmetry import MovedContents, Symmetry

DESTINATIONS = (Area.SLOT, Area.OUT)
"""Areas of which a launch may write each byte only once."""
TAG_BYTES = 4


@dataclass(frozen=True)
class Launch:
    """One bound program (or a caller's step) of one rank. `group` separates the callers' memory (PARAM, GRAD, OUT) of different groups."""

    program: Program
    binding: Binding
    group: str
    number: int


class Memory:
    """The memory of all ranks. `ring`: places in STAGE. `limits`: bytes of an area (of one slot, place, inbox set), for those that have
    a limit. `name` says for messages who a thread is."""

    def __init__(
        self,
        ring: int,
        limits: Mapping[Area, int],
        tags: Tags,
        name: Callable[[int], str],
        symmetry: Symmetry | None = None,
    ) -> None:
        self.ring = ring
        self.limits = limits
        self.tags = tags
        self.symmetry = symmetry
        self._name = name
        self._contents = MovedContents(symmetry, tags) if symmetry else None
        self._nothing = tags.number(NOTHING)
        self._zero = tags.number(ZERO)
        self._spaces: dict[tuple, Space] = {}
        self._tenants: dict[tuple[int, int], Tenants] = {}
        self._wanted: dict[int, tuple[object, list[tuple[Region, Piece]]]] = {}

    def _space(self, rank: int, region: Region, launch: Launch, who: Accessor) -> Space:
        area, index, binding = region.area, region.index, launch.binding
        limit = self.limits.get(area)
        last = region.offset + (region.rows - 1) * region.pitch + region.row_bytes
        if region.offset < 0 or (limit is not None and last > limit):
            raise RaceError(f"bytes {region.offset}..{last} lie outside {area.value}'s {limit}")
        key: tuple
        if area is Area.SLOT:
            if self.symmetry is not None:
                return self._slot_of(rank, binding.slot, launch.group, who)
            key = (rank, area, binding.slot)
        elif area is Area.STAGE:
            key = (rank, area, (binding.stage_piece + index) % self.ring)
        elif area is Area.INBOX:
            key = (rank, area, (binding.inbox_batch + index) % 2)
        elif area is Area.PARAM or area is Area.GRAD:
            key = (rank, area, index, launch.group)
        elif area is Area.OUT:
            key = (rank, area, launch.group)
        elif area is Area.TAG:
            key = (rank, area, *tag_place(binding, index, self.ring))
        else:
            key = (rank, area, index if area is Area.PARTIAL else 0)
        found = self._spaces.get(key)
        if found is None:
            found = self._spaces[key] = Space(self._name)
        return found

    def _slot_of(self, rank: int, slot: int, group: str, who: Accessor) -> Space:
        """A slot has a space for each group, empty whenever the group moves in (`Tenants`)."""
        tenants = self._tenants.get((rank, slot))
        if tenants is None:
            tenants = self._tenants[rank, slot] = Tenants(self._name)
        key = (rank, Area.SLOT, slot, group)
        if tenants.enter(group, who):
            self._spaces[key] = Space(self._name)
        return self._spaces[key]

    def read(
        self,
        rank: int,
        source: Region | Remote,
        launch: Launch,
        who: Accessor,
        then_written: bool = False,
        hole: int | None = None,
    ) -> list[Piece]:
        owner, region = (source.rank, source.region) if isinstance(source, Remote) else (rank, source)
        space = self._space(owner, region, launch, who)
        if region.rows == 1:
            return space.read(region.offset, region.offset + region.row_bytes, who, then_written, hole)
        return [piece for start, end in region.spans() for piece in space.read(start, end, who, then_written, hole)]

    def write(self, rank: int, region: Region, launch: Launch, pieces: list[Piece], who: Accessor) -> None:
        space = self._space(rank, region, launch, who)
        total = sum(piece[0] for piece in pieces)
        if total != region.nbytes:
            raise RaceError(f"{total} bytes are written where {region.nbytes} belong")
        once = region.area in DESTINATIONS
        if region.rows == 1:
            space.write(region.offset, pieces, who, launch.number, once)
        else:
            _write_spans(space, region.spans(), pieces, who, launch.number, once)

    def put(self, rank: int, op: Put, launch: Launch, who: Thread, wire: Wire, peer: int, machines: int) -> None:
        """The stream goes on when the source has been read; the write happens on the wire, at rank `peer` of those that are run.
        `machines`: how far the receiver's image is moved from the receiver (`symmetry`)."""
        # Padding between the blocks of a partial sum travels along and is never used.
        hole = self._nothing if op.src.area is Area.PARTIAL else None
        pieces = self.read(rank, op.src, launch, who, hole=hole)
        if not machines:
            self.write(peer, op.dst, launch, pieces, wire)
            return
        assert self.symmetry is not None and self._contents is not None
        space = self._space(peer, op.dst, launch, wire)
        if sum(piece[0] for piece in pieces) != op.dst.nbytes:
            raise RaceError(f"{sum(piece[0] for piece in pieces)} bytes are written where {op.dst.nbytes} belong")
        spans = self.symmetry.spans(op.dst, launch.group, machines)
        moved = self._contents.pieces(pieces, machines)
        _write_spans(space, spans, moved, wire, launch.number, op.dst.area in DESTINATIONS)

    def post(self, rank: int, op: Post, launch: Launch, wire: Wire, peer: int) -> None:
        """`rank` as the peer counts; a tag goes the way of puts: only words that follow it say that it has arrived."""
        tag = self.tags.number(("tag", launch.number))
        region = Region(Area.TAG, rank * TAG_BYTES, TAG_BYTES, index=op.index)
        self.write(peer, region, launch, [(TAG_BYTES, tag, 0, TAG_BYTES)], wire)

    def move(self, rank: int, op: Op, launch: Launch, who: Thread) -> None:
        """Carry out an operation that touches memory only within the rank's machine."""
        if isinstance(op, Copy):
            if (op.src.rows, op.src.row_bytes) != (op.dst.rows, op.dst.row_bytes) and op.src.nbytes != op.dst.nbytes:
                raise RaceError("source and destination differ in size")
            self.write(op.peer, op.dst, launch, self.read(rank, op.src, launch, who), who)
        elif isinstance(op, CopyAll):
            pieces = self.read(rank, op.src, launch, who)
            for lane in op.lands(rank):
                self.write(lane, op.dst, launch, pieces, who)
        elif isinstance(op, Cast):
            for part in op.parts:
                self._cast(rank, part.src, part.dst, ITEM_BYTES[part.dst_dtype], launch, who)
        elif isinstance(op, Reduce):
            self._reduce(rank, op, launch, who)
        elif isinstance(op, Clear):
            self.write(rank, op.dst, launch, [(op.dst.nbytes, self._zero, 0, 1)], who)
        elif isinstance(op, Agree):
            for peer in op.peers:
                region = Region(Area.TAG, peer * TAG_BYTES, TAG_BYTES, index=op.index)
                ((_, tag, _, _),) = self.read(rank, region, launch, who)
                if self.tags.flat[tag] != ("tag", launch.number):
                    raise RaceError(f"the tag of rank {peer} is of launch {self.tags.flat[tag][1]}")
        elif isinstance(op, Use):
            for region in op.reads:
                self.read(rank, region, launch, who)
            for region, want in self._wants(op.expects):
                self._expect(self.read(rank, region, launch, who), want)
            for region, fresh in op.writes:
                assert isinstance(fresh, Content)
                piece = (region.nbytes, self.tags.intern(fresh.tag), fresh.element, fresh.item)
                self.write(rank, region, launch, [piece], who)

    def _cast(self, rank: int, src: Region, dst: Region, item: int, launch: Launch, who: Thread) -> None:
        pieces = [
            (nbytes // had * item, tag, element, item)
            for nbytes, tag, element, had in self.read(rank, src, launch, who)
        ]
        self.write(rank, dst, launch, pieces, who)

    def _reduce(self, rank: int, op: Reduce, launch: Launch, who: Thread) -> None:
        for segment in op.segments:
            terms = [self.read(rank, copy, launch, who) for source in segment.sources for copy in copies_of(source)]
            ordered = not any(isinstance(source, LaneSum) for source in segment.sources)
            if op.carry:
                running = self.read(rank, segment.dst, launch, who, then_written=True)
                item = ITEM_BYTES[op.src_dtype]
                # What the sum starts from has OUT's dtype; counted as the sources are.
                terms.insert(0, [(n // had * item, tag, element, item) for n, tag, element, had in running])
            self.write(rank, segment.dst, launch, self._summed(terms, op, ordered), who)

    def _summed(self, terms: list[list[Piece]], op: Reduce, ordered: bool) -> list[Piece]:
        item, out = ITEM_BYTES[op.src_dtype], ITEM_BYTES[op.dst_dtype]
        if len({sum(piece[0] for piece in term) for term in terms}) != 1:
            raise RaceError("the sources of a sum differ in size")
        pieces: list[Piece] = []
        while terms[0]:
            heads = [term[0] for term in terms]
            step = min(head[0] for head in heads)
            counted = [head for head in heads if head[1] != self._zero]
            if step % item or not counted or any(head[3] != item for head in counted):
                raise RaceError("a sum reads across elements, in another dtype than its source's, or zeros alone")
            base = counted[0][2]
            summands = tuple((head[1], head[2] - base) for head in counted)
            tag = self.tags.sum_of(summands) if ordered else self.tags.unordered_sum_of(summands)
            if op.scaled:
                tag = self.tags.number(("scaled", tag))
            elif self.tags.flat[tag][0] in SUMS and op.dst_dtype != "float32":
                tag = self.tags.number(("rounded", tag))
            pieces.append((step // item * out, tag, base, out))
            for number, head in enumerate(heads):
                if head[0] == step:
                    terms[number] = terms[number][1:]
                else:
                    terms[number] = [cut_piece(head, step), *terms[number][1:]]
        return pieces

    def _wants(self, expects: tuple[tuple[Region, object], ...]) -> list[tuple[Region, Piece]]:
        """Demands with interned tags; all ranks share what compute expects of a slot, so each tuple is seen once."""
        found = self._wanted.get(id(expects))
        if found is None:
            wants = []
            for region, want in expects:
                assert isinstance(want, Content)
                wants.append((region, (region.nbytes, self.tags.intern(want.tag), want.element, want.item)))
            found = self._wanted[id(expects)] = (expects, wants)
        return found[1]

    def _expect(self, found: Iterable[Piece], want: Piece) -> None:
        at = 0
        for piece in found:
            here = want if at == 0 else cut_piece(want, at)
            if piece[1:] != here[1:]:
                raise RaceError(
                    f"byte {at} of what is used holds {self.tags.content(piece)}, the layout demands {self.tags.content(here)}"
                )
            at += piece[0]


def _write_spans(
    space: Space, spans: Iterable[tuple[int, int]], pieces: list[Piece], who: Accessor, launch: int, once: bool
) -> None:
    """Pieces one after another into spans one after another."""
    left = iter(pieces)
    rest: Piece | None = None
    for start, end in spans:
        row: list[Piece] = []
        need = end - start
        while need:
            piece = rest or next(left)
            take = min(piece[0], need)
            row.append((take, *piece[1:]))
            need -= take
            rest = cut_piece(piece, take) if take < piece[0] else None
        space.write(start, row, who, launch, once)
