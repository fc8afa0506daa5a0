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
from tide_comm.plan.partials import Rail
from tide_comm.plan.program import (
    COMPUTE,
    After,
    Agree,
    Area,
    Cast,
    Op,
    Part,
    Post,
    Program,
    Record,
    Reduce,
    Region,
    Segment,
    Signal,
    Source,
    Wait,
    Word,
)
from tide_comm.plan.slices import Cut, Cutting, InboxSpec, StageSpec
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

    machine = MachineSums(cutting, rank, stage, gradient, grad_dtype, blocks)
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
        rail = Rail(cutting, rank, machine, inbox, reduce_dtype, final_blocks)
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
class MachineSums:
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
