"""Casts in portions: they tile each chunk, grow as they should, and pushes wait for the portion that they push and for no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.plan.mutants import cached, changed, rejection
from tests.plan.test_random_layouts import random_plans
from tide_comm.plan import names, portions
from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import After, Area, Cast, Copy, Op, Program, Record, Region, Wait
from tide_comm.plan.sequence import Plans, check_training
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology

DIM, HIDDEN = 8192, 28672
LLAMA = [
    (DIM,),
    (DIM,),
    (DIM, DIM),
    (DIM // 8, DIM),
    (DIM // 8, DIM),
    (DIM, DIM),
    (HIDDEN, DIM),
    (HIDDEN, DIM),
    (DIM, HIDDEN),
]


def group(name: str, world: int, *params: tuple) -> GroupLayout:
    """`params`: (shape, dtype of the sharded parameter, sharded dimension)."""
    made = tuple(ParamLayout(f"{name}{i}", s, d, "bfloat16", world, dim) for i, (s, d, dim) in enumerate(params))
    return GroupLayout(name, made, world)


def mixed(world: int) -> tuple[GroupLayout, ...]:
    """What is cast beside what is not, chunks that are cut, rows of which some are, and a group that is not cast at all."""
    return (
        group(
            "first",
            world,
            ((600 * world, 2), "float32", 0),
            ((4 * world,), "bfloat16", 0),
            ((3, 2 * world, 5), "float32", 1),
        ),
        group("second", world, ((7,), "float32", 0), ((5, 800), "float32", 0), ((900 * world,), "float32", 0)),
        group("third", world, ((2 * world, 3), "bfloat16", 0)),
    )


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In portions however little there is."""
    monkeypatch.setattr(portions, "LEAST_BYTES", 0)
    yield


def merged_spans(regions: list[Region]) -> list[tuple[int, int]]:
    """Bytes that regions cover, neighbours joined; they must not overlap."""
    spans = sorted(span for region in regions for span in region.spans())
    done: list[tuple[int, int]] = []
    for start, end in spans:
        assert not done or start >= done[-1][1], "cast twice"
        if done and start == done[-1][1]:
            done[-1] = (done[-1][0], end)
        else:
            done.append((start, end))
    return done


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("world", [2, 3])
def test_portions_tile_the_chunks(world: int) -> None:
    for layout in mixed(world)[:2]:
        cast = [p for p, param in enumerate(layout.params) if not param.in_shard]
        for rank in range(world):
            found = portions.portions(layout, cast, rank)
            assert 1 < len(found) <= len(portions.SHARES) and all(found)
            for p in cast:
                parts = [part for portion in found for part in portion if part.src.index == p]
                assert merged_spans([part.dst for part in parts]) == merged_spans([layout.piece(p, rank)])
                assert merged_spans([part.src for part in parts]) == merged_spans([layout.master(p)])
                # Element by element from the place in the master that it has in the piece.
                at = 0
                for part in parts:
                    assert part.src.offset == 2 * at and part.src.nbytes == 2 * part.dst.nbytes and part.src.index == p
                    at += part.dst.nbytes


def test_a_llama_block_doubles_from_a_fifteenth() -> None:
    layout = group("b", 2, *((shape, "float32", 0) for shape in LLAMA))
    everything = list(range(len(LLAMA)))
    total = sum(layout.piece(p, 1).nbytes for p in everything)
    sizes = [sum(part.dst.nbytes for part in portion) for portion in portions.portions(layout, everything, 1)]
    assert sum(sizes) == total == 855_654_400
    for size, share in zip(sizes, (1, 2, 4, 8), strict=True):
        assert abs(size - total * share / 15) <= 3 * 512
    casts = [op for op in all_gather(layout, Topology.regular(1, 2), 1).ops if isinstance(op, Cast)]
    assert [sum(part.dst.nbytes for part in op.parts) for op in casts] == sizes


def test_little_is_cast_at_once() -> None:
    below = group("g", 2, (((256 << 20) - 2,), "float32", 0))
    enough = group("g", 2, ((256 << 20,), "float32", 0))
    assert [len(portions.portions(layout, [0], 0)) for layout in (below, enough)] == [1, 4]


@pytest.mark.usefixtures("always")
def test_several_rows_are_cut_between_them_and_the_last_one_inside() -> None:
    """Three rows of 1000 bytes: a fifteenth is less than one."""
    layout = group("g", 2, ((3, 1000, 1), "float32", 1))
    parts = [part for portion in portions.portions(layout, [0], 1) for part in portion]
    assert [(p.dst.rows, p.dst.offset, p.dst.row_bytes, p.src.offset, p.src.row_bytes) for p in parts] == [
        (1, 1000, 1000, 0, 2000),
        (1, 3000, 1000, 2000, 2000),
        (1, 5000, 512, 4000, 1024),
        (1, 5512, 488, 5024, 976),
    ]


def test_a_row_that_is_larger_than_a_portion_leaves_no_crumbs() -> None:
    """Rows of 256 MiB beside less: once a portion behind one was 512 bytes."""
    shapes = ((2, 65536, 4096), 1), ((8192,), 0), ((8192, 8192), 0), ((8192, 8192), 0)
    layout = group("g", 2, *((shape, "float32", dim) for shape, dim in shapes))
    sizes = [sum(part.dst.nbytes for part in portion) for portion in portions.portions(layout, range(4), 0)]
    assert sizes[0] == 256 << 20 and min(sizes) > sum(sizes) * 2 // 15 - 512


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mode", ["in_place", "slot_reuse"])
@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_sequences_are_accepted(lanes: int, mode: str) -> None:
    check_training(Plans(mixed(lanes), Topology.regular(1, lanes), StageSpec(1024, 2, lanes), mode), steps=2)


@settings(max_examples=40, deadline=None)
@given(random_plans())
def test_random_layouts_are_accepted(plans: Plans) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portions, "LEAST_BYTES", 0)
        patch.setattr(portions, "ALIGN_BYTES", 2)  # so that small chunks are cut inside, too
        check_training(plans, steps=2, slots=2, prefetch=1)


@pytest.mark.usefixtures("always")
def test_the_first_mate_gets_portions_and_the_others_all_at_once() -> None:
    layout = mixed(3)[0]
    topology = Topology.regular(1, 3)
    program = all_gather(layout, topology, 1)
    pushes = [op for op in program.ops if op.stream == names.PUSH]
    gates = [op.event for op in pushes if isinstance(op, After)]
    casts = [op for op in program.ops if isinstance(op, Cast)]
    assert gates == [names.BEGIN, *(names.own_cast(k) for k in range(len(casts) - 1)), names.OWN_DONE]
    first = next(op for op in pushes if isinstance(op, Copy))
    assert first.src.area is Area.SHARD and pushes.index(first) < pushes.index(After(names.PUSH, names.own_cast(1)))
    one, other = ([op.dst for op in pushes if isinstance(op, Copy) and op.peer == mate] for mate in topology.mates(1))
    assert merged_spans(one) == merged_spans(other)
    assert len(one) > len(other) == len(layout.params)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("lanes", [1, 2])
def test_with_rails_everything_is_cast_at_once(lanes: int) -> None:
    program = all_gather(mixed(2 * lanes)[0], Topology.regular(2, lanes), 0)
    assert sum(isinstance(op, Cast) for op in program.ops) == 1


@pytest.mark.usefixtures("always")
def test_what_reaches_all_lanes_by_one_write_is_cast_at_once() -> None:
    program = all_gather(mixed(2)[0], Topology.regular(1, 2), 0, multicast_bytes=1 << 20)
    assert sum(isinstance(op, Cast) for op in program.ops) == 1


def drop(matches: Callable[[Op], bool]) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        return replace(program, ops=tuple(op for op in program.ops if not matches(op)))

    return change


def behind_the_second(program: Program) -> Program:
    """Everything that is pushed waits for the first portion alone."""
    ops = [
        After(op.stream, names.own_cast(0))
        if isinstance(op, After) and op.stream == names.PUSH and op.event != names.BEGIN
        else op
        for op in program.ops
    ]
    return replace(program, ops=tuple(ops))


MUTANTS = {
    "pushed before its own portion": drop(lambda op: op == After(names.PUSH, names.own_cast(1))),
    "the last portion": drop(lambda op: op == After(names.PUSH, names.OWN_DONE)),
    "the first": drop(lambda op: op == After(names.PUSH, names.own_cast(0))),
    "all behind the first": behind_the_second,
    "never said": drop(lambda op: isinstance(op, Record) and op.event == names.own_cast(1)),
    "the mate's slot is not asked for": drop(lambda op: isinstance(op, Wait) and op.word.name == "vacant"),
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_refuses(name: str) -> None:
    plans = Plans(mixed(2), Topology.regular(1, 2), StageSpec(1024, 2, 2), "in_place")
    assert rejection(plans, cached(plans)) is None
    assert rejection(plans, changed(cached(plans), "all_gather", MUTANTS[name], range(2))) is not None
