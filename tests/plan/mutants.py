"""Changed programs, to see that the checker notices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from tide_comm.plan.checker import CheckError
from tide_comm.plan.program import Op, Program, Word
from tide_comm.plan.sequence import Plans, Programs, Training

Change = Callable[[Program], Program]


def rejection(
    plans: Plans, programs: Programs, steps: int = 2, slots: int = 2, prefetch: int = 1, symmetric: bool = False
) -> str | None:
    """None if the checker accepts `steps` training steps made of these programs, else its reason."""
    try:
        sequence = Training(plans, slots, prefetch, programs, symmetric=symmetric)
        for _ in range(steps):
            sequence.step()
        sequence.check()
    except CheckError as error:
        return str(error)
    return None


def changed(programs: Programs, kind: str, change: Change, ranks: Iterable[int]) -> Programs:
    """`programs` with those of one kind changed on some ranks."""
    where = frozenset(ranks)

    def make(this_kind: str, group: int, rank: int) -> Program:
        program = programs(this_kind, group, rank)
        return change(program) if this_kind == kind and rank in where else program

    return make


def recounted(programs: Programs, world: int) -> Programs:
    """`programs` whose `arrivals` fit the signals that are really sent: what is left to find is a race or a deadlock."""
    memory: dict[tuple[str, int], list[Program]] = {}

    def make(kind: str, group: int, rank: int) -> Program:
        if (kind, group) not in memory:
            made = [programs(kind, group, r) for r in range(world)]
            arrivals: dict[int, Counter[Word]] = defaultdict(Counter)
            for program in made:
                for (peer, word), count in program.signals.items():
                    arrivals[peer][word] += count
            memory[kind, group] = [replace(p, arrivals=dict(arrivals[p.rank])) for p in made]
        return memory[kind, group][rank]

    return make


def cached(programs: Programs) -> Programs:
    """Makes each program once."""
    memory: dict[tuple[str, int, int], Program] = {}

    def make(kind: str, group: int, rank: int) -> Program:
        key = (kind, group, rank)
        if key not in memory:
            memory[key] = programs(*key)
        return memory[key]

    return make


def edit(program: Program, change: Callable[[Op], Op | None]) -> Program:
    """The program with each operation replaced by what `change` makes of it, or dropped where that is None."""
    ops = [new for op in program.ops if (new := change(op)) is not None]
    return replace(program, ops=tuple(ops))


Place = tuple[str, str, str, int]
"""Which operation, in every rank's and every group's program of a kind: stream, type, name of word or event, how many such came before."""


def places(program: Program) -> list[Place]:
    """The place of each operation."""
    seen: Counter[tuple[str, str, str]] = Counter()
    found: list[Place] = []
    for op in program.ops:
        thing = getattr(op, "word", None) or getattr(op, "event", None)
        kind = (op.stream, type(op).__name__, thing.name if thing else "")
        found.append((*kind, seen[kind]))
        seen[kind] += 1
    return found


def without(program: Program, place: Place) -> Program:
    """The program less the operation at a place, if it has it."""
    here = places(program)
    return program.without(here.index(place)) if place in here else program


SCENARIOS = ((2, 1), (1, 0))
"""(slots, prefetch)."""


def survivors(plans: Plans, programs: Programs, kinds: Iterable[str]) -> set[tuple[str, Place]]:
    """Drop each operation in turn from all groups' programs on rank 0; which of these mutants no scenario rejects.

    `arrivals` follow what is still sent, so that a dropped signal must be found as a race or a deadlock.
    """
    world, groups = plans.topology.world, range(len(plans.layouts))
    programs = cached(programs)
    found: set[tuple[str, Place]] = set()
    for kind in kinds:
        for place in dict.fromkeys(place for g in groups for place in places(programs(kind, g, 0))):
            mutant = recounted(
                changed(programs, kind, lambda program, place=place: without(program, place), [0]), world
            )
            if all(rejection(plans, mutant, slots=slots, prefetch=ahead) is None for slots, ahead in SCENARIOS):
                found.add((kind, place))
    return found
