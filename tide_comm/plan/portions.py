"""The own pieces that are cast, in portions: pushes start behind the first one and not behind the last.

A cast takes memory (fp32 to bf16: 6 bytes an element), a push takes a link (2 bytes). On H200 with NVLink the push of a Llama block's
shard takes 2.2 ms, its cast beside multiplies 1.1 to 1.2 (docs/log.md). So each portion has twice the bytes of the one before: while one
is pushed the next is cast, and only the first's cast, a fifteenth, stands in front of all pushes.

Each portion is a kernel. docs/log.md has what gained nothing: one kernel for all that raises a word at the end of each, and later ones of
fewer blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import ALIGN_BYTES, GroupLayout
from tide_comm.plan.program import Part, Region
from tide_comm.plan.rounds import Entry, split

SHARES = (1, 2, 4, 8)
LEAST_BYTES = 256 << 20
"""Own pieces of fewer bytes (as communicated) are cast at once: that takes 0.3 ms at most, and each kernel more may have to wait for a
multiply to end before it gets its SMs."""


def portions(layout: GroupLayout, params: Sequence[int], rank: int, divide: bool = True) -> list[list[Part]]:
    """The casts of `params`' chunks into the own slot, in order: one portion, or up to len(SHARES), each cut from the rest as a round's
    head is. Without parameters it is one empty portion. `divide`: False: one portion, however much it is."""
    rest = [Entry(0, p, (piece, piece)) for p in params for piece in [layout.piece(p, rank)]]
    total = sum(entry.pair[0].nbytes for entry in rest)
    found: list[list[Entry]] = []
    if divide and total >= LEAST_BYTES:
        for share in SHARES[:-1]:
            head, rest = split(rest, total * share // sum(SHARES), ALIGN_BYTES)
            found.append(head)
    return [[_cast(layout, rank, entry) for entry in portion] for portion in (*found, rest) if portion] or [[]]


def _cast(layout: GroupLayout, rank: int, entry: Entry) -> Part:
    """From where the entry's bytes stand in the optimizer's chunk."""
    param, piece, dst = layout.params[entry.param], layout.piece(entry.param, rank), entry.pair[1]
    master = layout.master(entry.param)

    def of_master(nbytes: int) -> int:
        return nbytes // ITEM_BYTES[param.comm_dtype] * ITEM_BYTES[param.param_dtype]

    row, column = divmod(dst.offset - piece.offset, piece.pitch or piece.nbytes)
    start = master.offset + row * master.row_bytes + of_master(column)
    pitch = master.pitch if dst.rows > 1 else 0
    src = Region(master.area, start, of_master(dst.row_bytes), dst.rows, pitch, master.index)
    return Part(src, dst, param.param_dtype, param.comm_dtype)
