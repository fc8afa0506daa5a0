"""Proves that machines are alike: each machine's programs and demands are machine 0's, moved (`symmetry`).

Programs are compared operation by operation. Two ways of writing the same down are equal: runs of copies on one stream are unordered, and
a generator merges neighbouring pieces into rows as far as they go without wrapping around, which differs from machine to machine. Where
operations differ as written, the bytes that they move are compared one run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tide_comm.plan import demands
from tide_comm.plan.checker import CheckError
from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.memory import Content, Tags
from tide_comm.plan.program import (
    After,
    Agree,
    Area,
    Cast,
    Clear,
    Copy,
    Copy2D,
    CopyAll,
    LaneSum,
    Op,
    Post,
    Program,
    Put,
    Record,
    Reduce,
    Region,
    Remote,
    Signal,
    Wait,
    Word,
    copies_of,
)
from tide_comm.plan.render import op_text
from tide_comm.plan.symmetry import MovedContents, Symmetry
from tide_comm.plan.topology import Topology

COPIES = (Copy, CopyAll)
Movement = tuple
"""One run of elements: (elements, (area, index, owner, moved offset) of each region that takes part)."""


def check_programs(symmetry: Symmetry, group: str, make: Callable[[int], Program], workers: int = 1) -> None:
    """Raises `CheckError` unless the programs of one kind for a group, `make(rank)`, are alike on all machines.

    The work grows with M * M; more than one of `workers` are processes, to which `make` must be picklable.
    """
    shares = [range(first, symmetry.machines, workers) for first in range(1, workers + 1)]
    check = partial(_check_machines, symmetry, group, make)
    if workers == 1:
        check(shares[0])
        return
    with ProcessPoolExecutor(workers) as pool:
        for _ in pool.map(check, shares):
            pass


def _check_machines(symmetry: Symmetry, group: str, make: Callable[[int], Program], machines: range) -> None:
    first = [make(lane) for lane in range(symmetry.lanes)]
    for machine in machines:
        comparison = Comparison(symmetry, group, machine)
        for lane, program in enumerate(first):
            rank = machine * symmetry.lanes + lane
            comparison.programs(program, make(rank), lane, rank)


class Comparison:
    """Compares machine 0's programs with those of another `machine`."""

    def __init__(self, symmetry: Symmetry, group: str, machine: int) -> None:
        self.symmetry, self.group, self.machine = symmetry, group, machine
        self._ranks = [symmetry.rank(rank, machine) for rank in range(symmetry.world)]
        self._compare: dict[type[Op], Callable[..., bool]] = {
            Copy: self._same_copy,
            Copy2D: self._same_copy,
            CopyAll: self._same_copy_to_all,
            Put: self._same_put,
            Signal: self._same_target,
            Wait: self._same_wait,
            Record: self._same_event,
            After: self._same_event,
            Reduce: self._same_sum,
            Clear: lambda one, two: self._same_region(one.dst, two.dst),
            Post: self._same_post,
            Agree: self._same_agree,
        }

    def programs(self, first: Program, other: Program, lane: int, rank: int) -> None:
        where = f"machines are not alike: {other.name}, rank {rank} is not rank {lane} moved by {self.machine} machines"
        head = (other.name, other.rank, other.points, other.stage_pieces, other.inbox_batches)
        if head != (first.name, rank, first.points, first.stage_pieces, first.inbox_batches):
            raise CheckError(f"{where}: names, points or ring positions differ")
        moved = {Word(w.name, self._ranks[w.key], w.slotted): count for w, count in other.arrivals.items()}
        if moved != first.arrivals:
            raise CheckError(f"{where}: arrivals differ")
        at = there = 0
        while at < len(first.ops) and there < len(other.ops):
            one, two = first.ops[at], other.ops[there]
            if self._same(one, two):
                at, there = at + 1, there + 1
                continue
            # Only the whole batch can be compared: what is one copy here may be two there.
            at, there = _batch_start(first.ops, at), _batch_start(other.ops, there)
            end, end_there = _batch_end(first.ops, at), _batch_end(other.ops, there)
            if self._moved_bytes(first.ops[at:end], 0) != self._moved_bytes(other.ops[there:end_there], self.machine):
                raise CheckError(f"{where}: {op_text(one)} against {op_text(two)}")
            at, there = end, end_there
        if at < len(first.ops) or there < len(other.ops):
            raise CheckError(f"{where}: {len(first.ops)} operations against {len(other.ops)}")

    # As written

    def _same(self, one: Op, two: Op) -> bool:
        """Whether the operations are equal as written, the second one moved. False is no verdict yet for copies and kernels."""
        kind = type(one)
        if kind is not type(two) or one.stream != two.stream:
            return False
        compare = self._compare.get(kind)
        return compare(one, two) if compare is not None else False

    def _same_target(self, one: Put | Signal, two: Put | Signal) -> bool:
        return one.peer == self._ranks[two.peer] and self._same_word(one.word, two.word)

    def _same_word(self, one: Word, two: Word) -> bool:
        return one.key == self._ranks[two.key] and one.name == two.name and one.slotted == two.slotted

    def _same_copy(self, one: Copy, two: Copy) -> bool:
        return (
            one.peer == self._ranks[two.peer]
            and self._same_region(one.src, two.src)
            and (self._same_region(one.dst, two.dst))
        )

    def _same_copy_to_all(self, one: CopyAll, two: CopyAll) -> bool:
        lanes = tuple(self._ranks[lane] for lane in two.lanes)
        return one.lanes == lanes and self._same_region(one.src, two.src) and self._same_region(one.dst, two.dst)

    def _same_put(self, one: Put, two: Put) -> bool:
        return (
            self._same_target(one, two)
            and self._same_region(one.src, two.src)
            and (self._same_region(one.dst, two.dst))
        )

    def _same_wait(self, one: Wait, two: Wait) -> bool:
        return one.count == two.count and self._same_word(one.word, two.word)

    def _same_post(self, one: Post, two: Post) -> bool:
        return one.index == two.index and one.peer == self._ranks[two.peer]

    def _same_agree(self, one: Agree, two: Agree) -> bool:
        return one.index == two.index and one.peers == tuple(self._ranks[peer] for peer in two.peers)

    @staticmethod
    def _same_event(one: Record | After, two: Record | After) -> bool:
        return one.event is two.event or one.event == two.event

    def _same_sum(self, one: Reduce, two: Reduce) -> bool:
        if _kernel(one) != _kernel(two) or len(one.segments) != len(two.segments):
            return False
        for a, b in zip(one.segments, two.segments, strict=True):
            if len(a.sources) != len(b.sources) or not self._same_region(a.dst, b.dst):
                return False
            for x, y in zip(a.sources, b.sources, strict=True):
                if isinstance(x, Remote) and isinstance(y, Remote):
                    if x.rank != self._ranks[y.rank]:
                        return False
                    x, y = x.region, y.region
                if isinstance(x, LaneSum) and isinstance(y, LaneSum):
                    if x.ranks != tuple(self._ranks[rank] for rank in y.ranks):
                        return False
                    x, y = x.region, y.region
                if not isinstance(x, Region) or not isinstance(y, Region) or not self._same_region(x, y):
                    return False
        return True

    def _same_region(self, one: Region, two: Region) -> bool:
        """Whether the second region moves in one piece to where the first is."""
        area = one.area
        if area is not two.area or one.row_bytes != two.row_bytes or one.rows != two.rows:
            return False
        if one.pitch != two.pitch or one.index != two.index:
            return False
        if area is not Area.SLOT and area is not Area.GRAD:
            return one.offset == two.offset
        return one.offset == self.symmetry.moved_offset(two, self.group, self.machine)

    # By the bytes that are moved

    def _moved_bytes(self, ops: Sequence[Op], machine: int) -> tuple:
        """What one operation or one batch of copies does, written in one way only."""
        moved: list[tuple] = []
        for op in ops:
            if isinstance(op, Copy):
                target = self.symmetry.rank(op.peer, machine)
                runs = self._movements([op.src, (target, op.dst)], [1, 1], machine)
                moved += [("copy", op.stream, target, *run) for run in runs]
            elif isinstance(op, CopyAll):
                lanes = tuple(self.symmetry.rank(lane, machine) for lane in op.lanes)
                moved += [
                    ("copy to all", op.stream, lanes, *run)
                    for run in self._movements([op.src, op.dst], [1, 1], machine)
                ]
            elif isinstance(op, Put):
                word = Word(op.word.name, self.symmetry.rank(op.word.key, machine), op.word.slotted)
                target = self.symmetry.rank(op.peer, machine)
                runs = self._movements([op.src, (target, op.dst)], [1, 1], machine)
                moved.append(("put", op.stream, target, repr(word), *sorted(runs)))
            elif isinstance(op, Cast):
                runs = [
                    (part.src_dtype, part.dst_dtype, *run)
                    for part in op.parts
                    for run in self._movements(
                        [part.src, part.dst], [ITEM_BYTES[part.src_dtype], ITEM_BYTES[part.dst_dtype]], machine
                    )
                ]
                moved.append(("cast", op.stream, *sorted(runs)))
            elif isinstance(op, Reduce):
                runs = []
                for segment in op.segments:
                    copies = [copy for source in segment.sources for copy in copies_of(source)]
                    items = [ITEM_BYTES[op.src_dtype]] * len(copies) + [ITEM_BYTES[op.dst_dtype]]
                    sides = [self._side(copy, machine) for copy in copies]
                    runs += self._movements([*sides, segment.dst], items, machine)
                moved.append(("reduce", op.stream, _kernel(op), *sorted(runs)))
            elif machine:  # equal as written or not at all
                moved.append(("other", op_text(op), machine))
            else:
                moved.append(("other", op_text(op)))
        return tuple(sorted(moved))

    def _side(self, source: Region | Remote, machine: int) -> Region | tuple[int, Region]:
        if isinstance(source, Remote):
            return self.symmetry.rank(source.rank, machine), source.region
        return source

    def _movements(
        self, sides: Sequence[Region | tuple[int, Region]], items: Sequence[int], machine: int
    ) -> list[Movement]:
        """The sides' elements side by side, cut wherever one of them is. A side may name the rank that owns it."""
        named = [side if isinstance(side, tuple) else (-1, side) for side in sides]
        # In eighths of an element, so that a region that cuts one stays exact.
        left = [
            [
                [start, (end - start) * 8 // item]
                for start, end in self.symmetry.spans(region, self.group, machine)
                if start < end
            ]
            for (_, region), item in zip(named, items, strict=True)
        ]
        runs: list[Movement] = []
        at = [0] * len(left)
        while all(k < len(spans) for k, spans in zip(at, left, strict=True)):
            heads = [spans[k] for k, spans in zip(at, left, strict=True)]
            step = min(size for _, size in heads)
            places = [
                (region.area.value, region.index, owner, start)
                for (owner, region), (start, _) in zip(named, heads, strict=True)
            ]
            runs.append((step, *places))
            for number, (head, item) in enumerate(zip(heads, items, strict=True)):
                head[0] += step * item // 8
                head[1] -= step
                at[number] += not head[1]
        if any(k < len(spans) for k, spans in zip(at, left, strict=True)):
            runs.append((-1, *((region.area.value, region.nbytes) for _, region in named)))
        return runs


def _kernel(op: Reduce) -> tuple:
    switched = any(isinstance(source, LaneSum) for segment in op.segments for source in segment.sources)
    return (op.src_dtype, op.dst_dtype, op.scaled, op.carry, op.blocks, switched)


def _batch_start(ops: Sequence[Op], at: int) -> int:
    if isinstance(ops[at], COPIES):
        while at and isinstance(ops[at - 1], COPIES) and ops[at - 1].stream == ops[at].stream:
            at -= 1
    return at


def _batch_end(ops: Sequence[Op], at: int) -> int:
    """Behind the operation, or behind the last copy of its batch."""
    end = at + 1
    if isinstance(ops[at], COPIES):
        while end < len(ops) and isinstance(ops[end], COPIES) and ops[end].stream == ops[at].stream:
            end += 1
    return end


def check_demands(
    symmetry: Symmetry,
    layout: GroupLayout,
    topology: Topology,
    reduce_dtype: str,
    machines: Sequence[int],
    unordered: bool = False,
) -> None:
    """Raises `CheckError` unless what is demanded of a slot moves into itself, and OUT's demands on those `machines` into machine 0's.

    Every renumbering is one machine's, repeated, so for slots that one decides.
    """
    params = list(range(len(layout.params)))
    tags = Tags()
    contents = MovedContents(symmetry, tags)

    def moved(wants: list[tuple[Region, Content]], by: int) -> set[tuple]:
        found = set()
        for region, content in wants:
            piece = (region.nbytes, tags.intern(content.tag), content.element, content.item)
            at = next(iter(symmetry.spans(region, layout.name, by)))[0]
            for nbytes, tag, element, item in contents.pieces([piece], by) if by else [piece]:
                found.add((region.area, at, nbytes, tag, element, item))
                at += nbytes
        return found

    slot = demands.unsharded(layout, 0)
    if symmetry.machines > 1 and moved(slot, 1) != moved(slot, 0):
        raise CheckError(f"machines are not alike: what is demanded of {layout.name}'s slot does not move into itself")
    for lane in range(symmetry.lanes):
        here = moved(demands.reduced(layout, topology, lane, params, reduce_dtype, 0, unordered), 0)
        for machine in machines:
            rank = machine * symmetry.lanes + lane
            there = demands.reduced(layout, topology, rank, params, reduce_dtype, 0, unordered)
            if moved(there, machine) != here:
                raise CheckError(f"machines are not alike: {layout.name}'s sums of rank {rank} are not rank {lane}'s")
