"""Where every byte of a group belongs.

FSDP2 keeps parameter p as one contiguous tensor. Each of W ranks holds a chunk of C_p bytes (padded to the first rank's size). In a slot,
parameter p starts at off_p and rank r's piece belongs at off_p + r*C_p. The seed's example: pieces of 2, 1 and 3 MB on 4 GPUs; GPU 1's
piece of the second parameter belongs at 2*4 + 1*1 = 9 MB, where a buffer ordered by rank would have it at 1*6 + 2 = 8 MB.

A parameter sharded on a dimension i > 0 is `outer` rows of `inner` bytes; rank r's piece is the r-th column block of each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.program import Area, Region

ALIGN_BYTES = 512
"""Alignment of parameters in a slot and of chunks in SHARD: that of PyTorch's allocators, so that GEMMs pick the same kernels."""


def align(nbytes: int, to: int = ALIGN_BYTES) -> int:
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class ParamLayout:
    """One parameter: `shape` is what FSDP shards (TP-local), `dim` the sharded dimension.

    `param_dtype` is that of the sharded parameter, `comm_dtype` the one that the all-gather moves.
    """

    name: str
    shape: tuple[int, ...]
    param_dtype: str
    comm_dtype: str
    world: int
    dim: int = 0

    def __post_init__(self) -> None:
        if self.dim and self.shape[self.dim] % self.world:
            raise ValueError(
                f"{self.name}: dimension {self.dim} of {self.shape} must be a multiple of {self.world} ranks to be sharded there"
            )

    @cached_property
    def outer(self) -> int:
        """Rows of a piece: 1 for Shard(0)."""
        return math.prod(self.shape[: self.dim])

    @cached_property
    def inner(self) -> int:
        """Elements that one index of the sharded dimension covers."""
        return math.prod(self.shape[self.dim + 1 :])

    @cached_property
    def chunk_dim(self) -> int:
        """Size of the sharded dimension in a padded chunk: ceil(size / world)."""
        return -(-self.shape[self.dim] // self.world) if self.shape else 1

    @cached_property
    def row(self) -> int:
        """Elements of a piece in one row."""
        return self.chunk_dim * self.inner

    @cached_property
    def chunk(self) -> int:
        """Elements of a padded chunk (C_p / itemsize)."""
        return self.outer * self.row

    def valid(self, rank: int) -> int:
        """Elements of rank's chunk that are not padding."""
        if self.dim:
            return self.chunk
        size = self.shape[0] if self.shape else 1
        return max(0, min(self.chunk_dim, size - rank * self.chunk_dim)) * self.inner

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def slot_bytes(self) -> int:
        return self.world * self.chunk * ITEM_BYTES[self.comm_dtype]

    @property
    def in_shard(self) -> bool:
        """Whether the shard itself can live in the arena, because its dtype is the one that is communicated."""
        return self.param_dtype == self.comm_dtype

    def _regions(self, area: Area, base: int, rank: int, start: int, end: int, item: int, index: int) -> list[Region]:
        """Elements [start, end) of rank's chunk, where the parameter stands whole from byte `base` (strides of the full tensor).

        Full rows are one strided region; a start or end inside a row adds at most one region each.
        """
        regions: list[Region] = []
        pitch = self.world * self.row * item

        def add(first: int, rows: int, column: int, width: int) -> None:
            if rows > 0 and width > 0:
                offset = base + first * pitch + (rank * self.row + column) * item
                strided = rows > 1
                regions.append(
                    Region(area, offset, width * item, rows if strided else 1, pitch if strided else 0, index)
                )

        if end <= start:
            return []
        first_row, first_col = divmod(start, self.row)
        last_row, last_col = divmod(end, self.row)
        if first_row == last_row:
            add(first_row, 1, first_col, last_col - first_col)
            return regions
        if first_col:
            add(first_row, 1, first_col, self.row - first_col)
            first_row += 1
        add(first_row, last_row - first_row, 0, self.row)
        add(last_row, 1, 0, last_col)
        return regions


@dataclass(frozen=True)
class GroupLayout:
    """All parameters of one FSDP parameter group over `world` ranks."""

    name: str
    params: tuple[ParamLayout, ...]
    world: int

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], Region]:
        """`piece` by parameter and rank: every rank's program names them all."""
        return {}

    @cached_property
    def _gradients(self) -> dict[tuple[int, int, int, int, str], tuple[Region, ...]]:
        return {}

    @cached_property
    def slot_offsets(self) -> tuple[int, ...]:
        """off_p, in bytes."""
        return self._stack([p.slot_bytes for p in self.params])[0]

    @cached_property
    def slot_bytes(self) -> int:
        return self._stack([p.slot_bytes for p in self.params])[1]

    @cached_property
    def shard_offsets(self) -> tuple[int, ...]:
        """Where each chunk starts in SHARD, from the group's base; parameters that are cast take no room."""
        return self._stack([self._shard_bytes_of(p) for p in self.params])[0]

    @cached_property
    def shard_bytes(self) -> int:
        return self._stack([self._shard_bytes_of(p) for p in self.params])[1]

    @staticmethod
    def _shard_bytes_of(param: ParamLayout) -> int:
        return param.chunk * ITEM_BYTES[param.comm_dtype] if param.in_shard else 0

    @staticmethod
    def _stack(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
        offsets, at = [], 0
        for size in sizes:
            offsets.append(at)
            at = align(at + size)
        return tuple(offsets), at

    @property
    def bytes_unsharded(self) -> int:
        """Bytes of the unsharded parameters without any padding, in the communicated dtype."""
        return sum(p.numel * ITEM_BYTES[p.comm_dtype] for p in self.params)

    @property
    def padding_bytes(self) -> int:
        """What a slot holds beyond that: padded chunks and alignment."""
        return self.slot_bytes - self.bytes_unsharded

    def piece(self, index: int, rank: int) -> Region:
        """Final address of rank's piece of parameter `index` in a slot."""
        found = self._pieces.get((index, rank))
        if found is None:
            param = self.params[index]
            item = ITEM_BYTES[param.comm_dtype]
            if param.chunk == 0:
                return Region(Area.SLOT, self.slot_offsets[index], 0)
            (found,) = param._regions(Area.SLOT, self.slot_offsets[index], rank, 0, param.chunk, item, 0)
            self._pieces[index, rank] = found
        return found

    def shard(self, index: int, base: int) -> Region:
        """This rank's chunk of parameter `index` in SHARD, in rows as `piece` has them; `base` is where the group's shards start."""
        param = self.params[index]
        item = ITEM_BYTES[param.comm_dtype]
        return self._rows(Area.SHARD, base + self.shard_offsets[index], param, item, 0)

    def master(self, index: int) -> Region:
        """This rank's chunk of parameter `index` in the optimizer's own memory and dtype."""
        param = self.params[index]
        return self._rows(Area.PARAM, 0, param, ITEM_BYTES[param.param_dtype], index)

    @staticmethod
    def _rows(area: Area, offset: int, param: ParamLayout, item: int, index: int) -> Region:
        row_bytes = param.row * item
        strided = param.outer > 1
        return Region(area, offset, row_bytes, param.outer if strided else 1, row_bytes if strided else 0, index)

    def gradient(self, index: int, rank: int, start: int, end: int, dtype: str) -> list[Region]:
        """Elements [start, end) of rank's chunk in the unsharded gradient of parameter `index` (contiguous, no padding)."""
        key = (index, rank, start, end, dtype)
        found = self._gradients.get(key)
        if found is None:
            param = self.params[index]
            last = min(end, param.valid(rank))
            found = tuple(param._regions(Area.GRAD, 0, rank, start, last, ITEM_BYTES[dtype], index))
            self._gradients[key] = found
        return list(found)

    def gradient_in_slot(self, index: int, rank: int, start: int, end: int) -> list[Region]:
        """The same where the gradient was copied into the vacated slot (Slot-Reuse)."""
        param = self.params[index]
        end = min(end, param.valid(rank))
        return param._regions(Area.SLOT, self.slot_offsets[index], rank, start, end, ITEM_BYTES[param.comm_dtype], 0)
