"""Reduce-scatters whose last step is the switch's: accepted, what they clear, and mutants that would add what is stale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.plan.mutants import Change, cached, changed, edit, recounted, rejection, survivors
from tests.plan.ragged import ragged_plans
from tests.plan.test_machine_mutants import MODES
from tests.plan.test_machine_mutants import plans as machine_plans
from tests.plan.test_mutants import COVERED, drop, fewer
from tide_comm.engine.cuda.tighten import tighten
from tide_comm.plan import names
from tide_comm.plan.apart import apart
from tide_comm.plan.program import After, Area, Clear, LaneSum, Op, Program, Reduce, Region, Remote, Segment, Wait
from tide_comm.plan.render import render
from tide_comm.plan.sequence import Plans, check_training
from tide_comm.plan.shape import shape_of
from tide_comm.plan.slices import InboxSpec


def plans(mode: str = "in_place", machines: int = 3, lanes: int = 2, batch: int = 2) -> Plans:
    return replace(machine_plans(mode, machines, lanes, batch), multimem=True)


SHAPES = [(2, 2, 2), (3, 2, 2), (3, 2, 1), (4, 2, 2), (2, 4, 2), (4, 3, 3), (5, 2, 2)]
"""(machines, lanes, batch): full batches, short ones, short last ones, odd numbers of batches."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("machines, lanes, batch", SHAPES)
def test_accepted(mode: str, machines: int, lanes: int, batch: int) -> None:
    assert rejection(plans(mode, machines, lanes, batch), plans(mode, machines, lanes, batch)) is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("machines, lanes, padding", [(2, 3, True), (3, 2, True), (5, 2, False), (2, 4, False)])
def test_odd_layouts_with_both_ways_of_multicast(mode: str, machines: int, lanes: int, padding: bool) -> None:
    base = ragged_plans(machines, lanes, mode, padding, batch=min(lanes, 2))
    check_training(replace(base, multimem=True, multicast_bytes=1 << 20), steps=2, symmetric=not padding)


@pytest.mark.parametrize("machines, lanes, batch", SHAPES)
def test_each_seat_is_filled_or_cleared(machines: int, lanes: int, batch: int) -> None:
    """By puts of other machines, by the own sum or by zeros; sums read every lane, sources in order of c first."""
    made = plans("in_place", machines, lanes, batch)
    topology, inbox = made.topology, made.inbox
    assert inbox is not None and inbox.waves == 1
    programs = [made("reduce_scatter", 0, rank) for rank in range(topology.world)]
    for b in range(-(-machines // batch)):
        sources = min(batch, machines - b * batch)
        for program in programs:
            ops = program.ops
            cleared = [op.dst for op in ops if isinstance(op, Clear) and op.dst.index == b]
            assert sum(region.rows for region in cleared) == lanes - sources
            starts = [region.offset + row * region.pitch for region in cleared for row in range(region.rows)]
            seats = {start // inbox.seat_bytes for start in starts}
            lane = topology.lane_of(program.rank)
            assert seats == set(range(lanes)) - {(lane + c) % lanes for c in range(b * batch, b * batch + sources)}
            for op in ops:
                for source in (s for seg in getattr(op, "segments", ()) for s in seg.sources):
                    assert not isinstance(source, Remote)
                    if isinstance(source, LaneSum) and source.region.index == b:
                        s = source.region.offset // inbox.seat_bytes
                        wanted = [
                            topology.rank(topology.machine_of(program.rank), s - b * batch - k) for k in range(lanes)
                        ]
                        assert list(source.ranks) == wanted
    shape = shape_of(programs[0])
    assert (shape.clears > 0) == (machines % batch > 0 or batch < lanes)
    assert set(shape.bytes_read_from_mates) == set(topology.mates(0))


def test_as_text() -> None:
    text = render(plans("in_place", 2, 4, 2)("reduce_scatter", 0, 1))
    assert "seat         Clear    INBOX(0)[0+" in text and "sum of ranks [0, 3, 2, 1]'s INBOX(0)" in text


def test_a_batch_is_one_wave() -> None:
    assert InboxSpec(64, 2, 2, True).waves == 1
    with pytest.raises(ValueError, match="one source a lane: 2 a batch at most; got 3"):
        InboxSpec(64, 3, 2, True)


def clear(change: Callable[[Clear], Op | None]) -> Change:
    return lambda program: edit(program, lambda op: change(op) if isinstance(op, Clear) else op)


def each(change: Callable[[Op], Op | None]) -> Change:
    return lambda program: edit(program, change)


def lane_sums(change: Callable[[LaneSum], LaneSum | Region | Remote]) -> Change:
    def changed_segment(segment: Segment) -> Segment:
        return replace(segment, sources=tuple(change(s) if isinstance(s, LaneSum) else s for s in segment.sources))

    return each(
        lambda op: replace(op, segments=tuple(map(changed_segment, op.segments))) if isinstance(op, Reduce) else op
    )


def at(region: Region, nbytes: int) -> Region:
    return replace(region, offset=region.offset + nbytes)


def before(op_type: type[Op], name: str) -> Change:
    """SEAT's clearing moved before what it waits for."""

    def change(program: Program) -> Program:
        ops = list(program.ops)
        for op in [op for op in ops if isinstance(op, Clear)]:
            here = next(i for i, other in enumerate(ops) if other is op)
            waits = [
                i
                for i, other in enumerate(ops[:here])
                if type(other) is op_type
                and other.stream == names.SEAT
                and (getattr(other, "word", None) or getattr(other, "event", None)).name == name  # type: ignore[union-attr]
            ]
            if waits:
                ops.insert(waits[0], ops.pop(here))
        return replace(program, ops=tuple(ops))

    return change


SEAT = 1 << 6
MUTANTS: dict[str, Change] = {
    "a forgotten clear": clear(lambda op: None),
    "a seat cleared before all lanes have read it": each(drop(Wait, names.SEAT, "final_done")),
    "a seat cleared one use early": each(fewer("final_done", names.SEAT)),
    "the first batch's seats cleared early": before(After, "own_seated"),
    "later batches' seats cleared early": before(Wait, "final_done"),
    "a part of a seat cleared": clear(
        lambda op: replace(op, dst=at(replace(op.dst, row_bytes=op.dst.row_bytes - 4), 4))
    ),
    "another seat cleared": clear(lambda op: replace(op, dst=at(op.dst, SEAT))),
    "the other set cleared": clear(lambda op: replace(op, dst=replace(op.dst, index=op.dst.index + 1))),
    "cleared behind the signal": lambda program: replace(
        program,
        ops=tuple(op for op in program.ops if not isinstance(op, Clear))
        + tuple(op for op in program.ops if isinstance(op, Clear)),
    ),
    "added before it arrived": each(drop(Wait, names.SEAT, "partial_arrived")),
    "added before the lanes say so": each(drop(Wait, names.FINAL, "seated")),
    "a part of the lanes added": lane_sums(lambda s: replace(s, ranks=s.ranks[:-1])),
    "one lane's copy alone": lane_sums(lambda s: Remote(s.ranks[0], s.region)),
    "another slice": lane_sums(lambda s: replace(s, region=at(s.region, SEAT))),
    "the set before": lane_sums(lambda s: replace(s, region=replace(s.region, index=s.region.index + 1))),
    "PARTIAL added": lane_sums(lambda s: replace(s, region=replace(s.region, area=Area.PARTIAL))),
    "batches not carried on": each(lambda op: replace(op, carry=False) if isinstance(op, Reduce) else op),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name: str) -> None:
    """Alone on rank 0 and on all ranks, in one layout at least: one short batch, or a short one behind full ones."""
    verdicts = []
    for machines, lanes, batch in ((2, 3, 2), (3, 2, 2)):
        chosen, world = plans("in_place", machines, lanes, batch), machines * lanes
        base = cached(chosen)
        if all(MUTANTS[name](base("reduce_scatter", g, 0)) == base("reduce_scatter", g, 0) for g in range(3)):
            continue
        for ranks in ([0], range(world)):
            mutant = recounted(changed(base, "reduce_scatter", MUTANTS[name], ranks), world)
            verdicts.append(rejection(chosen, mutant) is not None)
        if all(verdicts):
            break
    assert any(verdicts[0::2]) and any(verdicts[1::2]), verdicts


def test_the_order_of_a_switch_is_no_demand() -> None:
    """Accepted in whatever order lanes are named; sums of plain loads are held to theirs."""
    chosen = plans("in_place", 3, 2, 2)
    turned = changed(chosen, "reduce_scatter", lane_sums(lambda s: replace(s, ranks=s.ranks[::-1])), range(6))
    assert rejection(chosen, turned) is None
    plain = replace(chosen, multimem=False)
    assert "the layout demands" in (rejection(plain, chosen) or "accepted")


@pytest.mark.parametrize("machines, lanes, batch", [(3, 2, 2), (2, 4, 2)])
def test_lane_by_lane_it_is_the_ordered_sum(machines: int, lanes: int, batch: int) -> None:
    """Without the address: a copy to each lane and a load from each. Zeros are no term, so the order that is demanded is kept."""
    chosen = replace(plans("in_place", machines, lanes, batch), multicast_bytes=1 << 20)
    plain = replace(chosen, multimem=False)
    assert rejection(plain, lambda kind, group, rank: apart(chosen(kind, group, rank))) is None
    one = chosen("vacate", 0, 0)
    assert apart(one) is one


@pytest.mark.parametrize("mode", MODES)
def test_what_the_cuda_engine_makes_of_it_is_accepted(mode: str) -> None:
    chosen = replace(plans(mode, 3, 2, 1), multicast_bytes=1 << 20)
    assert rejection(chosen, lambda kind, group, rank: tighten(chosen(kind, group, rank), 2)) is None


@pytest.mark.slow
def test_every_operation_is_needed() -> None:
    chosen = replace(plans("in_place", 2, 3, 2), head_bytes=0)
    found = survivors(chosen, chosen, ("reduce_scatter",))
    expected = {place for place in COVERED["in_place"] if place[0] == "reduce_scatter"}
    assert found == expected - {("reduce_scatter", ("sum", "Record", "done", 0))}
