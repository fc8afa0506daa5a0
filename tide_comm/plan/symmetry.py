"""What the machines' being alike means: how ranks, words, addresses and contents move when machines are renumbered.

Machine k's programs are to be machine 0's with everything k machines further on: ranks and the words named by them, and addresses in SLOT
and GRAD, which have a place for each rank. All other addresses are a rank's own and stay. Moving **by** k machines here means to look at
machine k as if it were machine 0: rank r becomes r - k*L (mod W).

The checker can then run the L ranks of machine 0 alone (`symmetric` in `check_training`): what one of them sends to machine d is what
its like on machine -d sends here, so the checker delivers that image. `alike` proves first that the programs allow it.

A slot's bytes move differently for each group that uses it, so such runs order all uses of a slot by one group with all by another
(`memory.Tenants`): they may refuse what the checker of all ranks accepts, never the reverse.

Ranks must run machine by machine, and all chunks must be full: padding lies at the last ranks, so with it machines are not alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.memory import AROUND, SUMS, Piece, RaceError, Tags, cut_piece
from tide_comm.plan.program import Area, Region, WordKey
from tide_comm.plan.topology import Topology


class SymmetryError(ValueError):
    """A topology or a layout in which machines are not alike."""


Cells = tuple[int, int, int]
"""Where pieces of ranks stand one after another: first byte, bytes of a piece's row, number of rows of all ranks."""


class Symmetry:
    """The renumbering of machines for some groups. Raises `SymmetryError` where machines cannot be alike."""

    def __init__(self, layouts: Sequence[GroupLayout], topology: Topology, grad_dtype: str) -> None:
        if topology != Topology.regular(topology.machines, topology.lanes):
            raise SymmetryError("machines are alike only where ranks run machine by machine")
        self.lanes, self.machines, self.world = topology.lanes, topology.machines, topology.world
        self.grad_dtype = grad_dtype
        self.layouts = {layout.name: layout for layout in layouts}
        for layout in layouts:
            for param in layout.params:
                if any(param.valid(rank) != param.chunk for rank in (0, self.world - 1)):
                    raise SymmetryError(
                        f"{layout.name}.{param.name}: {param.shape} leaves padding on {self.world} ranks, so machines are not alike"
                    )
        self._slot_cells = {layout.name: self._cells_of_slot(layout) for layout in layouts}
        self._grad_cells = {layout.name: self._cells_of_grads(layout) for layout in layouts}

    def _cells_of_slot(self, layout: GroupLayout) -> tuple[list[int], list[Cells]]:
        cells = [
            (layout.slot_offsets[p], param.row * ITEM_BYTES[param.comm_dtype], param.outer * self.world)
            for p, param in enumerate(layout.params)
            if param.chunk
        ]
        return [start for start, _, _ in cells], cells

    def _cells_of_grads(self, layout: GroupLayout) -> list[Cells]:
        return [(0, param.row * ITEM_BYTES[self.grad_dtype], param.outer * self.world) for param in layout.params]

    def rank(self, rank: int, machines: int) -> int:
        return (rank - machines * self.lanes) % self.world

    def word(self, key: WordKey, machines: int) -> WordKey:
        return (key[0], self.rank(key[1], machines), key[2])

    # Addresses

    def cells(self, region: Region, group: str, at: int) -> Cells | None:
        """The cells that byte `at` of the region's area belongs to; None where addresses do not move."""
        if region.area is Area.SLOT:
            starts, cells = self._slot_cells[group]
            number = bisect_right(starts, at) - 1
            found = cells[number] if number >= 0 else None
        elif region.area is Area.GRAD:
            grads = self._grad_cells[group]
            found = grads[region.index] if 0 <= region.index < len(grads) else None
        else:
            return None
        return found if found and 0 <= at - found[0] < found[1] * found[2] else None

    def spans(self, region: Region, group: str, machines: int) -> Iterator[tuple[int, int]]:
        """The region's spans, cut where the pieces of different ranks meet, and moved. Bytes between parameters stay."""
        for at, end in region.spans():
            while at < end:
                cells = self.cells(region, group, at)
                if cells is None:
                    stop = min(end, self._next_cells(region, group, at, end))
                    yield at, stop
                    at = stop
                    continue
                start, size, _ = cells
                number, within = divmod(at - start, size)
                stop = min(end, at + size - within)
                moved = start + self.cell(number, machines) * size + within
                yield moved, moved + stop - at
                at = stop

    def _next_cells(self, region: Region, group: str, at: int, end: int) -> int:
        """Where the next bytes that move begin, if before `end`."""
        if region.area is not Area.SLOT:
            return end if at >= 0 or region.area is not Area.GRAD else min(0, end)
        starts, _ = self._slot_cells[group]
        following = bisect_right(starts, at)
        return starts[following] if following < len(starts) else end

    def cell(self, number: int, machines: int) -> int:
        """Where the number-th piece's row of a whole tensor moves to."""
        row, rank = divmod(number, self.world)
        return row * self.world + (rank - machines * self.lanes) % self.world

    def moved_offset(self, region: Region, group: str, machines: int) -> int | None:
        """The region's first byte when it moves in one piece; None if it does not."""
        cells = self.cells(region, group, region.offset)
        if cells is None:
            return region.offset if region.area not in (Area.SLOT, Area.GRAD) else None
        start, size, count = cells
        number, within = divmod(region.offset - start, size)
        if within + region.row_bytes > size:
            return None
        row, rank = divmod(number, self.world)
        by = (rank - machines * self.lanes) % self.world - rank
        if region.rows > 1:
            # Rows that go up rank by rank wrap around once at most, and rows at whole rows of ranks never: the ends decide.
            last = number + (within + (region.rows - 1) * region.pitch) // size
            if last >= count or self.cell(last, machines) - last != by:
                return None
            by_rank = last // self.world == row and region.pitch % size == 0
            if not by_rank and region.pitch % (size * self.world):
                return None
        return region.offset + by * size


class MovedContents:
    """Contents as they are after a renumbering of machines; `tags` numbers them."""

    def __init__(self, symmetry: Symmetry, tags: Tags) -> None:
        self._symmetry = symmetry
        self._tags = tags
        self._moved: dict[tuple[int, int], int] = {}
        self._row: dict[int, int] = {}
        """By tag: elements that a rank has in a row of the whole tensor; 0: elements do not move."""

    def pieces(self, pieces: Sequence[Piece], machines: int) -> list[Piece]:
        """Moved, and cut where elements of different ranks meet."""
        moved: list[Piece] = []
        for piece in pieces:
            tag = self._tag(piece[1], machines)
            row = self._row[piece[1]]
            left: Piece | None = piece
            while left is not None:
                nbytes, _, element, item = left
                if not row:
                    moved.append((nbytes, tag, element, item))
                    break
                number, within = divmod(element, row)
                room = (row - within) * item
                moved.append((min(nbytes, room), tag, self._symmetry.cell(number, machines) * row + within, item))
                left = cut_piece(left, room) if nbytes > room else None
        return moved

    def _tag(self, tag: int, machines: int) -> int:
        found = self._moved.get((tag, machines))
        if found is not None:
            return found
        flat = self._tags.flat[tag]
        moved, row = flat, 0
        if flat[0] in ("param", "grad"):
            kind, group, rank, param, version = flat
            moved = (kind, group, self._symmetry.rank(rank, machines), param, version)
            row = self._symmetry.layouts[group].params[param].row if kind == "grad" else 0
        elif flat[0] in AROUND:
            moved = (flat[0], self._tag(flat[1], machines))
            row = self._row[flat[1]]
        elif flat[0] in SUMS:
            terms = [(self._tag(term, machines), offset) for term, offset in flat[1]]
            moved = (flat[0], tuple(terms if flat[0] == "sum" else sorted(terms)))
            rows = {self._row[term] for term, _ in flat[1]}
            if len(rows) != 1 or any(offset for _, offset in flat[1]):
                raise RaceError(f"a sum of elements that do not belong together: {self._tags.written_out(tag)}")
            (row,) = rows
        found = self._moved[tag, machines] = self._tags.number(moved)
        self._row[tag] = row
        return found
