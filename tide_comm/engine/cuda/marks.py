"""The portions of an all-gather's cast as one kernel that says how far it is (`plan/portions.py`; `Marks` in csrc/kernels.h).

As one kernel a portion would have, each had to find its SMs beside multiplies anew: on two H200s four took 16% more SM time than one, and
twelve calls of the driver more a launch (docs/log.md). So the kernel raises a word when all before a mark is written, and where the
program waits for a portion's event, the stream waits for that word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tide_comm.plan import names
from tide_comm.plan.program import After, Cast, Event, Op, Part, Record

OWN_CAST = names.own_cast(0).name


@dataclass(frozen=True)
class MarkedCast(Op):
    """Several casts, one after the other; all but the last have a mark at their end."""

    portions: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True)
class Until(Op):
    """Wait for a mark of the launch's cast."""

    mark: int


def with_marks(ops: Iterable[Op]) -> list[Op]:
    """`ops` with casts of which others wait for a portion as one. What it says at a mark is what the portion's event said: everything up to
    there is written. It starts when the first of them would, and the last one's event is recorded behind it as before."""
    ops = list(ops)
    if not any(isinstance(op, Record) and _is_portion(op.event) for op in ops):
        return ops
    casts = [op for op in ops if isinstance(op, Cast) and op.stream == names.OWN]
    done: list[Op] = []
    for op in ops:
        if op is casts[0]:
            done.append(MarkedCast(op.stream, tuple(cast.parts for cast in casts)))
        elif isinstance(op, After) and _is_portion(op.event):
            done.append(Until(op.stream, op.event.key))
        elif not (op in casts or (isinstance(op, Record) and _is_portion(op.event))):
            done.append(op)
    return done


def _is_portion(event: Event) -> bool:
    return event.name == OWN_CAST
