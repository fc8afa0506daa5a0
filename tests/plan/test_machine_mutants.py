"""Mutants of the programs for several machines: the checker must reject every one that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.plan.mutants import cached, changed, edit, recounted, rejection, survivors
from tests.plan.test_mutants import COVERED, drop, fewer
from tide_comm.plan import names
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import COMPUTE, After, Copy, Op, Program, Put, Reduce, Remote, Segment, Signal, Wait
from tide_comm.plan.sequence import Plans
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology

MODES = ("in_place", "slot_reuse")
KINDS = {
    "in_place": ("all_gather", "reduce_scatter", "vacate"),
    "slot_reuse": ("all_gather", "reduce_scatter", "vacate", "vacate_reduced"),
}


def plans(mode: str, machines: int = 3, lanes: int = 2, batch: int = 1) -> Plans:
    """Batches of one machine: three of them a launch, so that sets are reused within it. The first group casts nothing."""
    world = machines * lanes

    def param(name: str, *shape: int, dtype: str = "bfloat16", dim: int = 0) -> ParamLayout:
        return ParamLayout(name, shape, dtype, "bfloat16", world, dim)

    layouts = (
        GroupLayout("first", (param("a", 4 * world, 4), param("b", 3 * world, 2)), world),
        GroupLayout("second", (param("c", 3 * world, 4, dtype="float32"), param("d", 3, 2 * world, dim=1)), world),
        GroupLayout("third", (param("e", 4 * world, 5),), world),
    )
    stage = StageSpec(64 * lanes, 2, lanes)
    return Plans(layouts, Topology.regular(machines, lanes), stage, mode, inbox_batch=batch, head_bytes=16)


def puts(stream: str, change: Callable[[Put], Op]) -> Callable[[Op], Op]:
    return lambda op: change(op) if isinstance(op, Put) and op.stream == stream else op


def moved(put: Put, nbytes: int) -> Put:
    return replace(put, dst=replace(put.dst, offset=put.dst.offset + nbytes))


def last_step(change: Callable[[Segment], Segment]) -> Callable[[Op], Op]:
    def edited(op: Op) -> Op:
        hit = isinstance(op, Reduce) and any(isinstance(s, Remote) for s in op.segments[0].sources)
        return replace(op, segments=tuple(map(change, op.segments))) if hit and isinstance(op, Reduce) else op

    return edited


def remotes(change: Callable[[Remote], Remote]) -> Callable[[Segment], Segment]:
    return lambda s: replace(s, sources=tuple(change(x) if isinstance(x, Remote) else x for x in s.sources))


def other_set(remote: Remote) -> Remote:
    return replace(remote, region=replace(remote.region, index=remote.region.index + 1))


def forwards(change: Callable[[Copy], Op | None]) -> Callable[[Op], Op | None]:
    """Copies from the slot to the same place in a mate's slot."""
    return lambda op: change(op) if isinstance(op, Copy) and op.src == op.dst else op


PACING = {
    ("all_gather", ("rail", "Wait", "confirmed", 0)),
    ("all_gather", ("confirm", "Wait", "head", 0)),
    ("all_gather", ("confirm", "Signal", "confirmed", 0)),
    # The tail comes over the same wire, behind the head.
    ("all_gather", ("arrive", "Wait", "head", 0)),
}
"""Confirmations order nothing: they keep the switches' queues short."""
SEAT = 64 * 4  # more than a block of these groups
MUTANTS: dict[str, tuple[str, Callable[[Op], Op | None]]] = {
    "partial sum into another seat": ("reduce_scatter", puts(names.REDUCE_RAIL, lambda op: moved(op, SEAT))),
    "partial sum into the other set": (
        "reduce_scatter",
        puts(names.REDUCE_RAIL, lambda op: replace(op, dst=replace(op.dst, index=op.dst.index + 1))),
    ),
    "stale seat: the set before is added": ("reduce_scatter", last_step(remotes(other_set))),
    "seats swapped between lanes": (
        "reduce_scatter",
        last_step(remotes(lambda remote: replace(remote, rank=remote.rank ^ 1))),
    ),
    "last step before the seats are told": ("reduce_scatter", drop(Wait, names.FINAL, "seated")),
    "seats told before the put arrived": ("reduce_scatter", drop(Wait, names.SEAT, "partial_arrived")),
    "put without a credit": ("reduce_scatter", drop(Wait, names.REDUCE_RAIL, "credit")),
    "put one credit early": ("reduce_scatter", fewer("credit", names.REDUCE_RAIL)),
    "own seat taken early": ("reduce_scatter", drop(Wait, names.SUM, "final_done")),
    "own seat taken one use early": ("reduce_scatter", fewer("final_done", names.SUM)),
    "credit before all lanes have read": ("reduce_scatter", drop(Wait, names.CREDIT, "final_done")),
    "no credit": ("reduce_scatter", drop(Signal, names.CREDIT, "credit")),
    "PARTIAL overwritten while it is put": ("reduce_scatter", drop(After, names.SUM, "partial_read")),
    "PARTIAL put before it is summed": ("reduce_scatter", drop(After, names.REDUCE_RAIL, "partial_summed")),
    "machines added in another order": (
        "reduce_scatter",
        lambda op: replace(op, carry=False) if isinstance(op, Reduce) and op.carry else op,
    ),
    "slot put into before it is vacant": ("all_gather", drop(Wait, names.RAIL, "vacant")),
    "slot put into one vacancy early": ("all_gather", fewer("vacant", names.RAIL)),
    "put of another machine's place": ("all_gather", puts(names.RAIL, lambda op: moved(op, 8))),
    "wrong round: the peer of another": (
        "all_gather",
        puts(names.RAIL, lambda op: replace(op, peer=(op.peer + 2) % 6)),
    ),
    "forwarded in the next round before it arrived": ("all_gather", drop(Wait, names.RAIL, "tail")),
    "forwarded to a mate before the head arrived": ("all_gather", drop(Wait, names.PUSH, "head")),
    "forwarded to a mate before the tail arrived": ("all_gather", drop(Wait, names.PUSH, "tail")),
    "nothing forwarded": ("all_gather", forwards(lambda op: None)),
    "used before the rail's pieces arrive": ("all_gather", drop(Wait, names.ARRIVE, "tail")),
    "puts before the optimizer": ("all_gather", drop(After, names.RAIL, "begin")),
    "puts before the cast": ("all_gather", drop(After, names.RAIL, "own_done")),
    "slot vacated before its forwards left": ("vacate", drop(After, COMPUTE, "sent")),
    "shard written while it is still put": ("all_gather", drop(After, names.PUSH, "rail_sent")),
    "no vacancy for the rail": (
        "vacate",
        lambda op: (
            None if isinstance(op, Signal) and op.word.name == "vacant" and op.peer % 2 == op.word.key % 2 else op
        ),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("machines, lanes, batch", [(2, 2, 8), (3, 2, 1), (3, 2, 2), (4, 1, 3), (2, 4, 8), (5, 2, 2)])
def test_accepted(mode: str, machines: int, lanes: int, batch: int) -> None:
    chosen = plans(mode, machines, lanes, batch)
    assert rejection(chosen, chosen) is None


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("mode", MODES)
def test_mutant_is_rejected(name: str, mode: str) -> None:
    """In one of two layouts at least: some hazards need sets that are reused within a launch, others forwards over the rail."""
    kind, change = MUTANTS[name]
    verdicts = []
    for machines, batch in ((3, 1), (4, 2)):
        chosen, world = plans(mode, machines, 2, batch), 2 * machines
        base = cached(chosen)
        if all(edit(base(kind, g, 0), change) == base(kind, g, 0) for g in range(3)):
            continue
        for ranks in ([0], range(world)):
            mutant = recounted(changed(base, kind, lambda program: edit(program, change), ranks), world)
            verdicts.append(rejection(chosen, mutant) is not None)
        if all(verdicts):
            break
    assert any(verdicts[0::2]) and any(verdicts[1::2]), verdicts


def test_slot_reuse_vacated_while_gradients_are_read() -> None:
    change = drop(After, names.VACANCY, "slot_read")
    mutant = changed(plans("slot_reuse"), "vacate_reduced", lambda p: edit(p, change), [0])
    assert rejection(plans("slot_reuse"), mutant) is not None


def test_another_destination_order() -> None:
    """One machine serves its destinations in descending order: two machines put into one at a time."""

    def descending(program: Program) -> Program:
        rail = [i for i, op in enumerate(program.ops) if op.stream == names.REDUCE_RAIL]
        starts = [i for i in rail if isinstance(program.ops[i], After)] + [rail[-1] + 1]
        blocks = [[i for i in rail if a <= i < b] for a, b in zip(starts, starts[1:], strict=False)]
        ops = list(program.ops)
        for i, op in zip(rail, [program.ops[i] for block in reversed(blocks) for i in block], strict=True):
            ops[i] = op
        return replace(program, ops=tuple(ops))

    for ranks in ([0, 1], range(6)):
        mutant = changed(plans("in_place", batch=3), "reduce_scatter", descending, ranks)
        assert rejection(plans("in_place", batch=3), mutant) is not None


@pytest.mark.parametrize("mode", [pytest.param("in_place", marks=pytest.mark.slow), "slot_reuse"])
def test_every_operation_is_needed(mode: str) -> None:
    chosen = plans(mode, 2, 2, 8)
    assert (
        survivors(chosen, chosen, KINDS[mode])
        == COVERED[mode] - {("reduce_scatter", ("sum", "Record", "done", 0))} | PACING
    )
