"""The all-gather: every piece is written straight to its parameter's final address (design: section "All-gather").

Each lane has one kernel for its own pieces (a cast where the optimizer's dtype differs, into its own slot) and pushes each piece to each
other lane's slot; nothing is pulled, nothing is staged. Parameters whose shard lives in the arena (SHARD) are pushed from there, without
waiting for the kernel if all do; the others from the own slot after it. Where there is much to cast on one machine, the kernel is several,
one a portion, and the first mate gets each portion when it is cast (`portions`).

Between machines a lane exchanges pieces only with its lane on the others (`rounds`): puts go to the final address there, and what arrives
is forwarded from its final address to the other lanes while the next round runs. A round is paced: the receiver confirms the head of its
put list, and the next round starts after that confirmation while the tail is still in flight.

Bytes a lane sends: (L-1) * M * sum(C_p) to its mates, (M-1) * sum(C_p) over its rail.

With multicast, pieces up to a size go to all lanes by one write (`CopyAll`), and only M * sum(C_p) leave the lane. The write reaches the
own slot too: pieces from SHARD need no copy by the kernel, and pieces that are in the own slot already (cast, or put there by another
machine) are written over themselves. As it reaches all slots at once, it waits until all of them are vacant.
"""

from __future__ import annotations

from collections.abc import Iterable

from tide_comm.plan import names
from tide_comm.plan.copies import Pair, copy, merged
from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.portions import portions
from tide_comm.plan.program import (
    COMPUTE,
    After,
    Agree,
    Cast,
    CopyAll,
    Op,
    Part,
    Post,
    Program,
    Put,
    Record,
    Region,
    Signal,
    Wait,
    Word,
)
from tide_comm.plan.rounds import Entry, Round, rounds, split
from tide_comm.plan.topology import Topology

SLOT_TAG = -1
"""Tag index that means the bound slot's: reused only after the slot's vacancy, so a tag is never overwritten unread."""

MULTICAST_ALIGN_BYTES = 16
"""A write to a multicast address takes whole units of this many bytes; what lies otherwise goes to each lane by itself."""


def all_gather(
    layout: GroupLayout,
    topology: Topology,
    rank: int,
    shard_base: int = 0,
    head_bytes: int = 0,
    multicast_bytes: int = 0,
) -> Program:
    """`rank`'s program for the group. `shard_base`: where the group's chunks start in SHARD, in bytes. `head_bytes`: size of a round's
    head; 0: no pacing. `multicast_bytes`: pieces of at most so many bytes reach all lanes by one write; 0: none do."""
    mates = topology.mates(rank)
    used = [p for p, param in enumerate(layout.params) if param.chunk]
    in_shard = [p for p in used if layout.params[p].in_shard]
    in_slot = [p for p in used if not layout.params[p].in_shard]
    own = {p: layout.shard(p, shard_base) for p in in_shard} | {p: layout.piece(p, rank) for p in in_slot}
    pushes = _Pushes(layout, topology, rank, multicast_bytes)
    to_all, to_each = pushes.divided((p, (own[p], layout.piece(p, rank))) for p in in_shard + in_slot)
    spread = {p for p, _ in to_all}
    # Rails and writes to all lanes take own pieces when all are cast, which several kernels would put off.
    cast = portions(layout, in_slot, rank, divide=bool(mates) and not spread and topology.machines == 1)
    gates = [*(names.own_cast(k) for k in range(len(cast) - 1)), names.OWN_DONE]
    copied = [
        Part(own[p], layout.piece(p, rank), *[layout.params[p].comm_dtype] * 2) for p in in_shard if p not in spread
    ]
    ops: list[Op] = [Record(COMPUTE, names.BEGIN)]
    ops += [After(names.OWN, names.BEGIN), After(names.OWN, names.VACATED)]
    for portion, gate in zip(cast, gates, strict=True):
        # Own copies, for which only this rank's consumer waits, are in the last kernel, behind what is pushed from there.
        parts = portion + copied if gate == names.OWN_DONE else portion
        ops += [Cast(names.OWN, tuple(parts))] if parts or not used else []
        ops += [Record(names.OWN, gate)]
    steps = rounds(topology, rank)
    vacated: dict[int, list[Op]] = {
        peer: [Wait(names.PUSH, names.vacant(peer), 0), Post(names.PUSH, peer, SLOT_TAG)] for peer in mates
    }
    # Also where nothing is cast: the optimizer may still be writing the shards that are pushed.
    ops += [After(names.PUSH, names.BEGIN)]
    if in_slot:
        ops += [After(names.PUSH, gates[0])]
    if spread:
        ops += [op for peer in mates for op in vacated.pop(peer)] + [After(names.PUSH, names.VACATED)]
        ops += pushes.to_all(pair for _, pair in to_all) + [Record(names.PUSH, names.OWN_PUSHED)]
    for peer in mates:
        ops += vacated.get(peer, [])
        if peer != mates[0] or len(cast) == 1:
            ops += pushes.to_each(peer, (pair for _, pair in to_each))
        else:
            ops += pushes.to_each(peer, ((own[p], layout.piece(p, rank)) for p in in_shard))
            for k, portion in enumerate(cast):
                ops += [After(names.PUSH, gates[k])] if k else []
                ops += pushes.to_each(peer, ((part.dst, part.dst) for part in portion))
        if not steps:
            ops += [Signal(names.PUSH, peer, names.arrived(rank))]
    rail = _Rail(layout, topology, rank, own, used, head_bytes, pushes)
    if steps:
        ops += [After(names.RAIL, names.BEGIN)]
        if in_slot:
            ops += [After(names.RAIL, names.OWN_DONE)]
        for d in range(len(steps)):
            ops += rail.puts(d) + rail.confirmation(d) + rail.forwards(d)
        ops += [Record(names.RAIL, names.RAIL_SENT)]
        ops += [Signal(names.PUSH, peer, names.arrived(rank)) for peer in mates]
        # Sources are free when pushes, forwards and puts have read them.
        ops += [After(names.PUSH, names.RAIL_SENT)]
    ops += [Record(names.PUSH, names.SENT)]
    ops += [Wait(names.ARRIVE, names.arrived(source), 1) for source in mates]
    for d in range(len(steps)):
        ops += rail.waits(names.ARRIVE, d)
    ops += [
        Agree(names.ARRIVE, mates + tuple(step.source for step in steps if used), SLOT_TAG),
        After(names.ARRIVE, names.OWN_DONE),
    ]
    ops += [After(names.ARRIVE, names.OWN_PUSHED)] if spread else []
    ops += [Record(names.ARRIVE, names.ARRIVED)]
    points = {"sent": names.SENT, "arrived": names.ARRIVED}
    arrivals = {names.arrived(source): 1 for source in mates} | rail.arrivals()
    return Program(f"all_gather {layout.name}", rank, tuple(ops), points, arrivals)


class _Pushes:
    """One rank's copies to its mates: by one write to all, or to each by itself."""

    def __init__(self, layout: GroupLayout, topology: Topology, rank: int, multicast_bytes: int) -> None:
        self.layout = layout
        self.mates = topology.mates(rank)
        self.lanes = topology.table[topology.machine_of(rank)]
        self.most = multicast_bytes if self.mates else 0

    def divided(self, pieces: Iterable[tuple[int, Pair]]) -> tuple[list[tuple[int, Pair]], list[tuple[int, Pair]]]:
        """(parameter, piece or part of it): those that go to all lanes at once, and the others."""
        to_all: list[tuple[int, Pair]] = []
        to_each: list[tuple[int, Pair]] = []
        for p, pair in pieces:
            param = self.layout.params[p]
            small = param.chunk * ITEM_BYTES[param.comm_dtype] <= self.most
            (to_all if small and all(map(_aligned, pair)) else to_each).append((p, pair))
        return to_all, to_each

    def to_all(self, pairs: Iterable[Pair]) -> list[Op]:
        return [CopyAll(names.PUSH, src, dst, self.lanes) for src, dst in merged(pairs)]

    def to_each(self, peer: int, pairs: Iterable[Pair]) -> list[Op]:
        return [copy(names.PUSH, src, dst, peer) for src, dst in merged(pairs)]


def _aligned(region: Region) -> bool:
    """Whether a multicast address takes it; `pitch` is 0 where there is one row."""
    return not any(at % MULTICAST_ALIGN_BYTES for at in (region.offset, region.row_bytes, region.pitch))


class _Rail:
    """One rank's rounds: what it puts, confirms and forwards."""

    def __init__(
        self,
        layout: GroupLayout,
        topology: Topology,
        rank: int,
        own: dict[int, Region],
        used: list[int],
        head_bytes: int,
        pushes: _Pushes,
    ) -> None:
        self.layout, self.topology, self.rank = layout, topology, rank
        self.own, self.used = own, used
        self.pushes = pushes
        self.paced = head_bytes > 0
        self.machine, self.lane = topology.machine_of(rank), topology.lane_of(rank)
        self.steps: list[Round] = rounds(topology, rank)
        self.sent = [split(self._entries(0, step.count), head_bytes) for step in self.steps]
        self.received = [split(self._entries(step.distance, step.count), head_bytes) for step in self.steps]

    def _entries(self, first: int, count: int) -> list[Entry]:
        """Pieces of the machines `first`, `first + 1`, ... after this one; own ones come from where they are."""
        entries = []
        for k in range(first, first + count):
            origin = self.topology.rank(self.machine + k, self.lane)
            for p in self.used:
                final = self.layout.piece(p, origin)
                entries.append(Entry(k, p, (final if k else self.own[p], final)))
        return entries

    def waits(self, stream: str, d: int) -> list[Op]:
        """Everything of round d has arrived."""
        return [Wait(stream, word, count) for word, count in self._words(d).items() if count]

    def _words(self, d: int) -> dict[Word, int]:
        head, tail = self.received[d]
        source = self.steps[d].source
        return {names.head(source): len(head), names.tail(source): len(tail)}

    def puts(self, d: int) -> list[Op]:
        step = self.steps[d]
        ops: list[Op] = []
        if self.paced:
            # The head of the round before; for the first one, of the last round of the launch before.
            ops += [Wait(names.RAIL, names.confirmed(self.steps[d - 1].target), 1 if d else 0)]
        ops += [Wait(names.RAIL, names.vacant(step.target), 0)]
        if self.used:
            ops += [Post(names.RAIL, step.target, SLOT_TAG)]
        awaited = 0  # rounds whose pieces have been waited for; round e brings the machines from 2^e on
        for entries, word in zip(self.sent[d], (names.head(self.rank), names.tail(self.rank)), strict=True):
            for entry in entries:
                while awaited < d and self.steps[awaited].distance <= entry.origin:
                    ops += self.waits(names.RAIL, awaited)
                    awaited += 1
                src, dst = entry.pair
                ops += [Put(names.RAIL, src, dst, step.target, word)]
        return ops

    def confirmation(self, d: int) -> list[Op]:
        """A stream of its own: on RAIL it would queue behind the own puts, on PUSH behind the forwards."""
        if not self.paced:
            return []
        source = self.steps[d].source
        head = len(self.received[d][0])
        ops: list[Op] = [Wait(names.CONFIRM, names.head(source), head)] if head else []
        return [*ops, Signal(names.CONFIRM, source, names.confirmed(self.rank))]

    def forwards(self, d: int) -> list[Op]:
        """What arrived goes on to the mates, from its final address to its final address; machines that follow one another as rows."""
        mates = self.pushes.mates
        ops: list[Op] = []
        for entries, (word, count) in zip(self.received[d], self._words(d).items(), strict=True):
            if not count or not mates:
                continue
            ops += [Wait(names.PUSH, word, count)]
            ordered = sorted(entries, key=lambda entry: entry.param)
            to_all, to_each = self.pushes.divided((entry.param, entry.pair) for entry in ordered)
            ops += self.pushes.to_all(pair for _, pair in to_all)
            for peer in mates:
                ops += self.pushes.to_each(peer, (pair for _, pair in to_each))
        return ops

    def arrivals(self) -> dict[Word, int]:
        found: dict[Word, int] = {}
        for d, step in enumerate(self.steps):
            found |= {word: count for word, count in self._words(d).items() if count}
            if self.paced:
                found[names.confirmed(step.target)] = 1
        return found


def vacate(topology: Topology, rank: int, reduced_from: bool = False) -> Program:
    """Give the bound slot back: compute has read it, this rank's own pushes and puts out of it are done, then those are told who write into
    it: the mates, and the rail peers of each round.

    `reduced_from`: the slot was held for a reduce-scatter (Slot-Reuse), whose reading must have ended too. Compute waits for the
    pushes here and not in the consumer: here they are long done, and whoever writes the shards next (an optimizer, an EMA swap,
    load_state_dict) is ordered behind them.
    """
    steps = rounds(topology, rank)
    writers = topology.mates(rank) + tuple(step.source for step in steps)
    owners = topology.mates(rank) + tuple(step.target for step in steps)
    ops: list[Op] = [After(COMPUTE, names.SENT), Record(COMPUTE, names.READ), After(names.VACANCY, names.READ)]
    if reduced_from:
        ops += [After(names.VACANCY, names.SLOT_READ)]
    ops += [Record(names.VACANCY, names.VACATED)]
    ops += [Signal(names.VACANCY, peer, names.vacant(rank)) for peer in writers]
    return Program("vacate", rank, tuple(ops), {"vacated": names.VACATED}, {names.vacant(peer): 1 for peer in owners})
