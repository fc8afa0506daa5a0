"""In which parts a group's reduce-scatter may start before its backward has ended (`early_reduce`)."""

from __future__ import annotations

from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import GroupLayout

SMALL = 64
"""A parameter below this fraction of its group gates nothing: norms come first in reverse order and their gradients last."""


def parts_of(layout: GroupLayout, trainable: tuple[int, ...], least_bytes: int) -> tuple[tuple[int, ...], ...]:
    """The trainable parameters (indices, in FSDP2's order) as parts, first to start first; () if there is one part only.

    Backward hands gradients out roughly in the reverse of the order in which modules registered their parameters. A part is complete when
    its gradients are `least_bytes` in all; what is small, or left over at the end, is the last part's. The order is a rule and not an
    observation, so that ranks agree on it without a word.
    """
    nbytes = {p: layout.params[p].numel * ITEM_BYTES[layout.params[p].comm_dtype] for p in trainable}
    small = {p for p in trainable if nbytes[p] * SMALL < sum(nbytes.values())}
    parts: list[list[int]] = [[]]
    for p in reversed([p for p in trainable if p not in small]):
        if sum(nbytes[q] for q in parts[-1]) >= least_bytes:
            parts.append([])
        parts[-1].append(p)
    if len(parts) > 1 and sum(nbytes[p] for p in parts[-1]) < least_bytes:
        left = parts.pop()
        parts[-1] += left
    parts[-1] += small
    return tuple(tuple(sorted(part)) for part in parts) if len(parts) > 1 else ()
