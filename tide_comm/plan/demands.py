"""What must stand where, derived from shapes and ranks alone: the checker's other side, which no generator contributes to."""

from __future__ import annotations

from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.memory import Content
from tide_comm.plan.program import Area, Region
from tide_comm.plan.topology import Topology


def param_tag(group: str, rank: int, param: int, version: int) -> tuple:
    """Rank's chunk of a parameter after `version` optimizer steps."""
    return ("param", group, rank, param, version)


def grad_tag(group: str, rank: int, param: int, version: int) -> tuple:
    """Rank's unsharded gradient of a parameter in step `version`."""
    return ("grad", group, rank, param, version)


def unsharded(layout: GroupLayout, version: int) -> list[tuple[Region, Content]]:
    """Every byte of a slot after the all-gather of version `version`.

    Shard(0): parameter p is W chunks one after another from off_p. Shard(i>0): each of the `outer` rows is W pieces side by side.
    """
    demands = []
    for p, param in enumerate(layout.params):
        item = ITEM_BYTES[param.comm_dtype]
        row_bytes = param.row * item
        for outer in range(param.outer):
            for rank in range(layout.world):
                offset = layout.slot_offsets[p] + (outer * layout.world + rank) * row_bytes
                content = Content(param_tag(layout.name, rank, p, version), outer * param.row, item)
                if row_bytes:
                    demands.append((Region(Area.SLOT, offset, row_bytes), content))
    return demands


def summed(
    layout: GroupLayout, topology: Topology, rank: int, param: int, version: int, unordered: bool = False
) -> tuple:
    """The tag of rank's reduced elements of one parameter: lanes from 0 up, then machines in order of c, or `unordered` (a switch adds)."""
    machine = topology.machine_of(rank)
    partials = []
    for c in range(topology.machines):
        lanes = topology.table[(machine - c) % topology.machines]
        partials.append((("sum", tuple((grad_tag(layout.name, r, param, version), 0) for r in lanes)), 0))
    return ("scaled", ("unordered" if unordered else "sum", tuple(partials)))


def reduced(
    layout: GroupLayout,
    topology: Topology,
    rank: int,
    params: list[int],
    reduce_dtype: str,
    version: int,
    unordered: bool = False,
) -> list[tuple[Region, Content]]:
    """Every byte of rank's OUT that is not padding: FSDP2's dense layout, parameter after parameter. `unordered`: as in `summed`."""
    item = ITEM_BYTES[reduce_dtype]
    demands, out = [], 0
    for p in params:
        param = layout.params[p]
        tag = summed(layout, topology, rank, p, version, unordered)
        valid = param.valid(rank)
        for row in range(param.outer):
            width = min(param.row, valid - row * param.row)
            if width > 0:
                first = (row * layout.world + rank) * param.row
                demands.append(
                    (Region(Area.OUT, (out + row * param.row) * item, width * item), Content(tag, first, item))
                )
        out += param.chunk
    return demands
