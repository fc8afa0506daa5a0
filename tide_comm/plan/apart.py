"""The same program without a multicast address: a copy to each lane for one write to all, a load from each lane for one read of their sum.

It is what an engine runs where a program was made for multicast and its memory has no such address: the peers, words and seats are the
same, and sums are formed in the order that `LaneSum` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tide_comm.plan.copies import copy
from tide_comm.plan.program import CopyAll, LaneSum, Op, Program, Reduce, copies_of


def apart(program: Program) -> Program:
    """`program` lane by lane; itself if it uses no multicast address."""
    if not any(_together(op) for op in program.ops):
        return program
    return replace(program, ops=tuple(one for op in program.ops for one in _lane_by_lane(op, program.rank)))


def _together(op: Op) -> bool:
    if isinstance(op, Reduce):
        return any(isinstance(source, LaneSum) for segment in op.segments for source in segment.sources)
    return isinstance(op, CopyAll)


def _lane_by_lane(op: Op, rank: int) -> Iterator[Op]:
    if isinstance(op, CopyAll):
        yield from (copy(op.stream, op.src, op.dst, lane) for lane in op.lands(rank))
    elif isinstance(op, Reduce):
        yield replace(
            op,
            segments=tuple(
                replace(segment, sources=tuple(one for source in segment.sources for one in copies_of(source)))
                for segment in op.segments
            ),
        )
    else:
        yield op
