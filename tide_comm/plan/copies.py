"""Copies as few calls: rows at a pitch where a layout allows it."""

from __future__ import annotations

from collections.abc import Iterable

from tide_comm.plan.program import Copy, Copy2D, Region

Pair = tuple[Region, Region]
"""(source, destination) of one copy, equal in bytes."""


def copy(stream: str, src: Region, dst: Region, peer: int) -> Copy:
    """The copy that takes one call: contiguous bytes, or rows at a pitch."""
    kind = Copy2D if src.rows > 1 or dst.rows > 1 else Copy
    return kind(stream, src, dst, peer)


def merged(pairs: Iterable[Pair]) -> list[Pair]:
    """The same bytes in as few pairs: neighbours of equal width that lie at constant pitches on both sides become the rows of one, or one
    contiguous run. Pairs that are strided already stay as they are, and so does the order."""
    done: list[list[Pair]] = []
    for pair in pairs:
        if done and _continues(done[-1], pair):
            done[-1].append(pair)
        else:
            done.append([pair])
    return [_as_rows(run) for run in done]


def _continues(run: list[Pair], pair: Pair) -> bool:
    first, last = run[0], run[-1]
    for side in (0, 1):
        one, now = last[side], pair[side]
        if one.rows > 1 or now.rows > 1 or (one.area, one.index, one.row_bytes) != (now.area, now.index, now.row_bytes):
            return False
        pitch = now.offset - one.offset
        if pitch < now.row_bytes or (len(run) > 1 and pitch != run[1][side].offset - first[side].offset):
            return False
    return True


def _as_rows(run: list[Pair]) -> Pair:
    if len(run) == 1:
        return run[0]
    src, dst = (
        Region(
            run[0][side].area,
            run[0][side].offset,
            run[0][side].row_bytes,
            len(run),
            run[1][side].offset - run[0][side].offset,
            run[0][side].index,
        )
        for side in (0, 1)
    )
    if src.pitch == src.row_bytes and dst.pitch == dst.row_bytes:
        src = Region(src.area, src.offset, src.nbytes, index=src.index)
        dst = Region(dst.area, dst.offset, dst.nbytes, index=dst.index)
    return src, dst
