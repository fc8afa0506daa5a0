"""What crosses machines, as the NCCL rail carries it out: puts of data, and words and tags that are put as well.

A word at a peer of another machine cannot be written by a stream operation, so it travels as a put of four bytes: a stream operation writes
its value into the own outbox, and the put behind it on the same stream takes it to the word. Words keep their meaning, so a receiver
waits as it does for a mate: `cuStreamWaitValue32`, on any number of streams, as often as it likes.

Why a word never overtakes the data before it: a put goes on its stream only when the puts before it on that stream are complete. NCCL's
guide (usage/p2p, "One-sided communication") promises "operations to the same peer and context are executed in order: both data delivery
and signal updates on the remote peer follow the program order". In 2.31.2 it is so because every put ends with a signal of its own, an
atomic on the same queue pair behind the data (strong: all puts before it are visible, plugins/rma/README.md), whose completion the
sender's stream waits for (rma_proxy_launch.cc); on one host each put and its signal are batches of copies one behind the other on the
stream (rma_ce.cc). The outbox is written on the stream between data and word, so both are never in one group.

Why NCCL's signals are not waited for: a wait consumes what it has waited for, so each could be waited for once only; and NCCL lets all
operations of a communicator wait for one another in the order of issue, whatever their streams (`ncclLaunchPrepare` and
`ncclLaunchFinish`, enqueue.cc): a wait for a peer would hold up every later put. For the same reason each stream that writes to other
machines has a communicator of its own: with one for all, a confirmation would queue behind the own tails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tide_comm.engine.base import OUTBOX_PLACES
from tide_comm.plan import names
from tide_comm.plan.program import Op, Post, Put, Region, Signal, Word
from tide_comm.plan.topology import Topology


@dataclass(frozen=True)
class Data(Op):
    """One put of contiguous bytes, which raises no word of ours."""

    src: Region
    dst: Region
    peer: int


@dataclass(frozen=True)
class Raise:
    """`word` at `peer` goes up by `by`."""

    peer: int
    word: Word
    by: int


@dataclass(frozen=True)
class Stage(Op):
    """Write what travels into a place of the stream's outbox."""

    what: Raise | Post
    place: int


@dataclass(frozen=True)
class Send(Op):
    """Put it from there to where it belongs."""

    what: Raise | Post
    place: int


def channel_of(stream: str) -> int:
    """The number of a stream's outbox and communicator."""
    return names.RAIL_STREAMS.index(stream)


def crosses(op: Op, topology: Topology, rank: int) -> bool:
    """Whether an operation writes to another machine."""
    return isinstance(op, (Put, Signal, Post)) and topology.machine_of(op.peer) != topology.machine_of(rank)


def over_rail(ops: Iterable[Op], topology: Topology, rank: int) -> list[Op]:
    """`ops` with everything that crosses machines as `Data`, `Stage` and `Send`.

    Consecutive puts that raise one word raise it once, at the end: nothing is between them for which a receiver could be needed.
    """
    done: list[Op] = []
    places: dict[str, int] = dict.fromkeys(names.RAIL_STREAMS, 0)

    def place(stream: str) -> int:
        # The place was used OUTBOX_PLACES words ago on this very stream, so that put has been carried out.
        places[stream] += 1
        return places[stream] % OUTBOX_PLACES

    for (stream, far), group in groupby(ops, key=lambda op: (op.stream, crosses(op, topology, rank))):
        run = list(group)
        done += _run(stream, run, place) if far else run
    return done


def _run(stream: str, ops: Sequence[Op], place: Callable[[str], int]) -> Iterator[Op]:
    """A run of operations on one stream that cross machines. Words that follow one another are all staged before the first is sent."""
    pending: list[Raise | Post] = []

    def flush() -> Iterator[Op]:
        for first in range(0, len(pending), OUTBOX_PLACES):
            staged = [(what, place(stream)) for what in pending[first : first + OUTBOX_PLACES]]
            yield from (Stage(stream, what, at) for what, at in staged)
            yield from (Send(stream, what, at) for what, at in staged)
        pending.clear()

    for (puts, peer, word), group in groupby(ops, key=_key):
        run = list(group)
        if puts:
            assert word is not None
            yield from flush()
            for op in run:
                assert isinstance(op, Put)
                yield from _rows(op)
            pending.append(Raise(peer, word, len(run)))
            continue
        for op in run:
            assert isinstance(op, (Signal, Post))
            pending.append(Raise(op.peer, op.word, 1) if isinstance(op, Signal) else op)
    yield from flush()


def _key(op: Op) -> tuple[bool, int, Word | None]:
    return (True, op.peer, op.word) if isinstance(op, Put) else (False, -1, None)


def _rows(op: Put) -> Iterator[Data]:
    """The contiguous runs of bytes of a put: rows where one side has gaps."""
    src, dst = list(op.src.spans()), list(op.dst.spans())
    count = max(len(src), len(dst))
    width = op.src.nbytes // count
    if not width:
        return

    def at(region: Region, spans: Sequence[tuple[int, int]], k: int) -> Region:
        start = spans[k][0] if len(spans) == count else spans[0][0] + k * width
        return Region(region.area, start, width, index=region.index)

    for k in range(count):
        yield Data(op.stream, at(op.src, src, k), at(op.dst, dst, k), op.peer)
