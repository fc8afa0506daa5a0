"""Tiny models, and the ways to shard them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
FP16_REDUCE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
FP16_FP32 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
FP32 = MixedPrecisionPolicy()


class Block(nn.Module):
    """Six tensors: a norm and two linear layers; `extra` adds four that only some scenarios use."""

    def __init__(self, dim: int, hidden: int, extra: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.extra = nn.ModuleList([nn.Linear(dim, dim) for _ in range(2)] if extra else [])
        self.use_extra = 0
        self.recompute = recompute

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        for layer in self.extra[: self.use_extra]:
            y = y + layer(x)
        return x + y


class Net(nn.Module):
    """A linear layer in, blocks, a scale of one number, a linear layer of three rows out (fewer than four ranks)."""

    def __init__(
        self, dim: int = 8, hidden: int = 16, blocks: int = 3, recompute: str = "", extra: bool = False
    ) -> None:
        super().__init__()
        self.inp = nn.Linear(6, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden, extra, recompute == "inside") for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(dim, 3)
        self.recompute = recompute == "outside"
        self.skip: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x.to(self.inp.weight.dtype))
        for i, block in enumerate(self.blocks):
            if i not in self.skip:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.out(x * self.scale)


class Tied(nn.Module):
    """Two layers with one weight, in the root's group."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, dim)
        self.one = nn.Linear(dim, dim)
        self.block = Block(dim, 2 * dim)
        self.two = nn.Linear(dim, dim)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.block(torch.tanh(self.one(self.first(x)))))


class Nested(nn.Module):
    """Units inside units inside the root."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.inp = nn.Linear(6, dim)
        self.outer = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), Block(dim, 2 * dim), nn.Linear(dim, dim)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for part in self.outer:
            x = part(x)
        return x


def sharded(
    model: Net | None = None,
    policy: MixedPrecisionPolicy = BF16_FP32,
    per_block: Callable[[int], dict[str, Any]] | None = None,
    **kwargs: Any,
) -> Net:
    """`fully_shard` on each block and then on the root; `per_block(i)` adds arguments for block i."""
    model = model or Net()
    for i, block in enumerate(model.blocks):
        fully_shard(block, **({"mp_policy": policy} | kwargs | (per_block(i) if per_block else {})))
    root = {k: v for k, v in kwargs.items() if k not in ("shard_placement_fn",)}
    fully_shard(model, mp_policy=policy, **root)
    return model
