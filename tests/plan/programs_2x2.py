"""Programs for two machines of two lanes, written out by hand: what the operations must be able to express.

They use the layout's addresses and nothing of the generators. Names in here, seen from rank (m, l):

- `mate`: (m, 1-l), the other lane of my machine; what I write there goes over NVLink
- `rail`: (1-m, l), my lane on the other machine; what I put there goes over the network
- `far`: (1-m, 1-l); I never talk to it: its pieces come to me through `mate`, mine go to it through `rail`

Every chunk must be even and without padding: a slice is half of each of two shards.
"""

from __future__ import annotations

from dataclasses import dataclass

from tide_comm.plan import names
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.program import (
    COMPUTE,
    After,
    Agree,
    Area,
    Cast,
    Copy,
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
    Wait,
)
from tide_comm.plan.topology import Topology

TOPOLOGY = Topology.regular(2, 2)
RING = 2
"""Places in STAGE; each takes one slice from the mate."""
INBOX_SETS = 2
HEAD_BYTES = 10
"""The head of a round's put list; it splits one piece of most groups."""


@dataclass(frozen=True)
class Me:
    """Rank (m, l) and the two ranks that it exchanges bytes with."""

    machine: int
    lane: int

    @property
    def rank(self) -> int:
        return TOPOLOGY.rank(self.machine, self.lane)

    @property
    def mate(self) -> int:
        return TOPOLOGY.rank(self.machine, self.lane + 1)

    @property
    def rail(self) -> int:
        return TOPOLOGY.rank(self.machine + 1, self.lane)


def put_list(sources: list[Region], targets: list[Region], head_bytes: int) -> tuple[list, list]:
    """(source, target) of each put of a round as head and tail: at most one piece is split."""
    head, tail, room = [], [], head_bytes
    for src, dst in zip(sources, targets, strict=True):
        cut = min(room, src.nbytes)
        room -= cut
        for where, start, nbytes in ((head, 0, cut), (tail, cut, src.nbytes - cut)):
            if nbytes:
                where.append(
                    (
                        Region(src.area, src.offset + start, nbytes, index=src.index),
                        Region(dst.area, dst.offset + start, nbytes, index=dst.index),
                    )
                )
    return head, tail


def all_gather(layout: GroupLayout, shard_base: int, machine: int, lane: int, head_bytes: int = HEAD_BYTES) -> Program:
    """One round of recursive doubling on the rail; every piece goes straight to its final address and from there to the mate."""
    me = Me(machine, lane)
    r, mate, rail = me.rank, me.mate, me.rail
    params = range(len(layout.params))
    final = [layout.piece(p, r) for p in params]
    own = [layout.shard(p, shard_base) if layout.params[p].in_shard else final[p] for p in params]
    head, tail = put_list(own, final, head_bytes)
    # What arrives on the rail is cut in the same way, at the rail peer's final addresses.
    theirs = [layout.piece(p, rail) for p in params]
    head_in, tail_in = ([dst for _, dst in part] for part in put_list(theirs, theirs, head_bytes))
    parts = tuple(
        Part(
            layout.shard(p, shard_base) if layout.params[p].in_shard else layout.master(p),
            final[p],
            layout.params[p].param_dtype,
            layout.params[p].comm_dtype,
        )
        for p in params
    )
    ready = names.BEGIN if all(param.in_shard for param in layout.params) else names.OWN_DONE
    ops: list[Op] = [
        Record(COMPUTE, names.BEGIN),
        # One kernel for the own pieces.
        After(names.OWN, names.BEGIN),
        After(names.OWN, names.VACATED),
        Cast(names.OWN, parts),
        Record(names.OWN, names.OWN_DONE),
        # Own pieces to the mate: from SHARD at once (the optimizer is done), from the own slot after the kernel.
        After(names.PUSH, ready),
        Wait(names.PUSH, names.vacant(mate), 0),
        Post(names.PUSH, mate, -1),
        *[Copy(names.PUSH, own[p], final[p], mate) for p in params],
        Signal(names.PUSH, mate, names.arrived(r)),
        # The round: own pieces over the rail, the head first; not before the head of the round before is confirmed.
        After(names.RAIL, ready),
        Wait(names.RAIL, names.confirmed(rail), 0),
        Wait(names.RAIL, names.vacant(rail), 0),
        *[Put(names.RAIL, src, dst, rail, names.head(r)) for src, dst in head],
        *[Put(names.RAIL, src, dst, rail, names.tail(r)) for src, dst in tail],
        Record(names.RAIL, names.RAIL_SENT),
        # The confirmation has a stream of its own: on RAIL it would queue behind the own puts, on PUSH behind the forwards.
        Wait(names.CONFIRM, names.head(rail), len(head_in)),
        Signal(names.CONFIRM, rail, names.confirmed(r)),
        # What arrived goes on to the mate, from its final address to its final address.
        Wait(names.PUSH, names.head(rail), len(head_in)),
        *[Copy(names.PUSH, piece, piece, mate) for piece in head_in],
        *([Wait(names.PUSH, names.tail(rail), len(tail_in))] if tail_in else []),
        *[Copy(names.PUSH, piece, piece, mate) for piece in tail_in],
        Signal(names.PUSH, mate, names.arrived(r)),
        # Sources are free when pushes, forwards and puts have read them.
        After(names.PUSH, names.RAIL_SENT),
        Record(names.PUSH, names.SENT),
        # The consumer: the mate's pieces and forwards, the rail peer's pieces, the own kernel.
        Wait(names.ARRIVE, names.arrived(mate), 2),
        Wait(names.ARRIVE, names.head(rail), len(head_in)),
        *([Wait(names.ARRIVE, names.tail(rail), len(tail_in))] if tail_in else []),
        Agree(names.ARRIVE, (mate,), -1),
        After(names.ARRIVE, names.OWN_DONE),
        Record(names.ARRIVE, names.ARRIVED),
    ]
    arrivals = {names.arrived(mate): 2, names.head(rail): len(head_in), names.confirmed(rail): 1}
    if tail_in:
        arrivals[names.tail(rail)] = len(tail_in)
    points = {"sent": names.SENT, "arrived": names.ARRIVED}
    return Program(f"all_gather {layout.name}", r, tuple(ops), points, arrivals)


def vacate(machine: int, lane: int, reduced_from: bool) -> Program:
    """The slot is free for the mate's pushes and for the rail peer's puts."""
    me = Me(machine, lane)
    ops: list[Op] = [
        After(COMPUTE, names.SENT),
        Record(COMPUTE, names.READ),
        After(names.VACANCY, names.READ),
        *([After(names.VACANCY, names.SLOT_READ)] if reduced_from else []),
        Record(names.VACANCY, names.VACATED),
        Signal(names.VACANCY, me.mate, names.vacant(me.rank)),
        Signal(names.VACANCY, me.rail, names.vacant(me.rank)),
    ]
    arrivals = {names.vacant(me.mate): 1, names.vacant(me.rail): 1}
    return Program("vacate", me.rank, tuple(ops), {"vacated": names.VACATED}, arrivals)


@dataclass(frozen=True)
class Cut:
    """Elements [start, end) of every rank's chunk of a parameter, `at` elements from the start of the block."""

    param: int
    start: int
    end: int
    at: int


@dataclass(frozen=True)
class Slices:
    """Which gradient elements form block (j, s): half s of the shard of rank (D, j); B elements each."""

    layout: GroupLayout
    from_slot: bool

    @property
    def shard(self) -> int:
        return sum(param.chunk for param in self.layout.params)

    @property
    def block(self) -> int:
        assert self.shard % 2 == 0, "slices of two blocks take an even shard"
        return self.shard // 2

    def cuts(self, s: int) -> list[Cut]:
        """Half s of a shard, parameter by parameter: a boundary may lie inside a chunk."""
        first, last, base, found = s * self.block, (s + 1) * self.block, 0, []
        for p, param in enumerate(self.layout.params):
            start, end = max(first, base), min(last, base + param.chunk)
            if start < end:
                found.append(Cut(p, start - base, end - base, start - first))
            base += param.chunk
        return found

    def gradient(self, rank: int, cut: Cut) -> Region:
        """Where this rank's gradient holds a cut of the shard of `rank`."""
        if self.from_slot:
            (region,) = self.layout.gradient_in_slot(cut.param, rank, cut.start, cut.end)
        else:
            (region,) = self.layout.gradient(cut.param, rank, cut.start, cut.end, "bfloat16")
        return region

    def staged(self, c: int, j: int, cut: Cut) -> Region:
        """The mate's copy of block (j, s) in place c of STAGE."""
        return Region(Area.STAGE, (j * self.block + cut.at) * 2, (cut.end - cut.start) * 2, index=c)

    def partial(self, j: int, cut: Cut | None = None) -> Region:
        """Block (j, s) of a partial sum: the blocks alternate between the two PARTIALs."""
        if cut is None:
            return Region(Area.PARTIAL, 0, self.block * 4, index=j)
        return Region(Area.PARTIAL, cut.at * 4, (cut.end - cut.start) * 4, index=j)

    def seat(self, j: int, s: int, cut: Cut | None = None) -> Region:
        """Block (j, s) in an inbox: at the same address on every lane."""
        at, elements = (0, self.block) if cut is None else (cut.at, cut.end - cut.start)
        return Region(Area.INBOX, ((s * 2 + j) * self.block + at) * 4, elements * 4)


def reduce_scatter(layout: GroupLayout, machine: int, lane: int, from_slot: bool) -> Program:
    """bf16 to the slice's owner, fp32 over the rail, and each lane's last step adds its block from both lanes' inboxes."""
    me = Me(machine, lane)
    r, mate, rail = me.rank, me.mate, me.rail
    slices = Slices(layout, from_slot)
    ops: list[Op] = [Record(COMPUTE, names.BEGIN)]
    ready = names.BEGIN
    if from_slot:
        grads = tuple(
            Part(
                Region(Area.GRAD, 0, param.numel * 2, index=p),
                Region(Area.SLOT, layout.slot_offsets[p], param.numel * 2),
                "bfloat16",
                "bfloat16",
            )
            for p, param in enumerate(layout.params)
        )
        ops += [After(names.OWN, names.BEGIN), After(names.OWN, names.SENT), Cast(names.OWN, grads)]
        ops += [Record(names.OWN, names.GRADS_COPIED)]
        ready = names.GRADS_COPIED
    ops += [After(names.REDUCE_PUSH, ready), After(names.SUM, ready)]
    for c in (0, 1):
        destination = [TOPOLOGY.rank(machine + c, j) for j in (0, 1)]
        mine, mates = (lane + c) % 2, (1 - lane + c) % 2  # the slices that I and my mate own
        # The mate's slice to the mate.
        ops += [Wait(names.REDUCE_PUSH, names.stage_free(mate), c + 1 - RING)]
        ops += [Post(names.REDUCE_PUSH, mate, 0)] if c == 0 else []
        for j in (0, 1):
            for cut in slices.cuts(mates):
                src = slices.gradient(destination[j], cut)
                ops += [Copy(names.REDUCE_PUSH, src, slices.staged(c, j, cut), mate)]
        ops += [Signal(names.REDUCE_PUSH, mate, names.staged(r))]
        # My slice: lane 0's copy first, whichever of the two is mine.
        ops += [Wait(names.SUM, names.staged(mate), c + 1)]
        if c == 0:
            ops += [Agree(names.SUM, (mate,), 0)]
            # My inbox set was last used two launches ago; both lanes must have read it.
            ops += [Wait(names.SUM, names.final_done(lane_rank), -1) for lane_rank in (r, mate)]
        for j in (0, 1):
            segments = []
            for cut in slices.cuts(mine):
                copies = [slices.gradient(destination[j], cut), slices.staged(c, j, cut)]
                target = slices.partial(j, cut) if c else slices.seat(j, mine, cut)
                segments.append(Segment(tuple(copies if lane == 0 else reversed(copies)), target))
            if c:
                ops += [After(names.SUM, names.partial_read(j))]
            ops += [Reduce(names.SUM, tuple(segments), "bfloat16", "float32")]
            if c:
                ops += [Record(names.SUM, names.partial_summed(j)), After(names.REDUCE_RAIL, names.partial_summed(j))]
                ops += [Wait(names.REDUCE_RAIL, names.credit(rail), -1)] if j == 0 else []
                seat = slices.seat(j, mine)
                ops += [Put(names.REDUCE_RAIL, slices.partial(j), seat, rail, names.partial_arrived(r))]
                ops += [Record(names.REDUCE_RAIL, names.partial_read(j))]
        ops += [Signal(names.SUM, mate, names.stage_free(r))]
        ops += [Record(names.SUM, names.OWN_SEATED)] if c == 0 else []
    ops += [Record(names.REDUCE_PUSH, names.PUSHED), After(names.SUM, names.PUSHED)]
    ops += [Record(names.SUM, names.SLOT_READ if from_slot else names.GRADS_READ)]
    # Both partial sums in my inbox are announced to both lanes: each reads its block of them.
    ops += [After(names.SEAT, names.OWN_SEATED)]
    ops += [Signal(names.SEAT, lane_rank, names.seated(r)) for lane_rank in (r, mate)]
    ops += [Wait(names.SEAT, names.partial_arrived(rail), 2)]
    ops += [Signal(names.SEAT, lane_rank, names.seated(r)) for lane_rank in (r, mate)]
    # The last step: slice s of index c sits on lane (s - c) mod 2.
    ops += [Wait(names.FINAL, names.seated(lane_rank), 2) for lane_rank in (r, mate)]
    last = []
    for s in (0, 1):
        sources = tuple(Remote(TOPOLOGY.rank(machine, s - c), slices.seat(lane, s)) for c in (0, 1))
        last.append(Segment(sources, Region(Area.OUT, s * slices.block * 4, slices.block * 4)))
    ops += [Reduce(names.FINAL, tuple(last), "float32", "float32", scaled=True), Record(names.FINAL, names.DONE)]
    # The set is free when both lanes have read it; its next source is the rail peer.
    ops += [Signal(names.FINAL, lane_rank, names.final_done(r)) for lane_rank in (r, mate)]
    ops += [Wait(names.FINAL, names.final_done(mate), 1), Signal(names.FINAL, rail, names.credit(r))]
    points = {"done": names.DONE, "grads_read": names.GRADS_COPIED if from_slot else names.GRADS_READ}
    if from_slot:
        points["slot_read"] = names.SLOT_READ
    arrivals = {names.stage_free(mate): 2, names.staged(mate): 2, names.partial_arrived(rail): 2, names.credit(rail): 1}
    arrivals |= {names.seated(r): 2, names.seated(mate): 2, names.final_done(r): 1, names.final_done(mate): 1}
    return Program(f"reduce_scatter {layout.name}", r, tuple(ops), points, arrivals, stage_pieces=2, inbox_batches=1)
