"""Fewer driver calls, the same program: the checker accepts what `tighten` makes, in training steps and in issue order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tide_comm.engine.cuda.tighten import MAX_PITCH, tighten
from tide_comm.plan import names, portions
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.checker import CheckError
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import COMPUTE, After, Area, Copy, Copy2D, Event, Program, Record, Region, Signal
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.sequence import Plans, check_training
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology


def plans_for(seed: int, ring: int, memory_mode: str) -> Plans:
    rnd = random.Random(seed)
    world = rnd.choice([2, 3, 4])
    layouts = []
    for g in range(3):
        params = [
            ParamLayout(
                f"p{i}",
                (rnd.randint(1, 40), rnd.randint(1, 6)),
                rnd.choice(["float32", "bfloat16"]),
                "bfloat16",
                world,
                0,
            )
            for i in range(rnd.randint(1, 3))
        ]
        layouts.append(GroupLayout(f"g{g}", tuple(params), world))
    order = list(range(world))
    rnd.shuffle(order)
    return Plans(layouts, Topology((tuple(order),)), StageSpec(16 * rnd.randint(1, 6), ring, world), memory_mode)


def tightened(plans: Plans, ring: int):
    return lambda kind, group, rank: tighten(plans(kind, group, rank), ring)


@pytest.mark.parametrize("memory_mode", ["in_place", "slot_reuse"])
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("divided", [False, True], ids=["", "in portions"])
def test_the_checker_accepts(
    seed: int, ring: int, memory_mode: str, divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if divided:
        monkeypatch.setattr(portions, "LEAST_BYTES", 0)
        monkeypatch.setattr(portions, "ALIGN_BYTES", 16)
    plans = plans_for(seed, ring, memory_mode)
    check_training(plans, steps=2, programs=tightened(plans, ring))


def test_portions_keep_their_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "LEAST_BYTES", 0)
    layout = GroupLayout("g", (ParamLayout("w", (2048, 8), "float32", "bfloat16", 2, 0),), 2)
    gather = all_gather(layout, Topology.regular(1, 2), 0)
    gates = [After(names.PUSH, names.own_cast(k)) for k in range(3)] + [After(names.PUSH, names.OWN_DONE)]
    assert [op for op in tighten(gather, 4).ops if op in gates] == gates


@pytest.mark.parametrize("rows", [2, 9])
def test_rows_too_far_apart_for_one_call_go_one_by_one(rows: int) -> None:
    """Two equal parameters of 5 GB: their pieces are rows that cudaMemcpy2DAsync refuses, also without another copy beside them."""

    def region(pitch: int) -> Region:
        return Region(Area.SLOT, 512, 1 << 30, rows, pitch)

    for pitch in (MAX_PITCH - 511, MAX_PITCH + 1):
        alone = Copy2D(names.PUSH, region(pitch), region(pitch), 1)
        ops = tighten(Program("p", 0, (alone,)), 4).ops
        apart = [Copy(names.PUSH, r, r, 1) for k in range(rows) for r in [Region(Area.SLOT, 512 + k * pitch, 1 << 30)]]
        assert list(ops) == (apart if pitch > MAX_PITCH else [alone])


@pytest.mark.parametrize("memory_mode", ["in_place", "slot_reuse"])
@pytest.mark.parametrize("ring", [2, 3, 4])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2)])
def test_the_checker_accepts_several_machines(shape: tuple[int, int], ring: int, memory_mode: str) -> None:
    world = shape[0] * shape[1]
    groups = [
        GroupLayout(f"g{g}", (ParamLayout("w", (4 * world + g, 6), "float32", "bfloat16", world, 0),), world)
        for g in range(3)
    ]
    plans = Plans(groups, Topology.regular(*shape), StageSpec(32, ring, shape[1]), memory_mode, head_bytes=16)
    check_training(plans, steps=2, programs=tightened(plans, ring))


def test_few_rows_join_a_batch() -> None:
    def rows(area: Area, count: int) -> Region:
        return Region(area, 8, 4, count, 16)

    few = Copy2D("push", rows(Area.SHARD, 2), rows(Area.SLOT, 2), 1)
    many = Copy2D("push", rows(Area.SHARD, 9), rows(Area.SLOT, 9), 1)
    flat = Copy("push", Region(Area.SHARD, 400, 4), Region(Area.SLOT, 400, 4), 1)
    ops = tighten(Program("p", 0, (many, few, flat)), 4).ops
    assert [type(op) for op in ops] == [Copy, Copy, Copy, Copy2D]
    taken = [op for op in ops if isinstance(op, Copy)]
    assert [(op.src.offset, op.dst.offset, op.src.nbytes) for op in taken] == [
        (8, 8, 4),
        (24, 24, 4),
        (400, 400, 4),
        (8, 8, 36),
    ]
    assert tighten(Program("p", 0, (few,)), 4).ops == (few,), "one call either way"


def test_why_rings_of_two_keep_their_order() -> None:
    plans = plans_for(1, 2, "in_place")
    with pytest.raises(CheckError):
        check_training(plans, steps=2, programs=tightened(plans, 3))


def per_stream(program: Program) -> dict[str, list]:
    return {s: [op for op in program.ops if op.stream == s and not isinstance(op, After)] for s in program.streams()}


def test_no_stream_changes_its_order() -> None:
    plans = plans_for(0, 4, "in_place")
    for kind in ("all_gather", "reduce_scatter", "vacate", "vacate_reduced"):
        program = plans(kind, 0, 1)
        assert per_stream(tighten(program, 4)) == per_stream(program)


def words_in_runs(program: Program) -> int:
    """Neighbours that an executor hands over together."""
    word = [type(op).__name__ in ("Signal", "Wait", "Post", "Agree") for op in program.ops]
    pairs = zip(program.ops, program.ops[1:], strict=False)
    return sum(a.stream == b.stream and word[i] and word[i + 1] for i, (a, b) in enumerate(pairs))


def test_what_it_saves() -> None:
    layout = GroupLayout("g", (ParamLayout("w", (64, 8), "float32", "bfloat16", 2, 0),), 2)
    pair, stage = Topology.regular(1, 2), StageSpec(64, 4, 2)
    gather = all_gather(layout, pair, 0)
    assert After(names.PUSH, names.BEGIN) in gather.ops and After(names.PUSH, names.OWN_DONE) in gather.ops
    kept = tighten(gather, 4).ops
    assert After(names.PUSH, names.BEGIN) not in kept and After(names.PUSH, names.OWN_DONE) in kept
    # All-gathers run on a stream of FSDP2's that is not behind the vacating.
    assert After(names.OWN, names.VACATED) in kept
    reduce = reduce_scatter(layout, pair, 0, stage, [0], "bfloat16", "float32")
    pieces = reduce.stage_pieces
    assert pieces == 8
    assert words_in_runs(tighten(reduce, 4)) - words_in_runs(reduce) == 2 * (pieces - 1)
    assert tighten(vacate(pair, 0), 4).ops == vacate(pair, 0).ops


def test_what_is_implied() -> None:
    a, b, old = Event("a"), Event("b"), Event("old")
    program = Program(
        "p",
        0,
        (
            Record("x", a),
            After("x", a),  # its own order
            After("y", old),
            After("y", old),  # said before
            After("y", a),
            Record("y", b),
            After("z", a),  # b knows a
            After("z", old),  # and old
            After("z", b),
            Signal("z", 1, names.stage_free(0)),
            After("z", a),  # said before
            Record("x", a),
            After("z", a),  # a new one
            After(COMPUTE, b),
        ),
    )
    kept = [op for op in tighten(program, 4).ops if isinstance(op, After)]
    assert kept == [After("y", old), After("y", a), After("z", b), After("z", a), After(COMPUTE, b)]


def test_a_record_in_between_keeps_both() -> None:
    a, b = Event("a"), Event("b")
    ops = (Record("x", a), After("y", a), Record("y", b), After("z", a), Record("x", a), Record("y", b), After("z", b))
    assert tighten(Program("p", 0, ops), 4).ops == replace(Program("p", 0, ops)).ops
