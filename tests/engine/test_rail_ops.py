"""The nccl rail's lowering: what crosses machines is put, words travel behind their data, counts go on over launches."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from array_machine import ArrayMachine
from cuda_ranks import (
    CPU,
    Case,
    agrees,
    at_once,
    chunk_of,
    dtype_of,
    is_large,
    multicast_case,
    random_case,
    random_tensor,
    spec_of,
    widened,
)

from tide_comm.engine.base import OUTBOX_PLACES, Buffers
from tide_comm.engine.cuda import compile as compiled
from tide_comm.engine.cuda.rail_ops import Data, Raise, Send, Stage, crosses, over_rail
from tide_comm.engine.cuda.tighten import tighten
from tide_comm.plan import names
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import Area, Post, Program, Put, Region, Signal, Wait
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.reference import reference_sum
from tide_comm.plan.slices import shard_elements
from tide_comm.plan.topology import Topology
from tide_comm.plan.trial import rail_trial

SHAPES = [(2, 1), (2, 2), (3, 1), (4, 1), (3, 2)]


def programs_of(case: Case, rank: int) -> list[Program]:
    spec, indices = spec_of(case), list(range(len(case.layout.params)))
    return [
        all_gather(case.layout, case.topology, rank, 0, case.head_bytes, case.multicast_bytes),
        vacate(case.topology, rank),
        vacate(case.topology, rank, reduced_from=True),
        reduce_scatter(
            case.layout,
            case.topology,
            rank,
            spec.stage,
            indices,
            case.grad_dtype,
            case.reduce_dtype,
            from_slot=case.reuse,
            inbox=spec.inbox,
        ),
    ]


def cases(machines: int, lanes: int, count: int = 12) -> list[Case]:
    return [random_case(seed, machines * lanes, lanes) for seed in range(count) if not is_large(seed)]


def view(machine: ArrayMachine, rank: int, area: Area, slot: int, region: Region, dtype: torch.dtype) -> torch.Tensor:
    start = machine.spec.start(area, slot) + region.offset
    return machine.memory[rank][start : start + region.nbytes].view(dtype)


@pytest.mark.parametrize(("machines", "lanes"), SHAPES)
def test_arrays_compute_what_programs_say(machines: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all-gather and reduce-scatter, bytes and sums to the bit, with memory of other machines out of reach."""
    assert compute(cases(machines, lanes), monkeypatch)["puts"]


@pytest.mark.parametrize(("machines", "lanes"), [(1, 3), (2, 3)])
@pytest.mark.parametrize("together", [False, True])
def test_programs_for_multicast(machines: int, lanes: int, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an address at which all lanes are written and added, and lane by lane; the same sums, to the bit where there is an order."""
    made = [widened(case) for case in cases(machines, lanes, 2)]
    counted = compute(made, monkeypatch, together)
    assert (counted["to all"] > 5) is together
    assert (counted["switched"] > 5) is (together and machines > 1)
    assert (counted["cleared"] > 5) is (machines > 1)


@pytest.mark.parametrize("world", [4, 8])
def test_what_a_run_over_a_switch_would_try(world: int) -> None:
    """`cuda_ranks.py --multicast`: copies to all lanes in every case, a switch's sums on machines of several sizes."""
    made = [multicast_case(seed, world) for seed in range(24)]
    asked = [at_once(*programs_of(case, 0)) for case in made]
    assert {case.topology.lanes for case in made} == {n for n in (2, 4, 8) if n <= world}
    assert all(copies for copies, _ in asked), asked
    assert all(bool(sums) is (case.topology.machines > 1) for case, (_, sums) in zip(made, asked, strict=True))


def test_sums_of_a_switch_agree_within_their_rounding() -> None:
    parts = [random_tensor(seed, (1000,), "float32", CPU) for seed in range(8)]
    want, other = (sum(part.float() for part in order) / 3 for order in (parts, parts[::-1]))
    assert not torch.equal(want, other) and not agrees(other, want, parts, 1 / 3, False)
    assert agrees(other, want, parts, 1 / 3, True)
    assert agrees(other.bfloat16(), want.bfloat16(), parts, 1 / 3, True)
    less = sum(part.float() for part in parts[1:]) / 3
    assert not agrees(less, want, parts, 1 / 3, True) and not agrees(want * float("nan"), want, parts, 1 / 3, True)


def compute(found: list[Case], monkeypatch: pytest.MonkeyPatch, together: bool = False) -> Counter[str]:
    """Plays cases on arrays and compares; what was done, by kind."""
    counted: Counter[str] = Counter()
    gc.freeze()  # collecting after each case then looks at that case's objects alone, not at all that tests have imported
    try:
        for seed, case in enumerate(found):
            if case.grad_dtype != "float16":
                with monkeypatch.context() as patch:
                    machine = play(patch, seed, case, together)
                counted.update(machine.counted, puts=len(machine.groups))
                del machine
                gc.collect()  # engines hold each other, and a hundred MiB a case
    finally:
        gc.unfreeze()
    return counted


def play(patch: pytest.MonkeyPatch, seed: int, case: Case, together: bool) -> ArrayMachine:
    layout, topology, world = case.layout, case.topology, case.layout.world
    machine = ArrayMachine(patch, spec_of(case), together)
    full = [random_tensor(seed * 100 + p, q.shape, q.param_dtype, CPU) for p, q in enumerate(layout.params)]
    masters = [[chunk_of(p, f, r) for p, f in zip(layout.params, full, strict=True)] for r in range(world)]
    for rank in range(world):
        for p, param in enumerate(layout.params):
            if param.in_shard and param.chunk:
                region = layout.shard(p, 0)
                view(machine, rank, Area.SHARD, -1, region, masters[rank][p].dtype).copy_(masters[rank][p])
    made = [programs_of(case, rank) for rank in range(world)]
    machine.run([rail_trial(topology, r) for r in range(world)], -1, [Buffers() for _ in range(world)])
    for step in range(4):
        slot, tag = step % 2, 100 + step
        machine.run([m[0] for m in made], slot, [Buffers(params=masters[r]) for r in range(world)], tag)
        for rank in range(world):
            for p, param in enumerate(layout.params):
                whole = Region(Area.SLOT, layout.slot_offsets[p], param.slot_bytes)
                got = view(machine, rank, Area.SLOT, slot, whole, dtype_of(param.comm_dtype))[: param.numel]
                want = full[p].to(dtype_of(param.comm_dtype)).reshape(-1)
                assert torch.equal(got, want), (seed, step, rank, p)
        if not case.reuse:
            machine.run([m[1] for m in made], slot, [Buffers() for _ in range(world)])
        grads = [
            [
                random_tensor(seed * 100 + 9 * r + p + step, q.shape, case.grad_dtype, CPU)
                for p, q in enumerate(layout.params)
            ]
            for r in range(world)
        ]
        size = shard_elements(layout, list(range(len(layout.params))))
        outs = [torch.full((size,), float("nan"), dtype=dtype_of(case.reduce_dtype)) for _ in range(world)]
        buffers = [Buffers(grads=list(grads[r]), out=outs[r], scale=0.5) for r in range(world)]
        machine.run([m[3] for m in made], slot if case.reuse else -1, buffers, tag)
        if case.reuse:
            machine.run([m[2] for m in made], slot, [Buffers() for _ in range(world)])
        for rank in range(world):
            offset = 0
            for p, param in enumerate(layout.params):
                parts = [chunk_of(param, g[p], rank) for g in grads]
                total = reference_sum(parts, topology, topology.machine_of(rank)) * 0.5
                valid = param.valid(rank) if not param.dim else param.chunk
                got = outs[rank][offset : offset + valid]
                want = total.to(got.dtype)[:valid]
                switched = together and topology.machines > 1
                assert agrees(got, want, [part[:valid] for part in parts], 0.5, switched), (seed, step, rank, p)
                offset += param.chunk
    return machine


@pytest.mark.parametrize(("machines", "lanes"), SHAPES)
def test_no_stream_operation_writes_to_another_machine(machines: int, lanes: int) -> None:
    for case in cases(machines, lanes):
        for rank in range(case.layout.world):
            for program in programs_of(case, rank):
                lowered = over_rail(tighten(program, case.ring).ops, case.topology, rank)
                assert not any(crosses(op, case.topology, rank) for op in lowered)
                here = [op for op in program.ops if not crosses(op, case.topology, rank) and not isinstance(op, Put)]
                kept = [op for op in lowered if not isinstance(op, (Data, Stage, Send))]
                assert len(here) <= len(program.ops) and all(op.stream for op in kept)


@pytest.mark.parametrize(("machines", "lanes"), SHAPES)
def test_a_word_is_sent_behind_its_data_and_never_in_a_group_with_it(machines: int, lanes: int) -> None:
    """Stream order: data, then the value into the outbox, then the word; and a place is not written again before it has been sent."""
    for case in cases(machines, lanes):
        for rank in range(case.layout.world):
            for program in programs_of(case, rank):
                raised: dict[tuple, int] = defaultdict(int)
                for op in program.ops:
                    if crosses(op, case.topology, rank) and isinstance(op, (Put, Signal)):
                        raised[op.stream, op.peer, op.word] += 1
                staged: dict[tuple[str, int], object] = {}
                in_group: dict[str, list[Data]] = defaultdict(list)
                sent: dict[tuple, int] = defaultdict(int)
                data_bytes = 0
                for op in over_rail(tighten(program, case.ring).ops, case.topology, rank):
                    if isinstance(op, Stage):
                        assert (op.stream, op.place) not in staged and 0 <= op.place < OUTBOX_PLACES
                        staged[op.stream, op.place] = op.what
                    if isinstance(op, Data):
                        in_group[op.stream].append(op)
                        data_bytes += op.src.nbytes
                        assert op.src.nbytes == op.dst.nbytes and op.src.rows == op.dst.rows == 1
                    elif isinstance(op, Send):
                        assert staged.pop((op.stream, op.place)) == op.what
                        if isinstance(op.what, Raise):
                            assert not in_group[op.stream], "the word would be in one group with its data"
                            sent[op.stream, op.what.peer, op.what.word] += op.what.by
                    else:
                        in_group[op.stream] = []
                assert not staged and sent == raised
                assert data_bytes == sum(op.src.nbytes for op in program.ops if isinstance(op, Put))


def test_puts_of_one_word_raise_it_once() -> None:
    topology = Topology.regular(2, 1)
    region = Region(Area.SLOT, 0, 64)
    word = names.tail(0)
    puts = [Put(names.RAIL, region, region, 1, word)] * 3
    lowered = over_rail(
        [Post(names.RAIL, 1, -1), *puts, Signal(names.RAIL, 1, word), Wait(names.RAIL, word, 1)], topology, 0
    )
    kinds = [type(op).__name__ for op in lowered]
    assert kinds == ["Stage", "Send", "Data", "Data", "Data", "Stage", "Stage", "Send", "Send", "Wait"]
    assert [op.what.by for op in lowered if isinstance(op, Send) and isinstance(op.what, Raise)] == [3, 1]


def test_rows_of_a_strided_piece_are_put_one_by_one() -> None:
    topology = Topology.regular(2, 1)
    src, dst = Region(Area.SHARD, 8, 12, 3, 12), Region(Area.SLOT, 100, 12, 3, 48)
    put = Put(names.RAIL, src, dst, 1, names.tail(0))
    data = [op for op in over_rail([put], topology, 0) if isinstance(op, Data)]
    assert [(op.src.offset, op.dst.offset, op.src.nbytes) for op in data] == [
        (8, 100, 12),
        (20, 148, 12),
        (32, 196, 12),
    ]


def test_words_of_many_machines_fit_the_outbox() -> None:
    """Vacancy goes to the sources of each round only, credits to a batch; 70 signals in a row are still staged in portions."""
    topology = Topology.regular(71, 1)
    signals = [Signal(names.CREDIT, peer, names.credit(0)) for peer in range(1, 71)]
    lowered = over_rail(signals, topology, 0)
    waiting: set[int] = set()
    for op in lowered:
        if isinstance(op, Stage):
            assert op.place not in waiting
            waiting.add(op.place)
        elif isinstance(op, Send):
            waiting.remove(op.place)
    assert not waiting and sum(isinstance(op, Send) for op in lowered) == 70


def test_values_go_on_over_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines of one lane: the words that a rank puts count its puts of all launches, in every slot for itself."""
    topology = Topology.regular(2, 1)
    layout = GroupLayout("g", (ParamLayout("w", (64, 8), "float32", "bfloat16", 2, 0),), 2)
    case = Case(layout, topology, 2, 4096, False, "bfloat16", "float32", 64, 8)
    machine = ArrayMachine(monkeypatch, spec_of(case))
    masters = [torch.zeros(32 * 8)]
    for launch in range(3):
        machine.run([all_gather(layout, topology, r, 0, 64) for r in range(2)], 1, [Buffers(params=masters)] * 2, 5)
        machine.run([vacate(topology, r) for r in range(2)], 1, [Buffers()] * 2)
        found = {
            name: int(machine.memory[0][machine.spec.words[name, 1, slot] :][:4].view(torch.int32))
            for name, slot in (("head", 1), ("tail", 1), ("confirmed", -1), ("vacant", 1))
        }
        assert found == dict.fromkeys(found, launch + 1)
        ops, values, _ = machine.libraries[0].launches[-2]
        staged = [int(values[op["aux"]]) for op in ops if op["kind"] == compiled.WRITE and op["aux"] >= 0]
        assert staged == [launch + 1] * 3  # head, tail, confirmed
    assert int(machine.memory[0][machine.spec.words["head", 1, 0] :][:4].view(torch.int32)) == 0
    assert np.all(np.array([puts for _, puts in machine.groups]) > 0)
