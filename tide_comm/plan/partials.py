"""The reduce-scatter between machines: partial sums over the rail, and the last step that adds them (design: section "Reduce-scatter").

Slice s from index c lands on lane (s - c) mod L, so the L contributions of a wave stand on L lanes at the same address. Lane j of D reads
block j of each slice from the lanes' inboxes and adds in order of c; `reduce_scatter` has the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tide_comm.plan import names
from tide_comm.plan.layout import ITEM_BYTES
from tide_comm.plan.program import (
    After,
    Agree,
    Area,
    Clear,
    LaneSum,
    Op,
    Post,
    Put,
    Record,
    Reduce,
    Region,
    Remote,
    Segment,
    Signal,
    Source,
    Wait,
    Word,
    inbox_tag,
)
from tide_comm.plan.slices import INBOX_SETS, PARTIALS, Cut, Cutting, InboxSpec

if TYPE_CHECKING:
    from tide_comm.plan.reduce_scatter import MachineSums


@dataclass
class Rail:
    """Partial sums between machines, and the last step that adds them."""

    cutting: Cutting
    rank: int
    machine: MachineSums
    inbox: InboxSpec
    reduce_dtype: str
    final_blocks: int

    def __post_init__(self) -> None:
        topology = self.topology = self.cutting.topology
        self.machines, self.lane = topology.machines, topology.lane_of(self.rank)
        self.lanes = topology.table[topology.machine_of(self.rank)]
        self.batches = -(-self.machines // self.inbox.batch)
        # One lane's sum is its gradient: bf16 goes over the rail as it is.
        exact = topology.lanes == 1 and self.machine.grad_dtype == "bfloat16"
        self.dtype = "bfloat16" if exact else "float32"
        self.item = ITEM_BYTES[self.dtype]

    def _rail_peer(self, c: int) -> int:
        return self.topology.rank(self.topology.machine_of(self.rank) + c, self.lane)

    def _batch(self, b: int) -> range:
        """The c of a batch."""
        return range(b * self.inbox.batch, min((b + 1) * self.inbox.batch, self.machines))

    def ends_batch(self, c: int) -> bool:
        return c == self._batch(c // self.inbox.batch)[-1]

    def _seat(self, c: int, s: int, offset: int, nbytes: int) -> Region:
        batch, start = self.inbox.seat(c, s)
        return Region(Area.INBOX, start + offset, nbytes, index=batch)

    def contribution(self, c: int) -> list[Op]:
        """This machine's sum of the own slice of the machine c after it; into the own inbox for c = 0, over the rail for the others."""
        s, partial = self.cutting.owned(self.lane, c), (c - 1) % PARTIALS
        slice_bytes = self._slice_bytes
        seat = self._seat(c, s, 0, slice_bytes)
        start, area, index = (seat.offset, Area.INBOX, seat.index) if c == 0 else (0, Area.PARTIAL, partial)
        if c == 0:
            # The set was last used two batches ago; all lanes must have read it.
            ops: list[Op] = [Wait(names.SUM, names.final_done(lane), 1 - INBOX_SETS) for lane in self.lanes]
        else:
            ops = [After(names.SUM, names.partial_read(partial))]
        for i in range(self.cutting.pieces):

            def place(row: int, cut: Cut, i: int = i) -> tuple[Area, int, int]:
                at = row * self.cutting.block + i * self.cutting.step + cut.at
                return area, start + at * self.item, index

            ops += self.machine.piece(c, i, place, self.dtype)
        if c == 0:
            return [*ops, Record(names.SUM, names.OWN_SEATED)]
        target, batch = self._rail_peer(c), c // self.inbox.batch
        ops += [
            Record(names.SUM, names.partial_summed(partial)),
            After(names.REDUCE_RAIL, names.partial_summed(partial)),
        ]
        ops += [Wait(names.REDUCE_RAIL, names.credit(target), self._credits_needed(batch))]
        ops += [Post(names.REDUCE_RAIL, target, inbox_tag(batch))]
        source = Region(Area.PARTIAL, 0, slice_bytes, index=partial)
        arrived = names.partial_arrived(self.rank)
        ops += [
            Put(names.REDUCE_RAIL, source, seat, target, arrived)
            if slice_bytes
            else Signal(names.REDUCE_RAIL, target, arrived)
        ]
        return [*ops, Record(names.REDUCE_RAIL, names.partial_read(partial))]

    @property
    def _slice_bytes(self) -> int:
        return self.cutting.rows * self.cutting.block * self.item

    def _clears(self, b: int) -> list[Op]:
        """Zeros into the seats of this lane that no source of the batch fills, neighbours as rows of one operation."""
        filled = {self.cutting.owned(self.lane, c) for c in self._batch(b)}
        if not self.inbox.multicast or not self._slice_bytes or len(filled) == len(self.lanes):
            return []
        # All lanes must have read the set's use two batches ago. With the first batch the own seat has waited for that (OWN_SEATED).
        ops: list[Op] = []
        if b:
            ops = [Wait(names.SEAT, names.final_done(lane), b + 1 - INBOX_SETS) for lane in self.lanes]
        seats = [s for s in range(len(self.lanes)) if s not in filled]
        while seats:
            rows = next((n for n, s in enumerate(seats) if s != seats[0] + n), len(seats))
            pitch = self.inbox.seat_bytes if rows > 1 else 0
            start = seats[0] * self.inbox.seat_bytes
            ops.append(Clear(names.SEAT, Region(Area.INBOX, start, self._slice_bytes, rows, pitch, b)))
            seats = seats[rows:]
        return ops

    def _credits_needed(self, batch: int) -> int:
        """A set's use before lies two batches back: in this launch, or one or two launches ago."""
        if batch >= INBOX_SETS:
            return 1
        return 0 if self.batches > 1 else -1

    def seats(self, b: int) -> list[Op]:
        """Arrival at this lane is told to all lanes, for each reads its block here."""
        ops: list[Op] = [After(names.SEAT, names.OWN_SEATED)] if b == 0 else []
        ops += self._clears(b)
        ops += [Wait(names.SEAT, names.partial_arrived(self._rail_peer(-c)), 1) for c in self._batch(b) if c]
        return ops + [Signal(names.SEAT, lane, names.seated(self.rank)) for lane in self.lanes]

    def last_step(self, b: int) -> list[Op]:
        """Add a batch's blocks in order of c to the running sum; with the last batch the sum is done."""
        if b < 0:
            return []
        ops: list[Op] = [Wait(names.FINAL, names.seated(lane), b + 1) for lane in self.lanes]
        sources = [self._rail_peer(-c) for c in self._batch(b) if c]
        if sources:
            ops += [Agree(names.FINAL, tuple(sources), inbox_tag(b))]
        single = self.batches == 1
        segments = self._final_segments(b, Area.OUT if single else Area.SCRATCH)
        if segments:
            dst_dtype = self.reduce_dtype if single else "float32"
            ops += [
                Reduce(
                    names.FINAL, segments, self.dtype, dst_dtype, scaled=single, carry=b > 0, blocks=self.final_blocks
                )
            ]
            if b == self.batches - 1 and not single:
                out = self._out_segments()
                ops += [Reduce(names.FINAL, out, "float32", self.reduce_dtype, scaled=True, blocks=self.final_blocks)]
        ops += [Signal(names.FINAL, lane, names.final_done(self.rank)) for lane in self.lanes]
        # When all lanes have read the set it goes to the sources of its next batch.
        ops += [Wait(names.CREDIT, names.final_done(lane), b + 1) for lane in self.lanes]
        following = (b + INBOX_SETS) % self.batches
        return ops + [
            Signal(names.CREDIT, self._rail_peer(-c), names.credit(self.rank)) for c in self._batch(following) if c
        ]

    def _final_cuts(self) -> list[tuple[int, Cut, int]]:
        """(slice, cut of this rank's shard, elements that are not padding)."""
        layout = self.cutting.layout
        found = []
        for s in range(self.topology.lanes):
            for cut in self.cutting.cuts(s * self.cutting.block, (s + 1) * self.cutting.block):
                elements = min(cut.end, layout.params[cut.param].valid(self.rank)) - cut.start
                if elements > 0:
                    found.append((s, cut, elements))
        return found

    def _final_segments(self, b: int, area: Area) -> tuple[Segment, ...]:
        out_item = ITEM_BYTES[self.reduce_dtype] if area is Area.OUT else ITEM_BYTES["float32"]
        segments = []
        for s, cut, elements in self._final_cuts():
            offset = (self.lane * self.cutting.block + cut.at) * self.item
            sources: tuple[Source, ...] = tuple(
                Remote(self.lanes[(s - c) % len(self.lanes)], self._seat(c, s, offset, elements * self.item))
                for c in self._batch(b)
            )
            if self.inbox.multicast:
                # One wave: the same address on all lanes. Those that hold zeros come last.
                first = self._batch(b)[0]
                ranks = tuple(self.lanes[(s - first - k) % len(self.lanes)] for k in range(len(self.lanes)))
                sources = (LaneSum(ranks, self._seat(first, s, offset, elements * self.item)),)
            segments.append(Segment(sources, Region(area, cut.out * out_item, elements * out_item)))
        return tuple(segments)

    def _out_segments(self) -> tuple[Segment, ...]:
        item, out_item = ITEM_BYTES["float32"], ITEM_BYTES[self.reduce_dtype]
        return tuple(
            Segment(
                (Region(Area.SCRATCH, cut.out * item, elements * item),),
                Region(Area.OUT, cut.out * out_item, elements * out_item),
            )
            for _, cut, elements in self._final_cuts()
        )

    def arrivals(self) -> dict[Word, int]:
        found: dict[Word, int] = {}
        for c in range(1, self.machines):
            found[names.partial_arrived(self._rail_peer(-c))] = 1
            found[names.credit(self._rail_peer(c))] = 1
        for lane in self.lanes:
            found |= {names.seated(lane): self.batches, names.final_done(lane): self.batches}
        return found
