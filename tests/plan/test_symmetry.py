"""Machines that are alike: what the symmetric checker takes, what it refuses, and that its verdict is that of the full one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from tests.plan import test_programs_2x2 as two
from tests.plan.mutants import cached, changed, edit, places, recounted, rejection, without
from tests.plan.ragged import MODES, ragged_plans
from tide_comm.plan import alike, demands, names
from tide_comm.plan.alike import check_demands, check_programs
from tide_comm.plan.checker import CheckError
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import Area, Copy, Op, Program, Put, Reduce, Signal, Wait
from tide_comm.plan.sequence import Plans, check_training
from tide_comm.plan.symmetry import Symmetry, SymmetryError
from tide_comm.plan.topology import Topology


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", two.MUTANTS)
def test_mutants_of_all_machines_are_rejected_alike(name: str, mode: str) -> None:
    kind, change = two.MUTANTS[name]
    mutant = changed(cached(two.programs(mode)), kind, lambda program: edit(program, change), range(4))
    reason = rejection(two.plans(mode), recounted(mutant, 4), symmetric=True)
    assert reason is not None and "not alike" not in reason


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", two.MUTANTS)
def test_a_mutant_on_one_machine_is_not_alike(name: str, mode: str) -> None:
    kind, change = two.MUTANTS[name]
    mutant = changed(cached(two.programs(mode)), kind, lambda program: edit(program, change), [3])
    assert "not alike" in (rejection(two.plans(mode), mutant, symmetric=True) or "accepted")


@pytest.mark.parametrize("mode", [pytest.param("in_place", marks=pytest.mark.slow), "slot_reuse"])
def test_the_verdict_without_any_one_operation_is_that_of_the_full_checker(mode: str) -> None:
    """On all machines at once, and on lane 1 alone."""
    base = cached(two.programs(mode))
    verdicts = set()
    for kind in two.KINDS[mode]:
        for place in dict.fromkeys(place for group in range(3) for place in places(base(kind, group, 1))):
            mutant = changed(base, kind, lambda program, place=place: without(program, place), [1, 3])
            mutant = cached(recounted(mutant, 4))
            full = rejection(two.plans(mode), mutant)
            assert (full is None) == (rejection(two.plans(mode), mutant, symmetric=True) is None), (place, full)
            verdicts.add(full is None)
    assert verdicts == {True, False}


def early_vacancy(op: Op) -> Op:
    hit = isinstance(op, Wait) and op.word.name == "vacant" and op.stream == names.RAIL
    return replace(op, count=op.count - 1) if hit else op


def other_piece(op: Op) -> Op:
    """Pieces are put an element too far towards the other lane's: still on the same machine, so machines stay alike."""
    if isinstance(op, Put) and op.dst.area is Area.SLOT:
        return replace(op, dst=replace(op.dst, offset=op.dst.offset + (-2 if op.word.key % 2 else 2)))
    return op


def early_confirmation(op: Op) -> Op:
    hit = isinstance(op, Wait) and op.word.name in ("head", "tail") and op.stream == names.PUSH
    return replace(op, count=op.count - 1) if hit else op


def early_credit(op: Op) -> Op:
    return replace(op, count=op.count - 1) if isinstance(op, Wait) and op.word.name == "credit" else op


def other_order(op: Op) -> Op:
    if isinstance(op, Reduce) and op.stream == names.FINAL:
        return replace(op, segments=tuple(replace(s, sources=s.sources[::-1]) for s in op.segments))
    return op


GENERATED = {
    "slot written one vacancy too early": ("all_gather", early_vacancy),
    "piece put to another's address": ("all_gather", other_piece),
    "forwarded before it arrives": ("all_gather", early_confirmation),
    "inbox taken too early": ("reduce_scatter", early_credit),
    "machines summed in another order": ("reduce_scatter", other_order),
}


@pytest.mark.parametrize(("machines", "lanes"), [(2, 2), (3, 2), (4, 2)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GENERATED)
def test_mutants_of_generated_programs(name: str, mode: str, machines: int, lanes: int) -> None:
    kind, change = GENERATED[name]
    plans = ragged_plans(machines, lanes, mode, padding=False, batch=2)
    world = plans.topology.world
    for ranks in (range(world), range(1, world, lanes)):
        mutant = cached(changed(plans, kind, lambda program: edit(program, change), ranks))
        full, symmetric = rejection(plans, mutant), rejection(plans, mutant, symmetric=True)
        assert full is not None and symmetric is not None and "not alike" not in symmetric, (full, symmetric)


def shift_copies(op: Op) -> Op:
    if isinstance(op, Copy) and op.dst.area is Area.SLOT:
        return replace(op, dst=replace(op.dst, offset=op.dst.offset + 2))
    return op


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("all_gather", shift_copies),
        ("all_gather", early_vacancy),
        ("reduce_scatter", other_order),
        ("vacate", lambda op: None if isinstance(op, Signal) else op),
    ],
)
def test_one_machine_that_differs_is_found(kind: str, change: Callable[[Op], Op | None]) -> None:
    plans = ragged_plans(5, 2, "in_place", padding=False)
    assert rejection(plans, plans, symmetric=True) is None
    for rank in (9, 4):
        mutant = changed(plans, kind, lambda program: edit(program, change), [rank])
        assert any(mutant(kind, group, rank) != plans(kind, group, rank) for group in range(3))
        assert "not alike" in (rejection(plans, mutant, symmetric=True) or "accepted")


def test_points_and_arrivals_belong_to_it() -> None:
    plans = ragged_plans(3, 2, "in_place", padding=False)
    for change in (lambda p: replace(p, points={}), lambda p: replace(p, arrivals={})):
        mutant = changed(plans, "all_gather", change, [3])
        assert "not alike" in (rejection(plans, mutant, symmetric=True) or "accepted")


def test_rows_merged_differently_are_the_same() -> None:
    """Machine 0 forwards the pieces of the others as rows; on machine 2 they wrap around and take two copies."""
    world = 10
    layout = GroupLayout("g", (ParamLayout("a", (world, 4), "bfloat16", "bfloat16", world),), world)
    plans = Plans([layout], Topology.regular(5, 2), ragged_plans(5, 2, "in_place", False).stage)
    made = [plans("all_gather", 0, rank) for rank in range(world)]
    assert len({len(program.ops) for program in made}) > 1
    symmetry = Symmetry([layout], plans.topology, "bfloat16")
    check_programs(symmetry, "g", lambda rank: made[rank])
    for rank in range(2, world):
        mutant = edit(made[rank], shift_copies)
        with pytest.raises(CheckError, match="not alike"):
            check_programs(symmetry, "g", lambda r, rank=rank, mutant=mutant: mutant if r == rank else made[r])


class Odd(Plans):
    """One rank's all-gathers differ."""

    def __call__(self, kind: str, group: int, rank: int) -> Program:
        program = super().__call__(kind, group, rank)
        return edit(program, shift_copies) if kind == "all_gather" and rank == 9 else program


def test_several_processes_compare() -> None:
    plans = ragged_plans(5, 2, "in_place", padding=False)
    check_training(plans, symmetric=True, workers=2)
    odd = Odd(**{field.name: getattr(plans, field.name) for field in fields(plans)})
    with pytest.raises(CheckError, match="rank 9 is not rank 1"):
        check_training(odd, symmetric=True, workers=3)


def test_padding_and_other_rank_orders_are_refused() -> None:
    with pytest.raises(SymmetryError, match="padding"):
        check_training(ragged_plans(3, 2, "in_place", padding=True), symmetric=True)
    plans = ragged_plans(2, 2, "in_place", padding=False)
    with pytest.raises(SymmetryError, match="machine by machine"):
        check_training(replace(plans, topology=Topology(((0, 2), (1, 3)))), symmetric=True)


@pytest.mark.parametrize(("machines", "lanes"), [(1, 4), (2, 2), (5, 1), (3, 3), (17, 2)])
def test_demands_move_like_programs(machines: int, lanes: int) -> None:
    plans = ragged_plans(machines, lanes, "in_place", padding=False)
    symmetry = Symmetry(plans.layouts, plans.topology, plans.grad_dtype)
    for layout in plans.layouts:
        check_demands(symmetry, layout, plans.topology, "float32", range(1, machines))


def test_demands_that_name_a_rank_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = demands.summed

    def from_zero(
        layout: GroupLayout, topology: Topology, rank: int, param: int, version: int, unordered: bool
    ) -> tuple:
        return real(layout, topology, rank % topology.lanes, param, version, unordered)

    monkeypatch.setattr(alike.demands, "summed", from_zero)
    plans = ragged_plans(3, 2, "in_place", padding=False)
    with pytest.raises(CheckError, match="not alike"):
        check_training(plans, symmetric=True)


def test_a_tag_behind_the_last_word_is_not_awaited() -> None:
    """A tag goes the way of puts: waiting for an earlier word says nothing about it."""

    def late(program: Program) -> Program:
        posts = [op for op in program.ops if op.stream == names.RAIL and type(op).__name__ == "Post"]
        return replace(program, ops=(*(op for op in program.ops if op not in posts), *posts))

    plans = ragged_plans(2, 1, "in_place", padding=False)
    for symmetric in (False, True):
        reason = rejection(plans, changed(plans, "all_gather", late, range(2)), symmetric=symmetric)
        assert "tag" in (reason or "accepted")


def test_copies_stay_within_a_machine() -> None:
    plans = ragged_plans(2, 2, "in_place", padding=False)

    def far(op: Op) -> Op:
        return replace(op, peer=(op.peer + 2) % 4) if isinstance(op, Copy) else op

    mutant = changed(plans, "all_gather", lambda program: edit(program, far), range(4))
    for symmetric in (False, True):
        assert "another machine" in (rejection(plans, mutant, symmetric=symmetric) or "accepted")
