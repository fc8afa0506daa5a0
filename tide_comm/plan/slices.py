"""How a reduce-scatter cuts shards: padded shards, blocks, slices and pieces (design: section "Reduce-scatter").

The padded shard holds a rank's chunks one after another, each starting at a multiple of ALIGN_ELEMENTS, so that kernels read STAGE, PARTIAL
and INBOX with wide loads. OUT is FSDP2's dense layout. Over several machines the padded shard is cut into L blocks of B elements, and slice
s of machine D is block s of each of D's L shards. On one machine a slice is one whole shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.topology import Topology

ALIGN_ELEMENTS = 8
"""16 bytes of bf16."""


def align_elements(count: int) -> int:
    return -(-count // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def padded_elements(layout: GroupLayout, params: Sequence[int] | None = None) -> int:
    """Elements of a padded shard of these parameters (all, unless given)."""
    chosen = range(len(layout.params)) if params is None else params
    return sum(align_elements(layout.params[p].chunk) for p in chosen)


def slice_elements(layout: GroupLayout, topology: Topology, params: Sequence[int] | None = None) -> int:
    """Elements of a slice: what one lane sums for one destination machine."""
    padded = padded_elements(layout, params)
    if topology.machines == 1:
        return padded
    return topology.lanes * align_elements(-(-padded // topology.lanes))


def shard_elements(layout: GroupLayout, params: Sequence[int]) -> int:
    """S: elements of the reduced shard as OUT holds it, padding of chunks included."""
    return sum(layout.params[p].chunk for p in params)


@dataclass(frozen=True)
class StageSpec:
    """The ring in STAGE: `ring` places of (L-1) copies of `piece_bytes` each."""

    piece_bytes: int
    ring: int
    lanes: int

    @property
    def place_bytes(self) -> int:
        return self.piece_bytes * (self.lanes - 1)

    @property
    def total_bytes(self) -> int:
        return self.place_bytes * self.ring


INBOX_SETS = 2
PARTIALS = 2


@dataclass(frozen=True)
class InboxSpec:
    """Inboxes for partial sums from `batch` source machines at a time. Each set has `waves` rows of L seats of `seat_bytes`.

    A seat holds one slice, as wide as the arena's largest in fp32, so that slice s stands at the same address on every lane.
    `multicast`: the switch adds what stands at one address on all lanes, so a batch has one wave at most; raises `ValueError`
    if it has more.
    """

    seat_bytes: int
    batch: int
    lanes: int
    multicast: bool = False

    def __post_init__(self) -> None:
        if self.multicast and self.batch > self.lanes:
            raise ValueError(f"the switch adds one source a lane: {self.lanes} a batch at most; got {self.batch}")

    @property
    def waves(self) -> int:
        return -(-self.batch // self.lanes)

    @property
    def set_bytes(self) -> int:
        return self.waves * self.lanes * self.seat_bytes

    def seat(self, c: int, s: int) -> tuple[int, int]:
        """(batch, byte offset in the set) of slice s from the machine with relative index c."""
        batch, position = divmod(c, self.batch)
        return batch, (position // self.lanes * self.lanes + s) * self.seat_bytes


@dataclass(frozen=True)
class Cut:
    """Elements [start, end) of every rank's chunk of a parameter, `at` elements from the range's start, at element `out` of OUT."""

    param: int
    start: int
    end: int
    at: int
    out: int


@dataclass(frozen=True)
class Cutting:
    """The cuts of one launch. Equal on all ranks: padding is cut like the rest."""

    layout: GroupLayout
    topology: Topology
    params: tuple[int, ...]
    item: int
    """Bytes of a gradient's element."""
    piece_bytes: int
    out_params: tuple[int, ...] = ()
    """The parameters whose shards OUT holds, where they are more than those of this launch; (): the same."""

    @property
    def split(self) -> bool:
        """Whether shards are cut into blocks: over several machines."""
        return self.topology.machines > 1

    @cached_property
    def block(self) -> int:
        """B: elements of a block."""
        return slice_elements(self.layout, self.topology, self.params) // self.rows

    @property
    def rows(self) -> int:
        """Blocks in a slice."""
        return self.topology.lanes if self.split else 1

    @cached_property
    def step(self) -> int:
        """Elements of each of a slice's blocks that one piece takes."""
        most = self.piece_bytes // (self.rows * self.item)
        if most < 1:
            raise ValueError(
                f"{self.layout.name}: a piece of STAGE has {self.piece_bytes} bytes and must take {self.rows} elements of {self.item} bytes"
            )
        return min(max(self.block, 1), most - most % ALIGN_ELEMENTS or most)

    @property
    def pieces(self) -> int:
        """Pieces of a slice; one at least, so that every rank counts alike."""
        return max(1, -(-self.block // self.step))

    def owned(self, lane: int, c: int) -> int:
        """The slice that a lane owns of the machine c after its own: a Latin square over lanes and c."""
        return (lane + c) % self.topology.lanes if self.split else 0

    def targets(self, owner: int, c: int) -> list[int]:
        """The ranks whose blocks make up the slice that `owner` owns of the machine c after its own."""
        if not self.split:
            return [owner]
        return list(self.topology.table[(self.topology.machine_of(owner) + c) % self.topology.machines])

    def piece(self, s: int, i: int) -> list[Cut]:
        """Piece i of slice s: the same cuts of each of its blocks."""
        first = i * self.step
        return self.cuts(s * self.block + first, s * self.block + min(first + self.step, self.block))

    def cuts(self, first: int, last: int) -> list[Cut]:
        """Elements [first, last) of a padded shard, parameter by parameter."""
        return [
            Cut(p, max(first - at, 0), min(last - at, chunk), max(at - first, 0), out + max(first - at, 0))
            for p, at, out, chunk in self._starts
            if chunk and first < at + chunk and at < last
        ]

    @cached_property
    def _starts(self) -> list[tuple[int, int, int, int]]:
        return list(self._walk())

    def _walk(self) -> Iterator[tuple[int, int, int, int]]:
        """(parameter, start in the padded shard, start in OUT, elements)."""
        at = out = 0
        outs = {}
        for p in self.out_params or self.params:
            outs[p] = out
            out += self.layout.params[p].chunk
        for p in self.params:
            chunk = self.layout.params[p].chunk
            yield p, at, outs[p], chunk
            at += align_elements(chunk)


def seat_bytes_of(layouts: Sequence[GroupLayout], topology: Topology) -> int:
    """Bytes of a seat that takes a slice of any of these groups in fp32."""
    return max(slice_elements(layout, topology) for layout in layouts) * ITEM_BYTES["float32"]
