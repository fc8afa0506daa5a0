"""The reduce-scatter: gradients are read where they are and summed in fp32 (design: section "Reduce-scatter").

Inside a machine each lane owns a slice of every destination machine D = m, m+1, ... (index c = 0, 1, ...). The other lanes push their
gradients of that slice to the owner's STAGE, piece by piece through a ring of `ring` places; the owner sums the L copies in lane order, its
own read in place. On one machine the slice is the owner's shard and the sum goes straight to OUT.

Over several machines the sum is an fp32 partial: it goes over the rail to the owner's lane of D, into the seat of its
slice. Slice s from index c lands on lane (s - c) mod L, so the L contributions of a wave stand on L lanes at the same
address. Lane j of D reads block j of each slice from the lanes' inboxes and adds in order of c. More than `batch` sources
come in batches; two inbox sets alternate, and their running number goes on over launches and groups.

With multicast the switch adds (`LaneSum`): lane j reads the sum of all lanes' block j of each slice at one address. It adds all
lanes' seats, so those that no source of a batch fills are cleared first.

Bytes a lane sends per gradient byte: (L-1)/L to its mates; over the rail (M-1)/M * 2/L in fp32 for bf16 gradients, and
the bf16 itself where L = 1.

Flow control is by credits. Piece i of a launch needs a free place: `Wait(stage_free, i + 1 - ring)`. A put into an inbox
set needs all lanes' last steps of the set's use before; every source gets one credit a launch (`_credits_needed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tide_comm.plan import names
from tide_comm.plan.copies import Pair, copy, merged
from tide_comm.plan.layout import ITEM_BYTES, GroupLayout
from tide_comm.plan.program import (
    COMPUTE,
    After,
    Agree,
    Area,
    Cast,
    Clear,
    LaneSum,
    Op,
    Part,
    Post,
    Program,
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
from tide_comm.plan.slices import INBOX_SETS, PARTIALS, Cut, Cutting, InboxSpec, StageSpec
from tide_comm.plan.topology import Topology


def reduce_scatter(
    layout: GroupLayout,
    topology: Topology,
    rank: int,
    stage: StageSpec,
    params: Sequence[int],
    grad_dtype: str,
    reduce_dtype: str,
    from_slot: bool = False,
    blocks: int = 0,
    inbox: InboxSpec | None = None,
    final_blocks: int = 0,
    out_params: Sequence[int] = (),
) -> Program:
    """`rank`'s program for those `params` (indices, in FSDP2's order) that have gradients.

    `grad_dtype` is the gradients' dtype, `reduce_dtype` that of OUT; sums are fp32 whatever they are. `from_slot`
    (Slot-Reuse): gradients are first copied into the bound slot and freed at once. `blocks`, `final_blocks`: thread blocks of the sum
    inside a machine and of the last step; 0: the engine's choice. `inbox`: needed for more than one machine. `out_params`: what OUT has
    room for, in its order, where this is one part of several (`parts`); (): `params`. Raises `ValueError` if the slot's dtype does not fit
    the gradients, without an inbox that is needed, or if OUT has no room for some of `params`.
    """
    if from_slot and any(layout.params[p].comm_dtype != grad_dtype for p in params):
        raise ValueError(f"{layout.name}: Slot-Reuse takes gradients in the slot's dtype; got {grad_dtype}")
    if topology.machines > 1 and inbox is None:
        raise ValueError(f"{layout.name}: {topology.machines} machines need an inbox")
    if out_params and not set(params) <= set(out_params):
        raise ValueError(f"{layout.name}: OUT holds parameters {tuple(out_params)}; got {tuple(params)} to reduce")
    cutting = Cutting(layout, topology, tuple(params), ITEM_BYTES[grad_dtype], stage.piece_bytes, tuple(out_params))

    def gradient(cut: Cut, owner: int) -> list[Region]:
        if from_slot:
            return layout.gradient_in_slot(cut.param, owner, cut.start, cut.end)
        return layout.gradient(cut.param, owner, cut.start, cut.end, grad_dtype)

    machine = _Machine(cutting, rank, stage, gradient, grad_dtype, blocks)
    ops: list[Op] = [Record(COMPUTE, names.BEGIN)]
    if from_slot:
        # Compute's reading of the slot ended before BEGIN; pushes out of it may still run.
        ops += [After(names.OWN, names.BEGIN), After(names.OWN, names.SENT)]
        ops += [Cast(names.OWN, _into_slot(layout, params, grad_dtype)), Record(names.OWN, names.GRADS_COPIED)]
    ready = names.GRADS_COPIED if from_slot else names.BEGIN
    ops += [After(names.REDUCE_PUSH, ready), After(names.SUM, ready)]
    read = names.SLOT_READ if from_slot else names.GRADS_READ
    all_read: list[Op] = [
        Record(names.REDUCE_PUSH, names.PUSHED),
        After(names.SUM, names.PUSHED),
        Record(names.SUM, read),
    ]
    arrivals = machine.arrivals()
    if inbox is None:
        out_item = ITEM_BYTES[reduce_dtype]
        for i in range(cutting.pieces):
            ops += machine.piece(0, i, lambda _, cut: (Area.OUT, cut.out * out_item, 0), reduce_dtype, scaled=True)
        ops += [Record(names.SUM, names.DONE), *all_read]
    else:
        rail = _Rail(cutting, rank, machine, inbox, reduce_dtype, final_blocks)
        for c in range(topology.machines):
            ops += rail.contribution(c)
            if c == topology.machines - 1:
                ops += all_read
            if rail.ends_batch(c):
                # The batch before: in strict issue order its last step would hold up this batch's sums.
                ops += rail.last_step(c // inbox.batch - 1)
                ops += rail.seats(c // inbox.batch)
        ops += [*rail.last_step(rail.batches - 1), Record(names.FINAL, names.DONE)]
        arrivals |= rail.arrivals()
    points = {"done": names.DONE, "grads_read": names.GRADS_COPIED if from_slot else names.GRADS_READ}
    if from_slot:
        points["slot_read"] = names.SLOT_READ
    return Program(
        f"reduce_scatter {layout.name}",
        rank,
        tuple(ops),
        points,
        arrivals,
        stage_pieces=machine.total_pieces,
        inbox_batches=rail.batches if inbox is not None else 0,
    )


Place = Callable[[int, Cut], tuple[Area, int, int]]
"""(row of the slice, cut) -> area, byte offset and index of where its sum goes."""


@dataclass
class _Machine:
    """The sums of one rank with its mates: what it pushes to their STAGE and what it adds in its own."""

    cutting: Cutting
    rank: int
    stage: StageSpec
    gradient: Callable[[Cut, int], list[Region]]
    grad_dtype: str
    blocks: int

    def __post_init__(self) -> None:
        self.topology = self.cutting.topology
        self.mates = self.topology.mates(self.rank)
        self.order = self.topology.table[self.topology.machine_of(self.rank)]

    @property
    def total_pieces(self) -> int:
        return self.topology.machines * self.cutting.pieces

    def piece(self, c: int, i: int, place: Place, dst_dtype: str, scaled: bool = False) -> list[Op]:
        """Piece i of the slices of the machine c after this one: pushed to their owners; the own one is summed to `place`."""
        number = c * self.cutting.pieces + i
        ops: list[Op] = []
        for owner in self.mates:
            ops += [Wait(names.REDUCE_PUSH, names.stage_free(owner), number + 1 - self.stage.ring)]
            if number == 0:
                ops += [Post(names.REDUCE_PUSH, owner, 0)]
            ops += [copy(names.REDUCE_PUSH, src, dst, owner) for src, dst in merged(self._pushes(owner, c, i, number))]
            ops += [Signal(names.REDUCE_PUSH, owner, names.staged(self.rank))]
        ops += [Wait(names.SUM, names.staged(source), number + 1) for source in self.mates]
        if number == 0 and self.mates:
            ops += [Agree(names.SUM, self.mates, 0)]
        segments = self._segments(c, i, number, place, ITEM_BYTES[dst_dtype])
        if segments:
            ops += [Reduce(names.SUM, segments, self.grad_dtype, dst_dtype, scaled=scaled, blocks=self.blocks)]
        return ops + [Signal(names.SUM, source, names.stage_free(self.rank)) for source in self.mates]

    def _cuts(self, owner: int, c: int, i: int) -> list[Cut]:
        return self.cutting.piece(self.cutting.owned(self.topology.lane_of(owner), c), i)

    def _pushes(self, owner: int, c: int, i: int, number: int) -> list[Pair]:
        pairs = []
        for cut in self._cuts(owner, c, i):
            for row, target in enumerate(self.cutting.targets(owner, c)):
                lead = 0
                for src in self.gradient(cut, target):
                    pairs.append((src, self._staged(cut, row, self.rank, owner, lead, src, number)))
                    lead += src.nbytes
        return pairs

    def _staged(
        self, cut: Cut, row: int, source: int, owner: int, lead_bytes: int, like: Region, number: int
    ) -> Region:
        """Where `source`'s copy of a region of the gradient stands in `owner`'s STAGE, without the gaps between its rows."""
        place = self.topology.mates(owner).index(source)
        offset = place * self.stage.piece_bytes + (row * self.cutting.step + cut.at) * self.cutting.item + lead_bytes
        pitch = like.row_bytes if like.rows > 1 else 0
        return Region(Area.STAGE, offset, like.row_bytes, like.rows, pitch, number)

    def _segments(self, c: int, i: int, number: int, place: Place, out_item: int) -> tuple[Segment, ...]:
        segments = []
        for cut in self._cuts(self.rank, c, i):
            for row, target in enumerate(self.cutting.targets(self.rank, c)):
                area, offset, index = place(row, cut)
                lead = 0
                for own in self.gradient(cut, target):
                    sources: list[Source] = [
                        own if source == self.rank else self._staged(cut, row, source, self.rank, lead, own, number)
                        for source in self.order
                    ]
                    elements = own.nbytes // self.cutting.item
                    at = offset + lead // self.cutting.item * out_item
                    segments.append(Segment(tuple(sources), Region(area, at, elements * out_item, index=index)))
                    lead += own.nbytes
        return tuple(segments)

    def arrivals(self) -> dict[Word, int]:
        total = self.total_pieces
        return {names.staged(source): total for source in self.mates} | {
            names.stage_free(owner): total for owner in self.mates
        }


@dataclass
class _Rail:
    """Partial sums between machines, and the last step that adds them."""

    cutting: Cutting
    rank: int
    machine: _Machine
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


def _into_slot(layout: GroupLayout, params: Sequence[int], dtype: str) -> tuple[Part, ...]:
    """Slot-Reuse's one copy: each gradient to where its parameter stood."""
    item = ITEM_BYTES[dtype]
    return tuple(
        Part(
            Region(Area.GRAD, 0, layout.params[p].numel * item, index=p),
            Region(Area.SLOT, layout.slot_offsets[p], layout.params[p].numel * item),
            dtype,
            dtype,
        )
        for p in params
        if layout.params[p].numel
    )
