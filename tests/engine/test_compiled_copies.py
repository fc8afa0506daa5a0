"""Copies as the CUDA engine issues them move the same bytes as the program says, also off 16 bytes and with ragged rows."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_ranks import is_large, random_case, spec_of

from tide_comm.config import MAX_BATCH
from tide_comm.engine.base import ArenaSpec
from tide_comm.engine.cuda import compile as compiled
from tide_comm.engine.cuda.compile import Compiled
from tide_comm.engine.cuda.tighten import MAX_PITCH, tighten
from tide_comm.plan import names
from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import Area, Copy, Program, Put, Record, Reduce, Region, Segment
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.slices import InboxSpec, StageSpec, seat_bytes_of
from tide_comm.plan.topology import Topology


def bytes_of(region: Region) -> np.ndarray:
    """Offsets of all bytes, in order."""
    return np.concatenate([np.arange(start, end) for start, end in region.spans()])


def issued(op: dict[str, int], which: str) -> np.ndarray:
    if op["kind"] == compiled.COPY:
        return op[which] + np.arange(op["bytes"])
    assert op["bytes"] <= op[f"{which}_pitch"] <= MAX_PITCH and op["rows"] > 1
    return (op[which] + np.arange(op["rows"])[:, None] * op[f"{which}_pitch"] + np.arange(op["bytes"])).reshape(-1)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_copy_moves_what_it_says(world: int) -> None:
    rows, odd = 0, 0
    for seed in range(40):
        if is_large(seed):
            continue
        case = random_case(seed, world)
        spec = spec_of(case)
        stage, inbox = spec.stage, spec.inbox
        indices = list(range(len(case.layout.params)))
        programs = [all_gather(case.layout, case.topology, rank, 0, case.head_bytes) for rank in range(world)]
        programs += [
            reduce_scatter(
                case.layout, case.topology, r, stage, indices, case.grad_dtype, "float32", case.reuse, inbox=inbox
            )
            for r in range(world)
        ]
        for program in programs:
            made = Compiled(program, spec, lambda table: 0, lambda name: 0, False)
            found = [fields for _, fields in made.rows if fields["kind"] in (compiled.COPY, compiled.COPY2D)]
            wanted = [op for op in tighten(program, case.ring).ops if isinstance(op, (Copy, Put)) and op.src.nbytes]
            assert len(found) == len(wanted)
            for fields, op in zip(found, wanted, strict=True):
                for side, region in (("src", op.src), ("dst", op.dst)):
                    fixed = made.numbers.offset(region) - region.offset
                    assert np.array_equal(issued(fields, side), bytes_of(region) + fixed)
                assert fields["dst_base"] == made.numbers.of(op.dst, op.peer)
                rows += fields["kind"] == compiled.COPY2D
                odd += any(fields[side] % 16 for side in ("src", "dst"))
    assert rows > 20 and odd > 50


def test_a_program_that_writes_only_out_is_given_its_address() -> None:
    """A last step alone touches no parameter and no gradient of the caller's."""
    case = random_case(0, 2)
    segment = Segment((Region(Area.STAGE, 0, 64), Region(Area.STAGE, 64, 64)), Region(Area.OUT, 0, 64))
    only_out = Program("last step", 0, (Reduce(names.SUM, (segment,), "float32", "float32"),))
    assert Compiled(only_out, spec_of(case), lambda table: 0, lambda name: 0, False).numbers.callers == 1
    nothing = Program("nothing", 0, (Record(names.SUM, names.DONE),))
    assert Compiled(nothing, spec_of(case), lambda table: 0, lambda name: 0, False).numbers.callers == 0


def test_sums_compare_the_tags_of_their_own_stream() -> None:
    """The last rank's shard is all padding: its last steps add nothing and compare nothing. A sum of the next batch, which runs
    ahead of the network, must not compare tags that an inbox still waits for."""
    topology = Topology.regular(6, 1)
    layout = GroupLayout("g", (ParamLayout("w", (5, 8), "bfloat16", "bfloat16", 6),), 6)
    inbox = InboxSpec(seat_bytes_of([layout], topology), 1, 1)
    stage = StageSpec(256, 2, 1)
    spec = ArenaSpec(topology, 0, layout.slot_bytes, 2, stage, inbox)
    for rank in range(6):
        program = reduce_scatter(layout, topology, rank, stage, [0], "bfloat16", "float32", inbox=inbox)
        streams: dict[str, int] = {}
        made = Compiled(program, spec, lambda table: 0, lambda name: streams.setdefault(name, len(streams)), False)  # noqa: B023
        compared = 0
        for _, fields in made.rows:
            if fields["kind"] != compiled.REDUCE or not fields["flags"] & compiled.CHECKED:
                continue
            indices = [index for _, index in made.tags[fields["src_pitch"] :][: fields["dst_pitch"]]]
            assert indices and all((index < -1) == (fields["stream"] == streams[names.FINAL]) for index in indices)
            compared += len(indices)
        assert compared == (0 if rank == 5 else 5)


def test_a_batch_fits_a_sum() -> None:
    assert MAX_BATCH <= compiled.MAX_SOURCES
