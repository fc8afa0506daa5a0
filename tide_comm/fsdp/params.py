"""Parameters and the arena's memory: unsharded parameters bound to a slot, shards moved into SHARD.

FSDP2 gives every unsharded parameter one StorageImpl for life, which autograd's saved views share, and resizes it to
free it. Here that storage has no bytes of its own: `_swap_data_ptr_` lets it look at a window of the slot for the
time of use, and at nothing after it. So a use after the free meets FSDP2's own error, and views saved in forward see
the slot that backward gathers into. Shards move in the same way, so that whoever holds a view of one keeps seeing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, free_storage
from torch.distributed.tensor import DTensor

from tide_comm.plan.program import Area

if TYPE_CHECKING:
    from tide_comm.fsdp.group import TideGroup


class TideParam(FSDPParam):
    """An FSDPParam whose unsharded data may be a window of a slot. Instances are FSDPParams whose class was changed."""

    tide: TideGroup
    tide_index: int
    tide_bound: bool

    def free_unsharded_param(self) -> None:
        if not self.tide_bound:
            super().free_unsharded_param()
            return
        # The partner must be resizable: the swap carries that property along.
        _swap(self.all_gather_outputs[0], torch.UntypedStorage(0, device=self.device))
        self.tide_bound = False
        self.tide.on_param_freed()


def _swap(output: torch.Tensor, storage: torch.UntypedStorage) -> None:
    cast(Any, output.untyped_storage())._swap_data_ptr_(storage)


def adopt(param: FSDPParam, group: TideGroup, index: int) -> TideParam:
    """Make `param` a TideParam of `group`."""
    param.__class__ = TideParam
    ours = cast(TideParam, param)
    ours.tide, ours.tide_index, ours.tide_bound = group, index, False
    return ours


def release(param: TideParam) -> None:
    """Back to a plain FSDPParam."""
    param.__class__ = FSDPParam  # type: ignore[assignment]
    del param.tide, param.tide_index, param.tide_bound


def bind_to_slot(param: TideParam, window: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Let the unsharded parameter look at `window`, exactly its padded bytes in the slot."""
    if not param.all_gather_outputs:
        output = torch.empty(window.nbytes() // dtype.itemsize, dtype=dtype, device=param.device)
        free_storage(output)
        param.all_gather_outputs = [output]
    _swap(param.all_gather_outputs[0], window)
    param.tide_bound = True


@torch.no_grad()
def move_shard(param: TideParam, storage: torch.UntypedStorage) -> bool:
    """Let the sharded parameter live in `storage`, exactly its padded chunk; False if it does already.

    FSDP2 re-makes its reference after `load_state_dict(assign=True)` and `_apply`, so this is asked at each all-gather.
    """
    data = param._sharded_param_data
    if data.numel() == 0 or data.data_ptr() == storage.data_ptr():
        return False
    flat = torch.empty(0, dtype=data.dtype, device=data.device).set_(storage, 0, data.shape, (1,))
    flat.copy_(data)
    if _owns_storage(param):
        _swap(data, storage)
    else:
        _point_at(param, flat)
    return True


@torch.no_grad()
def move_shard_out(param: TideParam) -> None:
    """Give the sharded parameter private memory again."""
    data = param._sharded_param_data
    private = data.clone()
    if _owns_storage(param):
        _swap(data, private.untyped_storage())
    else:
        _point_at(param, private)


def _owns_storage(param: TideParam) -> bool:
    """Whether the sharded parameter's storage holds its padded chunk and nothing else.

    Then the storage itself moves, and with it everything that looks at it: a state dict taken before (TorchTitan's checkpoints keep one for
    the whole run), detached views. Otherwise (a piece of a larger buffer) only FSDP2's own references can be made to look elsewhere.
    """
    data = param._sharded_param_data
    storage = data.untyped_storage()
    local = cast(DTensor, param.sharded_param)._local_tensor
    return (
        data.storage_offset() == 0
        and storage.nbytes() == data.nbytes
        and local.untyped_storage().data_ptr() == storage.data_ptr()
    )


def _point_at(param: TideParam, flat: torch.Tensor) -> None:
    local = cast(DTensor, param.sharded_param)._local_tensor
    dim = param.fsdp_placement.dim
    length = local.size(dim) if local.numel() > 0 else 0
    param._sharded_param_data = flat
    cast(DTensor, param.sharded_param)._local_tensor = flat.view(param.padded_sharded_param_size).narrow(dim, 0, length)


def shard_window(group: TideGroup, index: int) -> torch.UntypedStorage:
    """Where parameter `index`'s chunk lives in SHARD."""
    region = group.layout.shard(index, group.shard_base)
    return group.domain.engine.window(Area.SHARD, -1, region.offset, region.nbytes)
