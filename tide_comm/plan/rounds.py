"""Recursive doubling on a rail: who sends which machines' pieces to whom, and how a round is paced (design: section "All-gather").

In round d machine n sends the first min(2^d, M - 2^d) pieces that it has collected (its own first, then in order of machine number
upward, modulo M) to machine n - 2^d, and receives as many from n + 2^d. ceil(log2 M) rounds; nothing arrives twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide_comm.plan.copies import Pair
from tide_comm.plan.program import Region
from tide_comm.plan.topology import Topology

HEAD_ALIGN_BYTES = 16
"""A round's piece is split at a multiple of this, so that no element is cut."""


@dataclass(frozen=True)
class Round:
    """One round of one rank: it puts `count` machines' pieces into `target`, as many come from `source`."""

    distance: int
    count: int
    target: int
    source: int


def rounds(topology: Topology, rank: int) -> list[Round]:
    """The rounds of `rank` on its rail; none on one machine."""
    machine, lane, machines = topology.machine_of(rank), topology.lane_of(rank), topology.machines
    found, distance = [], 1
    while distance < machines:
        target, source = topology.rank(machine - distance, lane), topology.rank(machine + distance, lane)
        found.append(Round(distance, min(distance, machines - distance), target, source))
        distance *= 2
    return found


@dataclass(frozen=True)
class Entry:
    """One put of a round's list: a piece or a part of it. `origin`: the machine it comes from; `param`: its parameter."""

    origin: int
    param: int
    pair: Pair


def split(
    entries: Sequence[Entry], head_bytes: int, align_bytes: int = HEAD_ALIGN_BYTES
) -> tuple[list[Entry], list[Entry]]:
    """Head and tail of a put list. The head is its first `head_bytes`, so at most one piece is in both; 0: all is tail.

    Strided pieces are cut between rows, others at `align_bytes`; a head is never empty if there is anything to put.
    """
    if not head_bytes:
        return [], list(entries)
    head: list[Entry] = []
    tail: list[Entry] = []
    room = max(head_bytes, align_bytes)
    for entry in entries:
        src, dst = entry.pair
        if src.nbytes <= room:
            head.append(entry)
            room -= src.nbytes
            continue
        rows = src.rows > 1
        unit = src.row_bytes if rows else align_bytes
        cut = room // unit * unit
        if rows and not cut and not head:
            cut = unit
        room = 0
        if cut:
            head.append(Entry(entry.origin, entry.param, (_cut(src, 0, cut), _cut(dst, 0, cut))))
        tail.append(Entry(entry.origin, entry.param, (_cut(src, cut, src.nbytes), _cut(dst, cut, dst.nbytes))))
    return head, tail


def _cut(region: Region, start: int, end: int) -> Region:
    """Bytes [start, end) of a region, counted without the gaps between rows; whole rows where it has several."""
    if start == 0 and end == region.nbytes:
        return region
    if region.rows == 1:
        return Region(region.area, region.offset + start, end - start, index=region.index)
    first, rows = start // region.row_bytes, (end - start) // region.row_bytes
    offset = region.offset + first * region.pitch
    return Region(region.area, offset, region.row_bytes, rows, region.pitch if rows > 1 else 0, region.index)
