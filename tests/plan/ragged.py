"""Groups of a few small odd parameters, for any number of ranks; the same for the same seed."""

from __future__ import annotations

import random

from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.sequence import Plans
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology

MODES = ("in_place", "slot_reuse")


def ragged_plans(machines: int, lanes: int, mode: str, padding: bool, seed: int = 0, batch: int = 0) -> Plans:
    """Three groups of one to three parameters. With `padding` the last ranks have less or nothing; without, every chunk is full."""
    rnd = random.Random(f"{machines} {lanes} {seed}")
    world = machines * lanes

    def rows() -> int:
        return rnd.randint(1, 2 * world) if padding else world * rnd.randint(1, 2)

    def param(name: str) -> ParamLayout:
        dtype = rnd.choice(["bfloat16", "float32"])
        if rnd.random() < 0.3:
            return ParamLayout(name, (rnd.randint(1, 2), world, rnd.choice([1, 3])), dtype, "bfloat16", world, 1)
        return ParamLayout(name, (rows(), rnd.choice([1, 3, 5])), dtype, "bfloat16", world)

    groups = [
        GroupLayout(f"g{g}", tuple(param(f"g{g}p{p}") for p in range(rnd.randint(1, 2 + (g == 0)))), world)
        for g in range(3)
    ]
    stage = StageSpec(lanes * 2 * rnd.choice([5, 8, 24]), rnd.randint(2, 4), lanes)
    head_bytes = rnd.choice([0, 16, 40])
    return Plans(
        groups,
        Topology.regular(machines, lanes),
        stage,
        mode,
        inbox_batch=batch or rnd.choice([2, 3, 8]),
        head_bytes=head_bytes,
    )
