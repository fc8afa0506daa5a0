"""Streams, words and events that programs share: one place, so that all programs of an arena fit together.

A word lies at the rank that waits for it; its key is the rank that raises it.
"""

from __future__ import annotations

from functools import cache

from tide_comm.plan.program import Event, Word

# Streams. COMPUTE (program.py) is the caller's.
OWN = "own"  # the kernel of an all-gather (or a few): own pieces, cast where dtypes differ
PUSH = "push"  # pieces to the other lanes' slots
ARRIVE = "arrive"  # waits for pieces; what the consumer waits on
VACANCY = "vacancy"  # says that slots are free; on any other stream it would queue behind waits for peers
REDUCE_PUSH = "reduce_push"  # gradients to their owner's STAGE
SUM = "sum"  # the kernels that add
RAIL = "rail"  # puts of the all-gather
CONFIRM = "confirm"  # says that heads have arrived
REDUCE_RAIL = "reduce_rail"  # puts of partial sums
SEAT = "seat"  # tells all lanes that a partial sum has arrived at one
FINAL = "final"  # the last step of a reduce-scatter
CREDIT = "credit"  # gives inbox sets back to their next sources; on FINAL it would hold up the next batch

RAIL_STREAMS = (RAIL, CONFIRM, VACANCY, REDUCE_RAIL, CREDIT)
"""The streams that write to other machines."""

BEGIN = Event("begin")
"""The caller's stream at launch: parameters are as the optimizer left them, gradients are complete."""
SENT = Event("sent", slotted=True)
"""This rank's own pushes and puts for the group in the slot have read their sources."""
OWN_DONE = Event("own_done", slotted=True)
"""Own pieces stand in the own slot, all but those that reach all lanes by one write."""
OWN_PUSHED = Event("own_pushed", slotted=True)
"""Own pieces that reach all lanes by one write stand in the own slot too."""
ARRIVED = Event("arrived", slotted=True)
"""Every byte of the slot has arrived."""
READ = Event("read", slotted=True)
"""Compute has read the slot."""
VACATED = Event("vacated", slotted=True)
"""Nothing on this rank uses the slot any more."""
PUSHED = Event("pushed")
GRADS_COPIED = Event("grads_copied")
GRADS_READ = Event("grads_read")
"""Gradients have been read where they are."""
SLOT_READ = Event("slot_read", slotted=True)
"""Slot-Reuse: the gradients in the slot have been read."""
DONE = Event("done")
TRIED = Event("tried")
"""Every machine has been heard on every stream that writes to other machines."""
ADDED = Event("added")
"""A trial's sum of all lanes stands in PARTIAL."""
RAIL_SENT = Event("rail_sent", slotted=True)
"""This rank's puts have read their sources."""
OWN_SEATED = Event("own_seated")
"""This machine's partial sum for itself stands in the own inbox."""


@cache
def vacant(peer: int) -> Word:
    """`peer`'s slot is free for what I push or put there."""
    return Word("vacant", peer, slotted=True)


@cache
def arrived(source: int) -> Word:
    """Pieces pushed by `source` stand in my slot."""
    return Word("arrived", source, slotted=True)


@cache
def stage_free(owner: int) -> Word:
    """`owner` has summed a piece that I pushed: one more place in its ring."""
    return Word("stage_free", owner)


@cache
def staged(source: int) -> Word:
    """A piece from `source` stands in my STAGE."""
    return Word("staged", source)


@cache
def head(source: int) -> Word:
    """A put of the head of `source`'s round has arrived in my slot."""
    return Word("head", source, slotted=True)


@cache
def tail(source: int) -> Word:
    """A put of the tail has."""
    return Word("tail", source, slotted=True)


@cache
def confirmed(peer: int) -> Word:
    """`peer` has the whole head of a round that I put there. Not slotted: it paces a rail, whatever the group."""
    return Word("confirmed", peer)


@cache
def partial_arrived(source: int) -> Word:
    """A put of a partial sum from `source` stands in my inbox."""
    return Word("partial_arrived", source)


@cache
def seated(lane: int) -> Word:
    """A partial sum stands in the inbox of `lane` (a rank of my machine); raised at all lanes, for each reads its block there."""
    return Word("seated", lane)


@cache
def final_done(lane: int) -> Word:
    """`lane`'s last step has read its block in my inbox."""
    return Word("final_done", lane)


@cache
def credit(owner: int) -> Word:
    """An inbox set of `owner` is free again on all its lanes."""
    return Word("credit", owner)


@cache
def tried(source: int) -> Word:
    """`source` has reached me on one more of its streams (`trial`)."""
    return Word("tried", source)


@cache
def own_cast(portion: int) -> Event:
    """A portion of the own pieces is cast, and so are those before it; the last one's is OWN_DONE."""
    return Event("own_cast", portion)


@cache
def partial_summed(index: int) -> Event:
    """PARTIAL `index` holds a machine's sum."""
    return Event("partial_summed", index)


@cache
def trial_sent(index: int) -> Event:
    """The index-th stream has sent its words of a trial."""
    return Event("trial_sent", index)


@cache
def partial_read(index: int) -> Event:
    """The put out of PARTIAL `index` has read it."""
    return Event("partial_read", index)


def words_of(world: int, slots: int, machines: int = 1) -> list[tuple[str, int, int]]:
    """Every word that a rank of an arena owns, as (name, key, slot or -1), in the order in which engines lay them out."""
    by_slot, plain = ["vacant", "arrived"], ["stage_free", "staged"]
    if machines > 1:
        by_slot += ["head", "tail"]
        plain += ["confirmed", "partial_arrived", "seated", "final_done", "credit", "tried"]
    slotted = [(name, peer, slot) for slot in range(slots) for name in by_slot for peer in range(world)]
    return slotted + [(name, peer, -1) for name in plain for peer in range(world)]
