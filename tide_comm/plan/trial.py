"""Programs that only try what others will depend on: the rail, and what reaches all lanes of a machine at once."""

from __future__ import annotations

from tide_comm.plan import names
from tide_comm.plan.program import (
    COMPUTE,
    After,
    Area,
    CopyAll,
    Event,
    LaneSum,
    Op,
    Program,
    Record,
    Reduce,
    Region,
    Segment,
    Signal,
    Wait,
    Word,
)
from tide_comm.plan.topology import Topology

TRIAL_BYTES = 16
"""What is added: one access of the widest kind; what is written is a multiple of it."""


def rail_trial(topology: Topology, rank: int) -> Program:
    """`rank`'s program: a word to every machine on every stream that writes to others. One stream after the other, for they raise the same
    word."""
    peers = [peer for peer in topology.rail(rank) if peer != rank]
    ops: list[Op] = []
    for k, stream in enumerate(names.RAIL_STREAMS):
        if k:
            ops += [After(stream, names.trial_sent(k - 1))]
        ops += [Signal(stream, peer, names.tried(rank)) for peer in peers]
        ops += [Record(stream, names.trial_sent(k))]
    heard = len(names.RAIL_STREAMS)
    ops += [Wait(names.ARRIVE, names.tried(peer), heard) for peer in peers]
    ops += [Record(names.ARRIVE, names.TRIED)]
    return Program("rail_trial", rank, tuple(ops), {"tried": names.TRIED}, {names.tried(peer): heard for peer in peers})


def lanes_trial(topology: Topology, rank: int, nbytes: int, adds: bool) -> Program:
    """`rank`'s program of a trial of what reaches all lanes at once. `nbytes` (0: none) of the bound slot at its lane's place go to all
    lanes (`arrived`). `adds`: the sum of what 16 bytes at the start of all lanes' inboxes hold comes to PARTIAL (`added`).

    By itself it is no program of a sequence: nothing says when its bytes may be written again, nor when the own ones stand there. All ranks
    must have come to its end, and their devices be idle, before anything else is launched.
    """
    lanes = topology.table[topology.machine_of(rank)]
    mates = [peer for peer in lanes if peer != rank]
    ops: list[Op] = []
    points: dict[str, Event] = {}
    arrivals: dict[Word, int] = {}
    if nbytes:
        own = Region(Area.SLOT, topology.lane_of(rank) * nbytes, nbytes)
        ops += [After(names.PUSH, names.BEGIN), CopyAll(names.PUSH, own, own, lanes)]
        ops += [Signal(names.PUSH, peer, names.arrived(rank)) for peer in mates]
        ops += [Wait(names.ARRIVE, names.arrived(peer), 1) for peer in mates] + [Record(names.ARRIVE, names.ARRIVED)]
        points["arrived"] = names.ARRIVED
        arrivals = {names.arrived(peer): 1 for peer in mates}
    if adds:
        total = Region(Area.PARTIAL, 0, TRIAL_BYTES)
        segment = Segment((LaneSum(lanes, Region(Area.INBOX, 0, TRIAL_BYTES)),), total)
        ops += [After(names.FINAL, names.BEGIN), Reduce(names.FINAL, (segment,), "float32", "float32", blocks=1)]
        ops += [Record(names.FINAL, names.ADDED)]
        points["added"] = names.ADDED
    if ops:
        ops.insert(0, Record(COMPUTE, names.BEGIN))
    return Program("lanes_trial", rank, tuple(ops), points, arrivals)
