"""The same program with fewer driver calls: what an engine for CUDA streams need not say, and words that can share a call.

Three changes, none of which the checker can tell from the program as it was written (tests/engine/test_tighten.py gives it both):

- An `After` is dropped if its stream is behind that `Record` anyway: by its own order, by an earlier `After`, or by another next to it.
- Credits of the STAGE ring (`stage_free`) are awaited earlier and given later in issue order, never in stream order, so that they stand
  next to another word operation of their stream: the executor hands such a run over in one call. In issue order this lets a credit come
  two pieces later, so it is done only for rings of three places and more; with two, ranks whose streams share one hardware queue would
  wait for each other.
- In a run of copies, which is unordered, contiguous ones come first: the executor hands them over in one batch. Rows at a pitch take a call
  of their own, so a few rows join the batch one by one, and so do rows that are too far apart for such a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from tide_comm.plan import names
from tide_comm.plan.program import (
    After,
    Agree,
    Copy,
    Copy2D,
    CopyAll,
    Event,
    Op,
    Post,
    Program,
    Record,
    Region,
    Signal,
    Wait,
)

CREDIT = names.stage_free(0).name
_SAFE_RING = 3
_FEW_ROWS = 4
"""So many rows cost less in a batch (about 1.2 us each on H200) than in a call of their own."""
MAX_PITCH = 2**31 - 1
"""cudaDeviceProp.memPitch of every GPU so far: cudaMemcpy2DAsync refuses more."""

Clock = dict[object, int]
"""How far a stream has seen: by stream, the number of its operations; by event of earlier launches, 1."""


def tighten(program: Program, ring: int) -> Program:
    """`program` with the same meaning and fewer calls. `ring`: places in STAGE."""
    ops = _without_implied(program.ops)
    if ring >= _SAFE_RING:
        ops = _credits_together(ops)
    return replace(program, ops=tuple(_copies_together(ops)))


def _without_implied(ops: tuple[Op, ...]) -> list[Op]:
    """Less every `After` that the rest implies."""
    clocks: dict[str, Clock] = {}
    recorded: dict[Event, Clock] = {}
    kept: list[Op] = []
    for i, op in enumerate(ops):
        clock = clocks.setdefault(op.stream, {})
        if isinstance(op, After):
            wanted = _behind(op.event, recorded)
            others = dict(clock)
            for event in _next_to(ops, i, recorded):
                _join(others, _behind(event, recorded))
            if _covers(others, wanted):
                continue
            _join(clock, wanted)
        else:
            clock[op.stream] = clock.get(op.stream, 0) + 1
            if isinstance(op, Record):
                recorded[op.event] = dict(clock)
        kept.append(op)
    return kept


def _behind(event: Event, recorded: dict[Event, Clock]) -> Clock:
    """What a stream knows after waiting for the event; one of an earlier launch stands for itself."""
    return recorded.get(event, {("before", event): 1})


def _next_to(ops: tuple[Op, ...], i: int, recorded: dict[Event, Clock]) -> Iterator[Event]:
    """Events that the same stream waits for right after operation i, and that are what they are at i already."""
    again: set[Event] = set()
    for op in ops[i + 1 :]:
        if isinstance(op, Record):
            again.add(op.event)
        if op.stream != ops[i].stream:
            continue
        if not isinstance(op, After):
            return
        if op.event in recorded and op.event not in again:
            yield op.event


def _join(clock: Clock, other: Clock) -> None:
    for key, tick in other.items():
        clock[key] = max(clock.get(key, 0), tick)


def _covers(clock: Clock, wanted: Clock) -> bool:
    return all(clock.get(key, 0) >= tick for key, tick in wanted.items())


def _credits_together(ops: list[Op]) -> list[Op]:
    """Waits for credits go up behind the signals before them on their stream; credits given go down to the word operation after them."""
    moved: list[Op] = []
    for op in ops:
        at = len(moved)
        if isinstance(op, Wait) and op.word.name == CREDIT:
            last = next((k for k in reversed(range(at)) if moved[k].stream == op.stream), None)
            if last is not None and _is_word(moved[last]):
                at = last + 1
        moved.insert(at, op)
    result: list[Op] = []
    for op in reversed(moved):
        at = len(result)
        if isinstance(op, Signal) and op.word.name == CREDIT:
            following = next((k for k in reversed(range(at)) if result[k].stream == op.stream), None)
            if following is not None and _is_word(result[following]):
                at = following + 1
        result.insert(at, op)
    return result[::-1]


def _copies_together(ops: list[Op]) -> list[Op]:
    """Each run of copies with its contiguous ones first, few rows taken apart."""
    done: list[Op] = []
    for is_run, group in groupby(ops, key=lambda op: (op.stream, isinstance(op, (Copy, CopyAll)))):
        run = list(group)
        if is_run[1]:
            copies = [row for op in run if isinstance(op, (Copy, CopyAll)) for row in _rows(op, len(run) > 1)]
            run = [*sorted(copies, key=_has_rows)]
        done += run
    return done


def _has_rows(op: Copy | CopyAll) -> bool:
    return isinstance(op, Copy2D) or (isinstance(op, CopyAll) and max(op.src.rows, op.dst.rows) > 1)


def _rows(op: Copy | CopyAll, batched: bool) -> Sequence[Copy | CopyAll]:
    """One by one where they join a batch or must, else as they are."""
    apart = max(op.src.pitch, op.dst.pitch) > MAX_PITCH or (batched and op.src.rows <= _FEW_ROWS)
    if not _has_rows(op) or op.src.rows != op.dst.rows or not apart:
        return [op]

    def row(region: Region, k: int) -> Region:
        return replace(region, offset=region.offset + k * region.pitch, rows=1, pitch=0)

    places = [(row(op.src, k), row(op.dst, k)) for k in range(op.src.rows)]
    if isinstance(op, CopyAll):
        return [replace(op, src=src, dst=dst) for src, dst in places]
    return [Copy(op.stream, src, dst, op.peer) for src, dst in places]


def _is_word(op: Op) -> bool:
    return isinstance(op, (Signal, Wait, Post, Agree))
