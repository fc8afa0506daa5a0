"""TorchTitan's adapters between its own and Hugging Face's tensors, on the meshes where those of 0.2.2 end in an error.

- Llama: queries' and keys' rows are permuted head by head, and DTensor cuts no head: 8 key heads over the 64 ranks of a pure FSDP
  training were "Cannot unflatten unevenly sharded tensor".
- Mixtures of experts: hybrid sharding asks a `Replicate` for the dimension that it shards: "'Replicate' object has no attribute 'dim'".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate


def mended(stock: Any) -> Any:
    """The adapter class `stock` of a TrainSpec (None without one), with what it lacks; itself where that is nothing."""
    mends = tuple(mend for method, mend in _MENDS.items() if hasattr(stock, method))
    if not mends or issubclass(stock, mends):
        return stock
    return type(stock.__name__, (*mends, stock), {"__doc__": stock.__doc__, "__module__": stock.__module__})


class WholeHeads:
    """Permutes rows of heads that ranks have parts of."""

    def _permute(self, w: torch.Tensor, n_heads_arg: int, dim1: int | None = None, dim2: int | None = None) -> Any:
        return _by_heads(super()._permute, w, n_heads_arg, dim1, dim2)  # type: ignore[misc]

    def _reverse_permute(
        self, w: torch.Tensor, n_heads_arg: int, dim1: int | None = None, dim2: int | None = None
    ) -> Any:
        return _by_heads(super()._reverse_permute, w, n_heads_arg, dim1, dim2)  # type: ignore[misc]


def _by_heads(
    permute: Callable[..., torch.Tensor], w: torch.Tensor, heads: int, dim1: int | None, dim2: int | None
) -> torch.Tensor:
    """`permute` of the whole matrix (heads * rows, columns), of which this rank keeps its shard. Collective where heads are cut.

    One gathered matrix at a time: 32 MiB for the keys of Llama-3.1 70B, in fp32.
    """
    if not isinstance(w, DTensor):
        return permute(w, heads, dim1, dim2)
    mesh, placements = w.device_mesh, w.placements
    cut = math.prod(mesh.size(i) for i, placement in enumerate(placements) if not isinstance(placement, Replicate))
    if heads % cut == 0:
        return permute(w, heads, dim1, dim2)
    whole = permute(w.full_tensor(), heads, dim1, dim2)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(mesh, placements)


class ExpertsOfReplicas:
    """Knows which experts a rank has where ranks are replicas of each other."""

    def _caculate_indices_from_placements(
        self, dim: int, dim_size: int, dtensor_placements: tuple[Any, ...], device_mesh: Any
    ) -> tuple[int, int]:
        no_dimension = SimpleNamespace(dim=None)
        asked = tuple(no_dimension if isinstance(p, Replicate) else p for p in dtensor_placements)
        return super()._caculate_indices_from_placements(dim, dim_size, asked, device_mesh)  # type: ignore[misc]


_MENDS: dict[str, type] = {
    "_reverse_permute": WholeHeads,
    "_caculate_indices_from_placements": ExpertsOfReplicas,
}
"""By the method of TorchTitan's that is in the way."""
