"""A program that only tries the rail: a word to every machine on every stream that writes to others, before anything depends on it."""

from __future__ import annotations

from tide_comm.plan import names
from tide_comm.plan.program import After, Op, Program, Record, Signal, Wait
from tide_comm.plan.topology import Topology


def rail_trial(topology: Topology, rank: int) -> Program:
    """`rank`'s program. One stream after the other, for they raise the same word."""
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
