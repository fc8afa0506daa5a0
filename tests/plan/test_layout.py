"""Final addresses, against the formulas and against what PyTorch itself does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import ALIGN_BYTES, GroupLayout, ParamLayout
from tide_comm.plan.program import Area, Region

MB = 1 << 20


def test_the_seeds_example() -> None:
    """Pieces of 2, 1 and 3 MB on 4 GPUs: GPU 1's piece of the second parameter goes to 9 MB; ordered by rank it would be at 8."""
    pieces_mb = (2, 1, 3)
    params = tuple(
        ParamLayout(f"p{i}", (4 * mb * MB // 2,), "bfloat16", "bfloat16", 4) for i, mb in enumerate(pieces_mb)
    )
    layout = GroupLayout("seed", params, 4)
    assert layout.piece(1, 1) == Region(Area.SLOT, 9 * MB, 1 * MB)
    assert 1 * sum(pieces_mb) + pieces_mb[0] == 8
    assert [layout.piece(p, 3).offset // MB for p in range(3)] == [6, 11, 21]
    assert layout.slot_bytes == 24 * MB
    assert layout.padding_bytes == 0


def test_nothing_is_padded_inside_a_parameter() -> None:
    param = ParamLayout("norm", (128,), "bfloat16", "bfloat16", 64)
    layout = GroupLayout("qwen", (ParamLayout("w", (64, 3), "bfloat16", "bfloat16", 64), param), 64)
    assert [layout.piece(1, r).offset - layout.slot_offsets[1] for r in range(64)] == [4 * r for r in range(64)]
    assert all(offset % ALIGN_BYTES == 0 for offset in layout.slot_offsets + layout.shard_offsets)


def test_uneven_and_empty_shards() -> None:
    param = ParamLayout("w", (5, 3), "float32", "bfloat16", 4)
    assert (param.chunk_dim, param.chunk) == (2, 6)
    assert [param.valid(rank) for rank in range(4)] == [6, 6, 3, 0]
    layout = GroupLayout("g", (param,), 4)
    assert layout.gradient(0, 2, 0, 6, "bfloat16") == [Region(Area.GRAD, 24, 6)]
    assert layout.gradient(0, 3, 0, 6, "bfloat16") == []


def test_scalars_and_parameters_without_elements() -> None:
    scalar, empty = (ParamLayout(n, s, "float32", "float32", 2) for n, s in (("s", ()), ("e", (0, 4))))
    assert (scalar.chunk, scalar.valid(0), scalar.valid(1)) == (1, 1, 0)
    assert (empty.chunk, empty.valid(0)) == (0, 0)
    layout = GroupLayout("g", (scalar, empty), 2)
    assert layout.piece(1, 1).nbytes == 0


def test_only_parameters_of_equal_dtypes_take_room_in_shard() -> None:
    params = tuple(ParamLayout(n, (8,), d, "bfloat16", 2) for n, d in (("a", "float32"), ("b", "bfloat16")))
    layout = GroupLayout("g", params, 2)
    assert layout.shard_bytes == ALIGN_BYTES
    assert layout.shard(1, 1024) == Region(Area.SHARD, 1024, 8)


def test_a_dimension_beyond_the_first_must_divide() -> None:
    with pytest.raises(ValueError, match="multiple of 4 ranks"):
        ParamLayout("w", (3, 6), "float32", "float32", 4, dim=1)


def indices(region: Region, item: int) -> list[int]:
    return [at // item for start, end in region.spans() for at in range(start, end, item)]


@st.composite
def sharded(draw: st.DrawFn) -> ParamLayout:
    world = draw(st.integers(1, 5))
    dims = draw(st.integers(1, 3))
    dim = draw(st.integers(0, dims - 1))
    shape = [draw(st.integers(0 if i == dim == 0 else 1, 6)) for i in range(dims)]
    if dim:
        shape[dim] = world * draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    return ParamLayout("p", tuple(shape), dtype, "bfloat16", world, dim)


@settings(max_examples=60, deadline=None)
@given(sharded(), st.data())
def test_pieces_are_what_torch_chunk_gives(param: ParamLayout, data: st.DataObject) -> None:
    """A piece's elements are those of rank's `torch.chunk`, in its order, at the strides of the whole tensor."""
    layout = GroupLayout("g", (param,), param.world)
    whole = torch.arange(param.numel).reshape(param.shape)
    chunks = list(torch.chunk(whole, param.world, param.dim)) if whole.numel() else []
    item = ITEM_BYTES["bfloat16"]
    seen: list[int] = []
    for rank in range(param.world):
        own = chunks[rank].flatten().tolist() if rank < len(chunks) else []
        assert param.valid(rank) == len(own)
        piece = indices(layout.piece(0, rank), item)
        seen += piece
        assert piece[: len(own)] == own
        start = data.draw(st.integers(0, param.chunk))
        end = data.draw(st.integers(start, param.chunk))
        cut = [i for region in layout.gradient(0, rank, start, end, "bfloat16") for i in indices(region, item)]
        assert cut == own[start:end]
    assert sorted(seen) == list(range(param.world * param.chunk))
    assert layout.slot_bytes >= param.slot_bytes == param.world * math.prod((param.chunk,)) * item
