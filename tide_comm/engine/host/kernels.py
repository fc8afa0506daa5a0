"""What moves and adds bytes on the CPU, by address. PyTorch does the arithmetic, so that rounding is the stock one's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.program import Part, Reduce, Region

_CPU = torch.device("cpu")


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def storage_at(address: int, nbytes: int) -> torch.UntypedStorage:
    """A storage over foreign memory that does not own it."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, _CPU, nbytes)
    return storage


def tensor_at(address: int, region: Region, dtype: str) -> torch.Tensor:
    """The region as a tensor of `dtype`: (rows, elements a row)."""
    item = ITEM_BYTES[dtype]
    width, pitch = region.row_bytes // item, (region.pitch if region.rows > 1 else region.row_bytes) // item
    storage = storage_at(address, ((region.rows - 1) * pitch + width) * item)
    return torch.empty(0, dtype=torch_dtype(dtype)).set_(storage, 0, (region.rows, width), (pitch, 1))


def _contiguous(region: Region) -> bool:
    return region.rows == 1 or region.pitch == region.row_bytes


def copy(src_address: int, src: Region, dst_address: int, dst: Region) -> None:
    """Bytes as they are; rows where either side has rows."""
    if _contiguous(src) and _contiguous(dst):
        ctypes.memmove(dst_address, src_address, src.nbytes)
        return
    rows = max(src.rows, dst.rows)
    width = src.nbytes // rows
    src_rows = src if src.rows == rows else Region(src.area, src.offset, width, rows, width)
    dst_rows = dst if dst.rows == rows else Region(dst.area, dst.offset, width, rows, width)
    tensor_at(dst_address, dst_rows, "uint8").copy_(tensor_at(src_address, src_rows, "uint8"))


def dense(region: Region) -> Region:
    """The same rows without the gaps between them, from byte 0."""
    return Region(region.area, 0, region.row_bytes, region.rows, region.row_bytes if region.rows > 1 else 0)


def taken(address: int, region: Region) -> torch.Tensor:
    """A dense copy of a region's bytes."""
    copied = torch.empty(region.nbytes, dtype=torch.uint8)
    copy(address, region, copied.data_ptr(), dense(region))
    return copied


@torch.no_grad()
def cast(src_address: int, dst_address: int, part: Part) -> None:
    """One part of a Cast: as FSDP2's own cast, round to nearest even."""
    if part.src_dtype == part.dst_dtype:
        copy(src_address, part.src, dst_address, part.dst)
    else:
        src = tensor_at(src_address, part.src, part.src_dtype)
        tensor_at(dst_address, part.dst, part.dst_dtype).copy_(src)


@torch.no_grad()
def reduce(sources: Sequence[tuple[int, Region]], dst_address: int, dst: Region, op: Reduce, scale: float) -> None:
    """One segment of a Reduce: fp32 from left to right, then one multiply by the fp32 scale, then rounding to the destination's dtype."""
    total = tensor_at(dst_address, dst, op.dst_dtype).to(torch.float32, copy=True) if op.carry else None
    for address, region in sources:
        term = tensor_at(address, region, op.src_dtype)
        if total is None:
            total = term.to(torch.float32, copy=True)
        else:
            total.add_(term.to(torch.float32).reshape(total.shape))
    assert total is not None
    if op.scaled and scale != 1.0:
        total.mul_(scale)
    tensor_at(dst_address, dst, op.dst_dtype).copy_(total.view(dst.rows, -1))


def clear(address: int, region: Region) -> None:
    """Zeros, row by row."""
    for start, end in region.spans():
        ctypes.memset(address + start - region.offset, 0, end - start)


def fill_nan(address: int, nbytes: int) -> None:
    """All ones: NaN in bf16, fp16, fp32 and fp64."""
    ctypes.memset(address, 0xFF, nbytes)
