"""What a program costs, counted from its operations: pure functions of plans, for reports and for tests of how many calls a step takes.

Bytes are counted where they leave: a copy is its sender's, a put its sender's, and what a sum reads out of another lane's memory its
reader's. Nothing here knows how a program was made, so a count cannot be right because a generator says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.program import (
    After,
    Agree,
    Cast,
    Clear,
    Copy,
    Copy2D,
    CopyAll,
    Op,
    Post,
    Program,
    Put,
    Record,
    Reduce,
    Remote,
    Signal,
    Wait,
    copies_of,
)
from tide_comm.plan.rounds import rounds
from tide_comm.plan.topology import Topology


@dataclass(frozen=True)
class ProgramShape:
    """Operations and bytes of one launch of one rank's program."""

    operations: int
    streams: tuple[str, ...]
    copies: int
    """Copies to mates, strided ones included."""
    copies_2d: int
    """Those of rows at a pitch."""
    copy_batches: int
    """Runs of copies with nothing between them on their stream: one batched call each where an engine has such calls."""
    copies_to_all: int
    """Writes that reach all lanes at once; their bytes leave once."""
    puts: int
    signals: int
    """Words raised at peers, not counting those that puts raise."""
    waits: int
    events: int
    """Local `Record`s and `After`s."""
    tags: int
    """Tags posted and comparisons of tags."""
    casts: int
    cast_segments: int
    sums: int
    sum_segments: int
    clears: int
    """Regions of inboxes that are cleared, because the switch adds them and no source fills them."""
    bytes_to_mates: dict[int, int]
    """Copied into each mate's memory, by rank."""
    bytes_to_all: int
    """Those of them that leave this rank once for all mates."""
    bytes_read_from_mates: dict[int, int]
    """Read by sums out of each mate's memory, by rank."""
    bytes_on_rail: int
    """Put to other machines."""
    rail_peers: int
    """Ranks of other machines that are put to."""
    stage_pieces: int
    inbox_batches: int

    @property
    def kernels(self) -> int:
        """Launches that occupy SMs."""
        return self.casts + self.sums

    @property
    def link_bytes(self) -> int:
        """Bytes from this rank to its busiest mate."""
        return max(self.bytes_to_mates.values(), default=0)

    @property
    def link_read_bytes(self) -> int:
        """Bytes that this rank's sums read from the mate they read most from."""
        return max(self.bytes_read_from_mates.values(), default=0)


def shape_of(program: Program) -> ProgramShape:
    """Counts of a program's operations and bytes."""
    kinds: Counter[type[Op]] = Counter(type(op) for op in program.ops)
    to_mates: Counter[int] = Counter()
    from_mates: Counter[int] = Counter()
    rail_bytes: Counter[int] = Counter()
    cast_segments = sum_segments = to_all = 0
    for op in program.ops:
        if isinstance(op, Copy):
            to_mates[op.peer] += op.src.nbytes
        elif isinstance(op, CopyAll):
            to_all += op.src.nbytes
            to_mates.update({lane: op.src.nbytes for lane in op.lanes if lane != program.rank})
        elif isinstance(op, Put):
            rail_bytes[op.peer] += op.src.nbytes
        elif isinstance(op, Cast):
            cast_segments += len(op.parts)
        elif isinstance(op, Reduce):
            sum_segments += len(op.segments)
            for source in (c for segment in op.segments for s in segment.sources for c in copies_of(s)):
                if isinstance(source, Remote) and source.rank != program.rank:
                    from_mates[source.rank] += source.region.nbytes
    return ProgramShape(
        operations=len(program.ops),
        streams=tuple(program.streams()),
        copies=kinds[Copy] + kinds[Copy2D],
        copies_2d=kinds[Copy2D],
        copy_batches=_batches(program.ops),
        copies_to_all=kinds[CopyAll],
        puts=kinds[Put],
        signals=kinds[Signal],
        waits=kinds[Wait],
        events=kinds[Record] + kinds[After],
        tags=kinds[Post] + kinds[Agree],
        casts=kinds[Cast],
        cast_segments=cast_segments,
        sums=kinds[Reduce],
        sum_segments=sum_segments,
        clears=kinds[Clear],
        bytes_to_mates=dict(sorted(to_mates.items())),
        bytes_to_all=to_all,
        bytes_read_from_mates=dict(sorted(from_mates.items())),
        bytes_on_rail=sum(rail_bytes.values()),
        rail_peers=len(rail_bytes),
        stage_pieces=program.stage_pieces,
        inbox_batches=program.inbox_batches,
    )


def _batches(ops: Sequence[Op]) -> int:
    """Runs of copies, stream by stream: what stands between them on other streams does not part them."""
    batches = 0
    copying: dict[str, bool] = {}
    for op in ops:
        copies = isinstance(op, (Copy, CopyAll))
        batches += copies and not copying.get(op.stream, False)
        copying[op.stream] = copies
    return batches


@dataclass(frozen=True)
class RoundShape:
    """One round of an all-gather on one rank's rail."""

    machines: int
    """Machines whose pieces are put."""
    pieces: int
    puts: int
    """Pieces, and one more where the head's end splits one."""
    head_puts: int
    bytes_put: int
    head_bytes: int


def round_shapes(program: Program, layout: GroupLayout, topology: Topology) -> tuple[RoundShape, ...]:
    """The rounds of an all-gather's program in order; none on one machine. Each round has a peer of its own."""
    used = sum(param.chunk > 0 for param in layout.params)
    shapes = []
    for step in rounds(topology, program.rank):
        puts = [op for op in program.ops if isinstance(op, Put) and op.peer == step.target]
        head = [op for op in puts if op.word.name == "head"]
        shapes.append(
            RoundShape(
                step.count,
                step.count * used,
                len(puts),
                len(head),
                sum(op.src.nbytes for op in puts),
                sum(op.src.nbytes for op in head),
            )
        )
    return tuple(shapes)
