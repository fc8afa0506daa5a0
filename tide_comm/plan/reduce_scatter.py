"""The reduce-scatter: gradients are read where they are and summed in fp32 in rank order (design: section "Reduce-scatter").

One machine of L lanes. Lane j owns its own shard. The other lanes push their gradients of it to j's STAGE, piece by piece through a ring
of `ring` places; j sums the L copies, its own read in place, straight into its gradient shard. Bytes a lane sends: (L-1)/L of the group's
gradients in their own dtype, where NCCL moves fp32.

Flow control is by credits: the owner raises `stage_free` after the sum of a piece; at start each pusher has `ring` of
them (`prime`). Piece i of a launch needs ring - 1 fewer than all pieces before it, over all launches, hence
`Wait(stage_free, i + 1 - ring)` on top of the primed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide_comm.plan import names
from tide_comm.plan.all_gather import copy
from tide_comm.plan.layout import ITEM_BYTES, GroupLayout
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
)
from tide_comm.plan.topology import Topology

STAGE_ALIGN_BYTES = 16
"""Segments in STAGE start at multiples of this, so that kernels can use 16-byte loads."""


@dataclass(frozen=True)
class StageSpec:
    """The ring in STAGE: `ring` places of (L-1) copies of `piece_bytes` each."""

    piece_bytes: int
    ring: int
    lanes: int

    @property
    def place_bytes(self) -> int:
        return self.piece_bytes * (self.lanes - 1)

    @property
    def total_bytes(self) -> int:
        return self.place_bytes * self.ring


@dataclass(frozen=True)
class Cut:
    """Elements [start, end) of every rank's chunk of a parameter, at `offset` bytes within the piece and element `out` of the shard."""

    param: int
    start: int
    end: int
    offset: int
    out: int


def pieces_of(layout: GroupLayout, params: Sequence[int], item: int, piece_bytes: int) -> list[list[Cut]]:
    """Cut a shard of the given parameters into pieces of at most `piece_bytes`; the same for every rank, padding included.

    Parameters sharded on a dimension > 0 are cut at row boundaries where a row fits. OUT is dense, as FSDP2 lays it out.
    """
    pieces: list[list[Cut]] = [[]]
    used, out = 0, 0
    for p in params:
        param = layout.params[p]
        start = 0
        while start < param.chunk:
            room = (piece_bytes - used) // item
            take = min(param.chunk - start, room)
            if start + take < param.chunk and param.outer > 1 and take >= param.row:
                take -= (start + take) % param.row
            if take <= 0:
                pieces.append([])
                used = 0
                continue
            pieces[-1].append(Cut(p, start, start + take, used, out + start))
            used = -(-(used + take * item) // STAGE_ALIGN_BYTES) * STAGE_ALIGN_BYTES
            start += take
        out += param.chunk
    return [piece for piece in pieces if piece] or [[]]


def shard_elements(layout: GroupLayout, params: Sequence[int]) -> int:
    """S: elements of the reduced shard, padding included."""
    return sum(layout.params[p].chunk for p in params)


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
) -> Program:
    """`rank`'s program on one machine for those `params` (indices, in FSDP2's order) that have gradients.

    `grad_dtype` is the gradients' dtype, `reduce_dtype` that of OUT; sums are fp32 whatever they are. `from_slot`
    (Slot-Reuse): gradients are first copied into the bound slot and freed at once. Raises `NotImplementedError` for
    more than one machine, `ValueError` if the slot's dtype does not fit the gradients.
    """
    if topology.machines != 1:
        raise NotImplementedError(f"reduce_scatter: one machine only; got {topology.machines}")
    if from_slot and any(layout.params[p].comm_dtype != grad_dtype for p in params):
        raise ValueError(f"{layout.name}: Slot-Reuse takes gradients in the slot's dtype; got {grad_dtype}")
    item, out_item = ITEM_BYTES[grad_dtype], ITEM_BYTES[reduce_dtype]
    mates = topology.mates(rank)
    order = list(topology.table[0])
    pieces = pieces_of(layout, params, item, stage.piece_bytes)

    def gradient(cut: Cut, owner: int) -> list[Region]:
        if from_slot:
            return layout.gradient_in_slot(cut.param, owner, cut.start, cut.end)
        return layout.gradient(cut.param, owner, cut.start, cut.end, grad_dtype)

    def staged_at(cut: Cut, source: int, owner: int, piece: int, lead_bytes: int, like: Region) -> Region:
        place = topology.mates(owner).index(source)
        rows = like.rows > 1
        offset = place * stage.piece_bytes + cut.offset + lead_bytes
        return Region(Area.STAGE, offset, like.row_bytes, like.rows, like.row_bytes if rows else 0, piece)

    ops: list[Op] = [Record(COMPUTE, names.BEGIN)]
    if from_slot:
        # Compute's reading of the slot ended before BEGIN; pushes out of it may still run.
        ops += [After(names.OWN, names.BEGIN), After(names.OWN, names.SENT)]
        ops += [Cast(names.OWN, _into_slot(layout, params, grad_dtype)), Record(names.OWN, names.GRADS_COPIED)]
    ready = names.GRADS_COPIED if from_slot else names.BEGIN
    ops += [After(names.REDUCE_PUSH, ready), After(names.SUM, ready)]
    for i, piece in enumerate(pieces):
        for owner in mates:
            ops += [Wait(names.REDUCE_PUSH, names.stage_free(owner), i + 1 - stage.ring)]
            if i == 0:
                ops += [Post(names.REDUCE_PUSH, owner, 0)]
            for cut in piece:
                lead = 0
                for src in gradient(cut, owner):
                    ops += [copy(names.REDUCE_PUSH, src, staged_at(cut, rank, owner, i, lead, src), owner)]
                    lead += src.nbytes
            ops += [Signal(names.REDUCE_PUSH, owner, names.staged(rank))]
        ops += [Wait(names.SUM, names.staged(source), i + 1) for source in mates]
        if i == 0:
            ops += [Agree(names.SUM, mates, 0)]
        segments = []
        for cut in piece:
            lead = 0
            for own in gradient(cut, rank):
                sources: list[Source] = [
                    own if source == rank else staged_at(cut, source, rank, i, lead, own) for source in order
                ]
                dst = Region(Area.OUT, cut.out * out_item + lead // item * out_item, own.nbytes // item * out_item)
                segments.append(Segment(tuple(sources), dst))
                lead += own.nbytes
        if segments:
            ops += [Reduce(names.SUM, tuple(segments), grad_dtype, reduce_dtype, scaled=True, blocks=blocks)]
        ops += [Signal(names.SUM, source, names.stage_free(rank)) for source in mates]
    ops += [Record(names.SUM, names.DONE), Record(names.REDUCE_PUSH, names.PUSHED), After(names.SUM, names.PUSHED)]
    read = names.SLOT_READ if from_slot else names.GRADS_READ
    ops += [Record(names.SUM, read)]
    points = {"done": names.DONE, "grads_read": names.GRADS_COPIED if from_slot else names.GRADS_READ}
    if from_slot:
        points["slot_read"] = names.SLOT_READ
    arrivals = {names.staged(source): len(pieces) for source in mates}
    arrivals |= {names.stage_free(owner): len(pieces) for owner in mates}
    return Program(f"reduce_scatter {layout.name}", rank, tuple(ops), points, arrivals, stage_pieces=len(pieces))


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


def prime(topology: Topology, rank: int, ring: int) -> Program:
    """Run once when the arena is made: hands each pusher `ring` credits."""
    mates = topology.mates(rank)
    ops = tuple(Signal(names.SUM, peer, names.stage_free(rank)) for peer in mates for _ in range(ring))
    return Program("prime", rank, ops, {}, {names.stage_free(peer): ring for peer in mates})
