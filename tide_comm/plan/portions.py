"""The own pieces that are cast, in portions: pushes start behind the first one and not behind the last.

A cast takes memory (fp32 to bf16: 6 bytes an element), a push takes a link (2 bytes). On H200 with NVLink the push of a Llama block's
shard takes 2.2 ms, its cast beside multiplies 1.1 to 1.2 (docs/log.md). So each portion has twice the bytes of the one before: while one
is pushed the next is cast, and only the first's cast, a fifteenth, stands in front of all pushes.

Each portion is a kernel. docs/log.md has what gained nothing: one kernel for all that raises a word at the end of each, and later ones of
fewer blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tide_comm.plan.copies import cut_out
from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import ALIGN_BYTES, GroupLayout
from tide_comm.plan.program import Part

SHARES = (1, 2, 4, 8)
LEAST_BYTES = 256 << 20
"""Own pieces of fewer bytes (as communicated) are cast at once: that takes 0.3 ms at most, and each kernel more may have to wait for a
multiply to end before it gets its SMs."""


def part_of(layout: GroupLayout, param: int, rank: int) -> Part:
    """The cast of rank's whole chunk of a parameter into its own slot."""
    its = layout.params[param]
    return Part(layout.master(param), layout.piece(param, rank), its.param_dtype, its.comm_dtype)


def portions(layout: GroupLayout, params: Sequence[int], rank: int) -> list[list[tuple[int, Part]]]:
    """The casts of `params`' chunks in order, each whole or a part, as (parameter, cast): one portion, or up to len(SHARES).

    Chunks are cut at whole rows where they have several, else at ALIGN_BYTES. Chunks are as large on every rank, so all ranks cut alike.
    """
    whole = [(p, part_of(layout, p, rank)) for p in params]
    total = sum(part.dst.nbytes for _, part in whole)
    if total < max(LEAST_BYTES, 1):
        return [whole]
    ends = [total * share // sum(SHARES) for share in accumulate(SHARES)]
    found: list[list[tuple[int, Part]]] = [[] for _ in SHARES]
    at = k = 0
    for p, part in whole:
        done, size = 0, part.dst.nbytes
        while done < size:
            taken = size - done
            if taken > ends[k] - at:
                unit = part.dst.row_bytes if part.dst.rows > 1 else ALIGN_BYTES
                taken = min(taken, max((ends[k] - at) // unit, 0 if found[k] else 1) * unit)
            if taken:
                found[k].append((p, _within(part, done, done + taken)))
                done, at = done + taken, at + taken
            k += not taken
            while k < len(SHARES) - 1 and at >= ends[k]:
                k += 1
    return [portion for portion in found if portion]


def _within(part: Part, start: int, end: int) -> Part:
    """The cast of bytes [start, end) of what `part` writes."""
    src_item, dst_item = ITEM_BYTES[part.src_dtype], ITEM_BYTES[part.dst_dtype]
    src = cut_out(part.src, start // dst_item * src_item, end // dst_item * src_item)
    return Part(src, cut_out(part.dst, start, end), part.src_dtype, part.dst_dtype)
