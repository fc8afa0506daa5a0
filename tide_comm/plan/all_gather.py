"""The all-gather: every piece is written straight to its parameter's final address (design: section "All-gather").

One machine of L lanes. Each lane has one kernel for its own pieces (a cast where the optimizer's dtype differs, into
its own slot) and pushes each piece to each other lane's slot; nothing is pulled, nothing is staged. Bytes a lane
sends: (L-1) * sum(C_p). Parameters whose shard lives in the arena (SHARD) are pushed from there without waiting for
the kernel; the others from the own slot after it.
"""

from __future__ import annotations

from tide_comm.plan import names
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.program import (
    COMPUTE,
    After,
    Agree,
    Cast,
    Copy,
    Copy2D,
    Op,
    Part,
    Post,
    Program,
    Record,
    Region,
    Signal,
    Wait,
)
from tide_comm.plan.topology import Topology

SLOT_TAG = -1
"""Tag index that means the bound slot's: reused only after the slot's vacancy, so a tag is never overwritten unread."""


def copy(stream: str, src: Region, dst: Region, peer: int) -> Copy:
    """The copy that takes one call: contiguous bytes, or rows at a pitch."""
    kind = Copy2D if src.rows > 1 or dst.rows > 1 else Copy
    return kind(stream, src, dst, peer)


def all_gather(layout: GroupLayout, topology: Topology, rank: int, shard_base: int = 0) -> Program:
    """`rank`'s program for the group on one machine. `shard_base`: where the group's chunks start in SHARD, in bytes.

    Raises `NotImplementedError` for more than one machine.
    """
    if topology.machines != 1:
        raise NotImplementedError(f"all_gather: one machine only; got {topology.machines}")
    mates = topology.mates(rank)
    used = [p for p, param in enumerate(layout.params) if param.chunk]
    from_shard = [p for p in used if layout.params[p].in_shard]
    from_slot = [p for p in used if not layout.params[p].in_shard]
    parts = tuple(
        Part(
            layout.shard(p, shard_base) if layout.params[p].in_shard else layout.master(p),
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
    ops += [After(names.PUSH, names.BEGIN)]
    if from_slot:
        ops += [After(names.PUSH, names.OWN_DONE)]
    for peer in mates:
        ops += [Wait(names.PUSH, names.vacant(peer), 0), Post(names.PUSH, peer, SLOT_TAG)]
        ops += [copy(names.PUSH, layout.shard(p, shard_base), layout.piece(p, rank), peer) for p in from_shard]
        ops += [copy(names.PUSH, layout.piece(p, rank), layout.piece(p, rank), peer) for p in from_slot]
        ops += [Signal(names.PUSH, peer, names.arrived(rank))]
    ops += [Record(names.PUSH, names.SENT)]
    ops += [Wait(names.ARRIVE, names.arrived(source), 1) for source in mates]
    ops += [
        Agree(names.ARRIVE, mates, SLOT_TAG),
        After(names.ARRIVE, names.OWN_DONE),
        Record(names.ARRIVE, names.ARRIVED),
    ]
    return Program(
        f"all_gather {layout.name}",
        rank,
        tuple(ops),
        {"sent": names.SENT, "arrived": names.ARRIVED},
        {names.arrived(source): 1 for source in mates},
    )


def vacate(topology: Topology, rank: int, reduced_from: bool = False) -> Program:
    """Give the bound slot back: compute has read it, this rank's own pushes out of it are done, then the peers are told.

    `reduced_from`: the slot was held for a reduce-scatter (Slot-Reuse), whose reading must have ended too. Compute waits for the
    pushes here and not in the consumer: here they are long done, and whoever writes the shards next (an optimizer, an EMA swap,
    load_state_dict) is ordered behind them.
    """
    mates = topology.mates(rank)
    ops: list[Op] = [After(COMPUTE, names.SENT), Record(COMPUTE, names.READ), After(names.VACANCY, names.READ)]
    if reduced_from:
        ops += [After(names.VACANCY, names.SLOT_READ)]
    ops += [Record(names.VACANCY, names.VACATED)]
    ops += [Signal(names.VACANCY, peer, names.vacant(rank)) for peer in mates]
    return Program("vacate", rank, tuple(ops), {"vacated": names.VACATED}, {names.vacant(peer): 1 for peer in mates})
