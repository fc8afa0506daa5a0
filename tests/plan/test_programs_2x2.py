"""The gate: hand-written programs for two machines of two lanes are accepted, and mutants of them are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.plan import programs_2x2 as hand
from tests.plan.mutants import cached, changed, edit, places, recounted, rejection, survivors, without
from tide_comm.plan import names
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import After, Area, Copy, Op, Program, Put, Record, Reduce, Segment, Signal, Wait
from tide_comm.plan.sequence import Plans
from tide_comm.plan.slices import StageSpec

MODES = ("in_place", "slot_reuse")
KINDS = {
    "in_place": ("all_gather", "reduce_scatter", "vacate"),
    "slot_reuse": ("all_gather", "reduce_scatter", "vacate", "vacate_reduced"),
}


def param(name: str, *shape: int, dtype: str = "bfloat16") -> ParamLayout:
    return ParamLayout(name, shape, dtype, "bfloat16", 4)


# Masters in the communicated dtype, in fp32, and mixed; block boundaries on a chunk, inside one (6 + 2), and across three parameters.
LAYOUTS = (
    GroupLayout("first", (param("c", 16, 1), param("d", 4, 4)), 4),
    GroupLayout("second", (param("a", 8, 3), param("b", 8, dtype="float32")), 4),
    GroupLayout("third", (param("e", 4, 3, dtype="float32"), param("f", 8, 1), param("g", 4, 5)), 4),
)
MOST = max(hand.Slices(layout, False).shard for layout in LAYOUTS)


class HandPlans(Plans):
    def limits(self) -> dict[Area, int]:
        return super().limits() | {Area.INBOX: 2 * MOST * 4, Area.PARTIAL: MOST * 4, Area.STAGE: MOST * 2}


def plans(mode: str) -> Plans:
    return HandPlans(LAYOUTS, hand.TOPOLOGY, StageSpec(MOST * 2, hand.RING, 2), mode)


def programs(mode: str) -> Callable[[str, int, int], Program]:
    base = plans(mode)

    def make(kind: str, group: int, rank: int) -> Program:
        machine, lane = hand.TOPOLOGY.machine_of(rank), hand.TOPOLOGY.lane_of(rank)
        if kind == "all_gather":
            return hand.all_gather(LAYOUTS[group], base.shard_base(group), machine, lane)
        if kind == "reduce_scatter":
            return hand.reduce_scatter(LAYOUTS[group], machine, lane, mode == "slot_reuse")
        return hand.vacate(machine, lane, kind == "vacate_reduced")

    return make


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("slots", "prefetch"), [(2, 1), (1, 0), (3, 2), (3, 1)])
def test_accepted(mode: str, slots: int, prefetch: int) -> None:
    assert rejection(plans(mode), programs(mode), 2, slots, prefetch) is None


def test_the_round_has_a_head_and_a_tail_and_splits_one_piece() -> None:
    for layout in LAYOUTS:
        puts = [op for op in hand.all_gather(layout, 0, 0, 0).ops if isinstance(op, Put)]
        head = [op for op in puts if op.word.name == "head"]
        assert sum(op.src.nbytes for op in head) == hand.HEAD_BYTES
        assert sum(op.src.nbytes for op in puts) == sum(param.chunk * 2 for param in layout.params)
        assert head and head != puts
        assert len(puts) <= len(layout.params) + 1


PACING = {
    ("all_gather", ("rail", "Wait", "confirmed", 0)),
    ("all_gather", ("confirm", "Wait", "head", 0)),
    ("all_gather", ("confirm", "Signal", "confirmed", 0)),
}
"""Confirmations order no data: they keep a round from crowding out the one before, which is a matter of speed."""
SAME_WIRE = {("all_gather", ("arrive", "Wait", "head", 0))}
"""The tail comes after the head on the same wire; a group without a tail needs this wait, and none of these is such a group."""
NEVER_VACATED_LATER = {
    ("all_gather", ("own", "After", "vacated", 0)),
    ("vacate", ("vacancy", "Record", "vacated", 0)),
}
"""For the own kernel BEGIN covers VACATED unless the slot was reduced from: compute waits for SENT before it goes on."""
READ_BEFORE_REDUCED = {
    ("vacate_reduced", ("compute", "After", "sent", 0)),
    ("vacate_reduced", ("compute", "Record", "read", 0)),
    ("vacate_reduced", ("vacancy", "After", "read", 0)),
}
"""Slot-Reuse: the gradients' copy into the slot waits for both already, and SLOT_READ comes after it."""


@pytest.mark.parametrize("mode", [pytest.param("in_place", marks=pytest.mark.slow), "slot_reuse"])
def test_every_operation_is_needed(mode: str) -> None:
    found = survivors(plans(mode), programs(mode), KINDS[mode])
    redundant = PACING | SAME_WIRE
    redundant |= (
        NEVER_VACATED_LATER
        if mode == "in_place"
        else READ_BEFORE_REDUCED | {("vacate", ("vacancy", "Record", "vacated", 0))}
    )
    assert found == redundant


@pytest.mark.parametrize("mode", MODES)
def test_every_dropped_signal_is_counted(mode: str) -> None:
    base = cached(programs(mode))
    for kind in KINDS[mode]:
        for place in places(base(kind, 0, 0)):
            if place[1] in ("Signal", "Put"):
                mutant = changed(base, kind, lambda program, place=place: without(program, place), [0])
                assert "signalled" in (rejection(plans(mode), mutant) or "accepted"), place


def replaced(op: Op, region: str, **fields: object) -> Op:
    """`op` with `fields` of its `region` (src or dst) changed."""
    return replace(op, **{region: replace(getattr(op, region), **fields)})


def on_rail(op: Op) -> bool:
    return isinstance(op, Put) and op.stream == names.REDUCE_RAIL


def swap_seats(op: Op) -> Op:
    """A partial sum lands on the seat of the other slice."""
    if not on_rail(op):
        return op
    slice_bytes = 4 * op.src.nbytes  # two slices of two blocks: the set's size
    return replaced(op, "dst", offset=(op.dst.offset + slice_bytes // 2) % slice_bytes)


def outside_inbox(op: Op) -> Op:
    return replaced(op, "dst", offset=op.dst.offset + 4 * 2 * MOST) if on_rail(op) else op


def other_set(op: Op) -> Op:
    return replaced(op, "dst", index=1) if on_rail(op) else op


def wrong_peer(op: Op) -> Op:
    """A put that goes to the other rail."""
    return replace(op, peer=op.peer ^ 1) if on_rail(op) else op


def one_partial(op: Op) -> Op:
    """Both blocks through the same PARTIAL, without a wait for the first to leave."""
    if on_rail(op):
        return replaced(op, "src", index=0)
    if isinstance(op, Reduce) and op.stream == names.SUM:
        segments = (
            Segment(s.sources, replace(s.dst, index=0) if s.dst.area is Area.PARTIAL else s.dst) for s in op.segments
        )
        return replace(op, segments=tuple(segments))
    return op


def swapped_sum(stream: str) -> Callable[[Op], Op]:
    def change(op: Op) -> Op:
        if isinstance(op, Reduce) and op.stream == stream:
            return replace(op, segments=tuple(Segment(s.sources[::-1], s.dst) for s in op.segments))
        return op

    return change


def unscaled(op: Op) -> Op:
    return replace(op, scaled=False) if isinstance(op, Reduce) else op


def fewer(word: str, by: int = 1, stream: str = "") -> Callable[[Op], Op]:
    """Waits of one word that ask for less."""

    def change(op: Op) -> Op:
        hit = isinstance(op, Wait) and op.word.name == word and op.stream.startswith(stream)
        return replace(op, count=op.count - by) if hit else op

    return change


def drop(word: str) -> Callable[[Op], Op | None]:
    """Signals of one word that are not sent."""
    return lambda op: None if isinstance(op, Signal) and op.word.name == word else op


MUTANTS = {
    "swapped seat": ("reduce_scatter", swap_seats),
    "put outside the inbox": ("reduce_scatter", outside_inbox),
    "put into the other inbox set": ("reduce_scatter", other_set),
    "put on the wrong rail": ("reduce_scatter", wrong_peer),
    "one PARTIAL for both blocks": ("reduce_scatter", one_partial),
    "lanes summed in the wrong order": ("reduce_scatter", swapped_sum(names.SUM)),
    "machines summed in the wrong order": ("reduce_scatter", swapped_sum(names.FINAL)),
    "sum without its scale": ("reduce_scatter", unscaled),
    "inbox set taken a launch too early": ("reduce_scatter", fewer("credit")),
    "own inbox set taken a launch too early": ("reduce_scatter", fewer("final_done", 1, names.SUM)),
    "credit before the mate's last step": ("reduce_scatter", fewer("final_done", 1, names.FINAL)),
    "last step after one of two seats": ("reduce_scatter", fewer("seated")),
    "half of a partial sum announced": ("reduce_scatter", fewer("partial_arrived")),
    "no credits": ("reduce_scatter", drop("credit")),
    "no vacancy": ("vacate", drop("vacant")),
    "slot written early": ("all_gather", fewer("vacant")),
    "forwards before they arrive": ("all_gather", fewer("head", 1, names.PUSH)),
    "tail not awaited": ("all_gather", fewer("tail", 1, names.ARRIVE)),
    "forwards not awaited": ("all_gather", fewer("arrived")),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name: str, mode: str) -> None:
    kind, change = MUTANTS[name]
    for ranks in ([3], range(4)):
        mutant = changed(cached(programs(mode)), kind, lambda program: edit(program, change), ranks)
        assert edit(programs(mode)(kind, 0, 0), change) != programs(mode)(kind, 0, 0), "the mutant changes nothing"
        assert rejection(plans(mode), recounted(mutant, 4)) is not None, ranks


@pytest.mark.parametrize("mode", MODES)
def test_slot_vacated_before_its_forwards_left(mode: str) -> None:
    def early(program: Program) -> Program:
        """`sent` is recorded before the forwards are issued; the puts are out by then."""
        sent = [op for op in program.ops if op in (After(names.PUSH, names.RAIL_SENT), Record(names.PUSH, names.SENT))]
        rest = [op for op in program.ops if op not in sent]
        forwards = rest.index(
            next(op for op in rest if isinstance(op, Wait) and op.stream == names.PUSH and op.count > 0)
        )
        return replace(program, ops=(*rest[:forwards], *sent, *rest[forwards:]))

    assert rejection(plans(mode), changed(programs(mode), "all_gather", early, range(4))) is not None


@pytest.mark.parametrize("ranks", [[0], [0, 3]])
def test_destinations_in_another_order_than_the_mate_expects(ranks: list[int]) -> None:
    """Machine m serves D = m first. A lane that starts with the other machine hands its mate the wrong slice."""

    def other_first(program: Program) -> Program:
        layout = next(layout for layout in LAYOUTS if program.name.endswith(layout.name))

        def change(op: Op) -> Op:
            if not isinstance(op, Copy):
                return op
            machine_bytes = 2 * layout.params[op.src.index].chunk * 2
            away = machine_bytes if op.src.offset < machine_bytes else -machine_bytes
            return replaced(op, "src", offset=op.src.offset + away)

        return edit(program, change)

    assert "demands" in (
        rejection(plans("in_place"), changed(programs("in_place"), "reduce_scatter", other_first, ranks)) or ""
    )


def test_rail_and_confirmation_on_one_stream_would_deadlock_in_reverse() -> None:
    """A confirmation awaited before the own puts are issued: each rank waits for the other's."""

    def confirm_first(program: Program) -> Program:
        confirm = [op for op in program.ops if op.stream == names.CONFIRM]
        rest = [replace(op, stream=names.RAIL) for op in confirm]
        return replace(program, ops=(*rest, *(op for op in program.ops if op not in confirm)))

    assert "deadlock" in (
        rejection(plans("in_place"), changed(programs("in_place"), "all_gather", confirm_first, range(4))) or ""
    )
