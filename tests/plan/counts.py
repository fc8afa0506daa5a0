"""Operations, bytes and driver calls of the three models' blocks, as stored in counts.json: what must not grow unnoticed.

python -m tests.plan.counts     writes counts.json anew, after a change that is meant
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.plan.blocks import BLOCKS, block
from tide_comm.config import TideConfig
from tide_comm.engine.base import ArenaSpec
from tide_comm.engine.cuda.compile import Compiled
from tide_comm.engine.cuda.numbers import WordTable
from tide_comm.engine.cuda.records import driver_calls
from tide_comm.fsdp.domain import stage_for
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.layout import align
from tide_comm.plan.parts import parts_of
from tide_comm.plan.program import Program
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.shape import shape_of
from tide_comm.plan.slices import InboxSpec, seat_bytes_of
from tide_comm.plan.topology import Topology

STORED = Path(__file__).with_name("counts.json")
MACHINES = ((1, 2), (1, 8), (8, 8))
HEAD_BYTES = 8 * 2**20


def counts_of(model: str, machines: int, lanes: int) -> dict[str, dict[str, int]]:
    """Of rank 0's programs for a block: In-Place with fp32 parameters unless a name says otherwise. Those of an early reduce-scatter are
    added up over its parts."""
    topology = Topology.regular(machines, lanes)
    layout, bf16 = block(model, topology.world), block(model, topology.world, "bfloat16")
    inbox = InboxSpec(align(seat_bytes_of([layout], topology)), min(8, machines), lanes) if machines > 1 else None
    stage = stage_for([layout], topology)
    spec = ArenaSpec(topology, bf16.shard_bytes, layout.slot_bytes, 2, stage, inbox)
    params = tuple(range(len(layout.params)))

    def reduce(part: tuple[int, ...], from_slot: bool = False) -> Program:
        out = params if part != params else ()
        return reduce_scatter(
            layout, topology, 0, stage, part, "bfloat16", "float32", from_slot, inbox=inbox, out_params=out
        )

    parts = parts_of(layout, params, TideConfig().early_part_bytes) or (params,)
    programs = {
        "all_gather": [all_gather(layout, topology, 0, 0, HEAD_BYTES)],
        "all_gather_bf16": [all_gather(bf16, topology, 0, 0, HEAD_BYTES)],
        "vacate": [vacate(topology, 0)],
        "reduce_scatter": [reduce(params)],
        "reduce_scatter_early": [reduce(part) for part in parts],
        "reduce_scatter_slot_reuse": [reduce(params, from_slot=True)],
        "vacate_slot_reuse": [vacate(topology, 0, reduced_from=True)],
    }
    return {name: _added([_counted(program, spec) for program in several]) for name, several in programs.items()}


def _added(several: list[dict[str, int]]) -> dict[str, int]:
    return {"programs": len(several)} | {what: sum(one[what] for one in several) for what in several[0]}


def _counted(program: Program, spec: ArenaSpec) -> dict[str, int]:
    shape = shape_of(program)
    streams: dict[str, int] = {}
    made = Compiled(program, spec, lambda table: 0, lambda name: streams.setdefault(name, len(streams)), False)
    events: dict[Any, int] = {}
    ops = made.for_slot(0, WordTable(spec), lambda key: events.setdefault(key, len(events))).ops
    return {
        "operations": shape.operations,
        "copies": shape.copies,
        "puts": shape.puts,
        "kernels": shape.kernels,
        "bytes_to_mates": sum(shape.bytes_to_mates.values()),
        "bytes_on_rail": shape.bytes_on_rail,
        "driver_calls": driver_calls(ops),
    }


def counts() -> dict[str, Any]:
    return {f"{model} {m}x{n}": counts_of(model, m, n) for model in BLOCKS for m, n in MACHINES}


if __name__ == "__main__":
    STORED.write_text(json.dumps(counts(), indent=1) + "\n")
