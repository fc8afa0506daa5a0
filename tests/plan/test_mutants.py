"""Mutants of the generated one-machine programs: the checker must reject every one that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.plan.mutants import cached, changed, edit, places, recounted, rejection, survivors, without
from tide_comm.plan import names
from tide_comm.plan.checker import Checker, CheckError
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import (
    COMPUTE,
    After,
    Area,
    Cast,
    Copy,
    Op,
    Program,
    Record,
    Reduce,
    Segment,
    Signal,
    Use,
    Wait,
)
from tide_comm.plan.sequence import Plans, Training
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology

MODES = ("in_place", "slot_reuse")
KINDS = {
    "in_place": ("all_gather", "reduce_scatter", "vacate"),
    "slot_reuse": ("all_gather", "reduce_scatter", "vacate", "vacate_reduced"),
}
LANES = 3


def param(name: str, *shape: int, dtype: str = "bfloat16", dim: int = 0) -> ParamLayout:
    return ParamLayout(name, shape, dtype, "bfloat16", LANES, dim)


# The first group of the forward casts nothing: only there do pushes depend on BEGIN alone. No shard is empty: every copy carries bytes.
LAYOUTS = (
    GroupLayout("first", (param("a", 12, 2), param("b", 9, 2)), LANES),
    GroupLayout("second", (param("c", 9, 2, dtype="float32"), param("d", 3, 6, dim=1)), LANES),
    GroupLayout("third", (param("e", 12, 2),), LANES),
)


def plans(mode: str) -> Plans:
    """Rings of two places and two or three pieces a group, so that places are reused within and across launches."""
    return Plans(LAYOUTS, Topology.regular(1, LANES), StageSpec(12, 2, LANES), mode)


COVERED = {
    "in_place": {
        # Compute waits for SENT and reads before it goes on to BEGIN, so BEGIN covers what the slot's last holder did.
        ("all_gather", ("own", "After", "vacated", 0)),
        ("vacate", ("vacancy", "Record", "vacated", 0)),
        # GRADS_READ is recorded on the same stream after DONE, and the sequence waits for both.
        ("reduce_scatter", ("sum", "Record", "done", 0)),
    },
    "slot_reuse": {
        # Only a slot that was reduced from needs VACATED; this is the forward's.
        ("vacate", ("vacancy", "Record", "vacated", 0)),
        # The gradients' copy into the slot waits for BEGIN and SENT, and SLOT_READ comes after it.
        ("vacate_reduced", ("compute", "After", "sent", 0)),
        ("vacate_reduced", ("compute", "Record", "read", 0)),
        ("vacate_reduced", ("vacancy", "After", "read", 0)),
    },
}
"""Operations that others cover in these sequences; kept because the same programs run where nothing else does."""


@pytest.mark.parametrize("mode", MODES)
def test_accepted(mode: str) -> None:
    assert rejection(plans(mode), plans(mode)) is None


@pytest.mark.parametrize("mode", MODES)
def test_every_operation_is_needed(mode: str) -> None:
    assert survivors(plans(mode), plans(mode), KINDS[mode]) == COVERED[mode]


@pytest.mark.parametrize("mode", MODES)
def test_every_dropped_signal_is_counted(mode: str) -> None:
    base = cached(plans(mode))
    for kind in KINDS[mode]:
        for place in places(base(kind, 0, 0)):
            if place[1] == "Signal":
                mutant = changed(base, kind, lambda program, place=place: without(program, place), [0])
                assert "signalled" in (rejection(plans(mode), mutant) or "accepted"), place


def copies_to(area: Area, change: Callable[[Copy], Op]) -> Callable[[Op], Op]:
    return lambda op: change(op) if isinstance(op, Copy) and op.dst.area is area else op


def shifted(op: Copy, side: str, nbytes: int) -> Op:
    region = getattr(op, side)
    return replace(op, **{side: replace(region, offset=region.offset + nbytes)})


def fewer(word: str, stream: str) -> Callable[[Op], Op]:
    def change(op: Op) -> Op:
        hit = isinstance(op, Wait) and op.word.name == word and op.stream == stream
        return replace(op, count=op.count - 1) if hit else op

    return change


def drop(op_type: type[Op], stream: str, name: str) -> Callable[[Op], Op | None]:
    def change(op: Op) -> Op | None:
        thing = getattr(op, "word", None) or getattr(op, "event", None)
        return None if type(op) is op_type and op.stream == stream and thing.name == name else op

    return change


def sums(change: Callable[[Segment], Segment]) -> Callable[[Op], Op]:
    return lambda op: replace(op, segments=tuple(map(change, op.segments))) if isinstance(op, Reduce) else op


def own_place_twice(segment: Segment) -> Segment:
    return replace(segment, sources=(segment.sources[0], segment.sources[1], segment.sources[1]))


def other_lane(op: Op) -> Op:
    """Copies and signals swap their peers (1 and 2 for rank 0): the bytes are right, the lane is not."""
    if isinstance(op, Copy):
        return replace(op, peer={1: 2, 2: 1}.get(op.peer, op.peer))
    return op


MUTANTS = {
    "piece two bytes too far": ("all_gather", copies_to(Area.SLOT, lambda op: shifted(op, "dst", 2))),
    "piece ordered by rank, not by parameter": ("all_gather", copies_to(Area.SLOT, lambda op: shifted(op, "dst", 512))),
    "piece outside the slot": ("all_gather", copies_to(Area.SLOT, lambda op: shifted(op, "dst", 1 << 20))),
    "piece before the slot": ("all_gather", copies_to(Area.SLOT, lambda op: shifted(op, "dst", -(1 << 20)))),
    "another rank's gradient pushed": ("reduce_scatter", copies_to(Area.STAGE, lambda op: shifted(op, "src", 2))),
    "gradient pushed from one byte too far": (
        "reduce_scatter",
        copies_to(Area.STAGE, lambda op: shifted(op, "src", 1)),
    ),
    "piece pushed from one byte too far": ("all_gather", copies_to(Area.SLOT, lambda op: shifted(op, "src", 1))),
    "copy outside its place in STAGE": ("reduce_scatter", copies_to(Area.STAGE, lambda op: shifted(op, "dst", 24))),
    "copy into the next place of STAGE": (
        "reduce_scatter",
        copies_to(Area.STAGE, lambda op: replace(op, dst=replace(op.dst, index=op.dst.index + 1))),
    ),
    "pieces swapped between peers": ("all_gather", other_lane),
    "gradients swapped between peers": ("reduce_scatter", other_lane),
    "slot written before it is vacant": ("all_gather", drop(Wait, names.PUSH, "vacant")),
    "slot written one vacancy too early": ("all_gather", fewer("vacant", names.PUSH)),
    "pushes before the optimizer": ("all_gather", drop(After, names.PUSH, "begin")),
    "cast before the optimizer": ("all_gather", drop(After, names.OWN, "begin")),
    "no vacancy": ("vacate", drop(Signal, names.VACANCY, "vacant")),
    "vacancy before compute has read": ("vacate", drop(After, names.VACANCY, "read")),
    "pushes not awaited at the free": ("vacate", drop(After, COMPUTE, "sent")),
    "pieces used before they arrive": ("all_gather", fewer("arrived", names.ARRIVE)),
    "summed before it is staged": ("reduce_scatter", fewer("staged", names.SUM)),
    "STAGE filled one place too far": ("reduce_scatter", fewer("stage_free", names.REDUCE_PUSH)),
    "lanes summed in reverse": ("reduce_scatter", sums(lambda s: replace(s, sources=s.sources[::-1]))),
    "own lane first": ("reduce_scatter", sums(lambda s: replace(s, sources=(*s.sources[1:], s.sources[0])))),
    "a lane left out": ("reduce_scatter", sums(lambda s: replace(s, sources=s.sources[:-1]))),
    "a lane taken twice": ("reduce_scatter", sums(own_place_twice)),
    "sum one element too far": (
        "reduce_scatter",
        sums(lambda s: replace(s, dst=replace(s.dst, offset=s.dst.offset + 4))),
    ),
    "sum without its scale": ("reduce_scatter", lambda op: replace(op, scaled=False) if isinstance(op, Reduce) else op),
    "gradients freed before the pushes": ("reduce_scatter", drop(After, names.SUM, "pushed")),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("mode", MODES)
def test_mutant_is_rejected(name: str, mode: str) -> None:
    kind, change = MUTANTS[name]
    base = cached(plans(mode))
    assert edit(base(kind, 0, 0), change) != base(kind, 0, 0), "the mutant changes nothing"
    # On rank 2 alone, and on all ranks: the rank order of the sum must not depend on everyone agreeing.
    for ranks in ([2], range(LANES)):
        mutant = recounted(changed(base, kind, lambda program: edit(program, change), ranks), LANES)
        assert rejection(plans(mode), mutant) is not None, ranks


def test_slot_reuse_vacated_while_gradients_are_read() -> None:
    mutant = changed(
        plans("slot_reuse"), "vacate_reduced", lambda p: edit(p, drop(After, names.VACANCY, "slot_read")), [0]
    )
    assert rejection(plans("slot_reuse"), mutant) is not None


def test_slot_reuse_overwrites_pieces_still_being_pushed() -> None:
    mutant = changed(plans("slot_reuse"), "reduce_scatter", lambda p: edit(p, drop(After, names.OWN, "sent")), [0])
    assert rejection(plans("slot_reuse"), mutant) is not None


def test_a_piece_pushed_twice_is_rejected() -> None:
    def twice(program: Program) -> Program:
        first = next(i for i, op in enumerate(program.ops) if isinstance(op, Copy))
        marker = Record(names.PUSH, names.PUSHED)  # ends the batch, so that the second write is ordered after the first
        return replace(program, ops=(*program.ops[: first + 1], marker, *program.ops[first:]))

    reason = rejection(plans("in_place"), changed(plans("in_place"), "all_gather", twice, [0]))
    assert "written twice in one launch" in (reason or "accepted")


def test_copies_of_one_batch_are_unordered() -> None:
    """A copy that reads what another of the same batch writes: in order in the list, not on the device."""

    def chained(program: Program) -> Program:
        first = next(i for i, op in enumerate(program.ops) if isinstance(op, Copy))
        op = program.ops[first]
        assert isinstance(op, Copy)
        local = replace(op, dst=replace(op.dst, area=Area.PARTIAL), peer=program.rank)
        return replace(
            program, ops=(*program.ops[:first], local, replace(op, src=local.dst), *program.ops[first + 1 :])
        )

    reason = rejection(plans("in_place"), changed(plans("in_place"), "all_gather", chained, [0]))
    assert "read before the write" in (reason or "accepted")


def test_all_pushes_before_all_sums_deadlocks_in_issue_order() -> None:
    """With streams of their own the pushes would only wait for credits; on one hardware queue the sums behind them never start."""

    def pushes_first(program: Program) -> Program:
        pushes = [
            op
            for op in program.ops
            if op.stream in (COMPUTE, names.REDUCE_PUSH) and op != Record(names.REDUCE_PUSH, names.PUSHED)
        ]
        rest = [op for op in program.ops if op not in pushes]
        return replace(program, ops=(*pushes, *rest))

    mutant = changed(plans("in_place"), "reduce_scatter", pushes_first, range(LANES))
    assert "deadlock when each rank runs strictly in issue order" in (
        rejection(plans("in_place"), mutant) or "accepted"
    )


def test_a_word_has_one_writer() -> None:
    """With two writer streams, counting could not tell whose signal came."""

    def on_two_streams(program: Program) -> Program:
        return edit(program, lambda op: replace(op, stream=names.PUSH) if isinstance(op, Signal) else op)

    mutant = changed(plans("slot_reuse"), "vacate_reduced", on_two_streams, [0])
    assert "two writers" in (rejection(plans("slot_reuse"), mutant) or "accepted")


def test_tags_must_be_compared() -> None:
    def blind(program: Program) -> Program:
        return edit(program, lambda op: None if type(op).__name__ == "Agree" else op)

    reason = rejection(plans("in_place"), changed(plans("in_place"), "reduce_scatter", blind, [1]))
    assert "posted and never compared" in (reason or "accepted")


def test_a_cast_that_leaves_a_parameter_out() -> None:
    def shorter(op: Op) -> Op:
        return replace(op, parts=op.parts[:-1]) if isinstance(op, Cast) and op.stream == names.OWN else op

    assert rejection(plans("in_place"), changed(plans("in_place"), "all_gather", lambda p: edit(p, shorter), [0]))


def test_caller_that_does_not_wait_is_rejected() -> None:
    """The sequence's own steps are checked like programs: compute that reads before `arrived`."""
    sequence = Training(plans("in_place"))
    sequence.step()
    waits = [i for i, item in enumerate(sequence.issued[0]) if item.op == After(COMPUTE, names.ARRIVED)]
    assert isinstance(sequence.issued[0][waits[0] + 1].op, Use)
    del sequence.issued[0][waits[0]]
    with pytest.raises(CheckError, match="read before|never written|demands"):
        Checker(sequence.issued, 2).check()
