"""Copies as the CUDA engine issues them move the same bytes as the program says, also off 16 bytes and with ragged rows."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_ranks import random_case, spec_of

from tide_comm.engine.cuda import compile as compiled
from tide_comm.engine.cuda.compile import Compiled
from tide_comm.engine.cuda.tighten import tighten
from tide_comm.plan import names
from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.program import Area, Copy, Program, Put, Record, Reduce, Region, Segment
from tide_comm.plan.reduce_scatter import reduce_scatter

MAX_PITCH = 2**31 - 1
"""cudaDeviceProp.memPitch of every GPU so far: cudaMemcpy2DAsync refuses more."""


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
        if seed % 4 == 3:
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
