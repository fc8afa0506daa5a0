"""`reference_sum`: which sum, to the bit."""

from __future__ import annotations

import pytest
import torch

from tide_comm.plan.reference import reference_sum
from tide_comm.plan.topology import Topology


def test_sixty_four_small_contributions_survive() -> None:
    """1.0 and 63 times 2^-9: in bf16 each addition would be rounded away (1 + 2^-9 is 1); the fp32 sum is exact."""
    grads = [torch.tensor([1.0 if rank == 0 else 2.0**-9], dtype=torch.bfloat16) for rank in range(64)]
    total = reference_sum(grads, Topology.regular(8, 8), 0)
    assert total.dtype == torch.float32
    assert total.item() == 1.123046875
    in_bf16 = grads[0]
    for grad in grads[1:]:
        in_bf16 = in_bf16 + grad
    assert in_bf16.item() == 1.0


def values(*numbers: float) -> list[torch.Tensor]:
    return [torch.tensor([number], dtype=torch.float32) for number in numbers]


def test_one_machine_sums_in_rank_order() -> None:
    grads = values(1.0, 2.0**-24, 2.0**-24, 2.0**-24)
    assert reference_sum(grads, Topology.regular(1, 4), 0).item() == 1.0  # from the other end: 1 + 3 * 2^-24 rounds up
    assert reference_sum(grads[::-1], Topology.regular(1, 4), 0).item() > 1.0


def test_lanes_run_from_0_up_whatever_their_ranks() -> None:
    grads = values(2.0**-24, 2.0**-24, 1.0)
    assert reference_sum(grads, Topology(((2, 0, 1),)), 0).item() == 1.0
    assert reference_sum(grads, Topology(((0, 1, 2),)), 0).item() > 1.0


@pytest.mark.parametrize("destination", range(3))
def test_machines_are_added_from_the_destination_downward(destination: int) -> None:
    """c = (D - m) mod M: D itself, then D-1, D-2, ..."""
    big, small = 1.0, 2.0**-24
    for first in range(3):
        grads = values(*(big if machine == (destination - first) % 3 else small for machine in range(3)))
        total = reference_sum(grads, Topology.regular(3, 1), destination).item()
        # The two small ones survive only where they are added to each other before they meet the big one.
        assert (total > 1.0) == (first == 2)


def test_partials_are_rounded_before_they_are_added() -> None:
    """Two machines of two lanes are not the same sum as four lanes."""
    grads = values(1.0, 2.0**-24, 2.0**-24, 2.0**-24)
    assert (
        reference_sum(grads, Topology.regular(2, 2), 0).item() > reference_sum(grads, Topology.regular(1, 4), 0).item()
    )
