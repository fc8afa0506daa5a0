"""A weight that FSDP2 gathers in fp8, as quantised training does: what `fsdp_pre_all_gather` is for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
WRAPPED = {
    aten.split.Tensor,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.detach.default,
}
"""Operations through which a weight stays one: those that FSDP2 shards with."""


class Float8Weight(torch.Tensor):
    """High precision in memory; cast to fp8 before the all-gather and back after it."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Float8Weight:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(Float8Weight, lambda t: t._data, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return tree_map_only(torch.Tensor, Float8Weight, out) if func in WRAPPED else out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Float8Weight:
        return Float8Weight(inner["_data"])

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[Any, Any]:
        return (self._data.to(torch.float8_e4m3fn).view(torch.uint8),), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (gathered,) = all_gather_outputs
        data = gathered.view(torch.float8_e4m3fn).to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(data)
            return None
        return data, (data,)
