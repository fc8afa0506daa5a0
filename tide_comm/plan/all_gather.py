"""The all-gather: every piece is written straight to its parameter's final address (design: section "All-gather").

Each lane has one kernel for its own pieces (a cast where the optimizer's dtype differs, into its own slot) and pushes each piece to each
other lane's slot; nothing is pulled, nothing is staged. Parameters whose shard lives in the arena (SHARD) are pushed from there without
waiting for the kernel; the others from the own slot after it.

Between machines a lane exchanges pieces only with its lane on the others (`rounds`): puts go to the final address there, and what arrives
is forwarded from its final address to the other lanes while the next round runs. A round is paced: the receiver confirms the head of its
put list, and the next round starts after that confirmation while the tail is still in flight.

Bytes a lane sends: (L-1) * M * sum(C_p) to its mates, (M-1) * sum(C_p) over its rail.
"""

from __future__ import annotations

from tide_comm.plan import names
from tide_comm.plan.copies import copy, merged
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.program import (
    COMPUTE,
    After,
    Agree,
    Cast,
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


def all_gather(layout: GroupLayout, topology: Topology, rank: int, shard_base: int = 0, head_bytes: int = 0) -> Program:
    """`rank`'s program for the group. `shard_base`: where the group's chunks start in SHARD, in bytes. `head_bytes`: size of a round's
    head; 0: no pacing."""
    mates = topology.mates(rank)
    used = [p for p, param in enumerate(layout.params) if param.chunk]
    in_shard = [p for p in used if layout.params[p].in_shard]
    in_slot = [p for p in used if not layout.params[p].in_shard]
    own = {p: layout.shard(p, shard_base) for p in in_shard} | {p: layout.piece(p, rank) for p in in_slot}
    parts = tuple(
        Part(
            own[p] if layout.params[p].in_shard else layout.master(p),
            layout.piece(p, rank),
            layout.params[p].param_dtype,
            layout.params[p].comm_dtype,
        )
        for p in used
    )
    ops: list[Op] = [Record(COMPUTE, names.BEGIN)]
    ops += [After(names.OWN, names.BEGIN), After(names.OWN, names.VACATED), Cast(names.OWN, parts)]
    ops += [Record(names.OWN, names.OWN_DONE)]
    # Also where nothing is cast: the optimizer may still be writing the shards that are pushed.
    ready: list[Op] = [After(names.PUSH, names.BEGIN)]
    if in_slot:
        ready += [After(names.PUSH, names.OWN_DONE)]
    ops += ready
    steps = rounds(topology, rank)
    for peer in mates:
        ops += [Wait(names.PUSH, names.vacant(peer), 0), Post(names.PUSH, peer, SLOT_TAG)]
        pairs = [(own[p], layout.piece(p, rank)) for p in in_shard + in_slot]
        ops += [copy(names.PUSH, src, dst, peer) for src, dst in merged(pairs)]
        if not steps:
            ops += [Signal(names.PUSH, peer, names.arrived(rank))]
    rail = _Rail(layout, topology, rank, own, used, head_bytes)
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
        Record(names.ARRIVE, names.ARRIVED),
    ]
    points = {"sent": names.SENT, "arrived": names.ARRIVED}
    arrivals = {names.arrived(source): 1 for source in mates} | rail.arrivals()
    return Program(f"all_gather {layout.name}", rank, tuple(ops), points, arrivals)


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
    ) -> None:
        self.layout, self.topology, self.rank = layout, topology, rank
        self.own, self.used = own, used
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
        mates = self.topology.mates(self.rank)
        ops: list[Op] = []
        for entries, (word, count) in zip(self.received[d], self._words(d).items(), strict=True):
            if not count or not mates:
                continue
            ops += [Wait(names.PUSH, word, count)]
            pairs = merged(entry.pair for entry in sorted(entries, key=lambda entry: entry.param))
            for peer in mates:
                ops += [copy(names.PUSH, src, dst, peer) for src, dst in pairs]
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
