"""`reference_sum`: the only reference for sums of a reduce-scatter, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tide_comm.plan.topology import Topology

if TYPE_CHECKING:
    import torch


def reference_sum(grads: Sequence[torch.Tensor], topology: Topology, destination: int) -> torch.Tensor:
    """Sum of `grads[r]` (one tensor a rank, same shape) as destination machine D forms it, in fp32.

    A machine's lanes from 0 up, starting from lane 0's value, give each partial sum; partial sums are added for c = 0, 1, 2, ... where
    c = (D - m) mod M is machine m's relative index. On one machine that is rank order. Multiplying by the scale, rounding to the gradient's
    dtype and adding an existing gradient come after, in this order.
    """
    total = None
    for c in range(topology.machines):
        ranks = topology.table[(destination - c) % topology.machines]
        partial = grads[ranks[0]].float()
        for rank in ranks[1:]:
            partial = partial + grads[rank].float()
        total = partial if total is None else total + partial
    assert total is not None
    return total
