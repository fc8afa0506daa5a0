"""Parts of the Wan2.2 transformer: rotary positions, attention, the block.

Linear algebra runs in the parameters' dtype; norms, modulation and gates in fp32. Names of parameters are those of the
original checkpoints.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_tide.models.wan.args import WanModelArgs


def rope_split(head_dim: int) -> tuple[int, int, int]:
    """Channels of a head that turn with frame, row and column: 44, 42, 42 of 128."""
    across = 2 * (head_dim // 6)
    return head_dim - 2 * across, across, across


def rope_table(grid: tuple[int, int, int], head_dim: int, theta: float, device: torch.device) -> Tensor:
    """cos and sin for every token of a grid of (frames, rows, columns): fp32, shape (2, tokens, 1, head_dim / 2).

    Angles are computed in fp64: at fp32 those of late positions are off by more than bf16 would show.
    """
    angles = []
    for axis, (count, channels) in enumerate(zip(grid, rope_split(head_dim), strict=True)):
        exponents = torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels
        positions = torch.arange(count, dtype=torch.float64, device=device)
        along = torch.outer(positions, theta**-exponents)
        shape = [1, 1, 1, channels // 2]
        shape[axis] = count
        angles.append(along.view(shape).expand(*grid, -1))
    turned = torch.cat(angles, dim=-1).flatten(0, 2).unsqueeze(1)
    return torch.stack([turned.cos(), turned.sin()]).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn pairs of neighbouring channels. x: (batch, tokens, heads, head_dim), in any dtype; computed in fp32."""
    cos, sin = table.unbind(0)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)


class LayerNorm(nn.Module):
    """Layer norm that takes any dtype and answers in fp32; without parameters unless `affine`."""

    def __init__(self, dim: int, eps: float, affine: bool = False) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., dim). Returns fp32."""
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), (self.dim,), weight, bias, self.eps)


class Attention(nn.Module):
    """Attention without a mask; queries and keys are RMS-normalised over all heads' channels together."""

    def __init__(self, args: WanModelArgs) -> None:
        super().__init__()
        self.n_heads = args.n_heads
        self.q = nn.Linear(args.dim, args.dim)
        self.k = nn.Linear(args.dim, args.dim)
        self.v = nn.Linear(args.dim, args.dim)
        self.o = nn.Linear(args.dim, args.dim)
        self.norm_q = nn.RMSNorm(args.dim, eps=args.eps)
        self.norm_k = nn.RMSNorm(args.dim, eps=args.eps)

    def forward(self, x: Tensor, context: Tensor, table: Tensor | None) -> Tensor:
        """x: (batch, tokens, dim); context: what is attended to, (batch, its tokens, dim); table: positions, or None."""
        q = self.norm_q(self.q(x)).unflatten(-1, (self.n_heads, -1))
        k = self.norm_k(self.k(context)).unflatten(-1, (self.n_heads, -1))
        v = self.v(context).unflatten(-1, (self.n_heads, -1))
        if table is not None:
            q, k = rotate(q, table), rotate(k, table)
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self-attention, attention to the text, feed-forward: 27 parameters."""

    def __init__(self, args: WanModelArgs) -> None:
        super().__init__()
        self.norm1 = LayerNorm(args.dim, args.eps)
        self.self_attn = Attention(args)
        self.norm3 = LayerNorm(args.dim, args.eps, affine=True)
        self.cross_attn = Attention(args)
        self.norm2 = LayerNorm(args.dim, args.eps)
        self.ffn = nn.Sequential(
            nn.Linear(args.dim, args.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(args.ffn_dim, args.dim)
        )
        self.modulation = nn.Parameter(torch.empty(1, 6, args.dim))

    def forward(self, x: Tensor, time: Tensor, text: Tensor, table: Tensor) -> Tensor:
        """x: (batch, tokens, dim); time: fp32, (batch, 6, dim), not one a token; text: (batch, text_len, dim)."""
        dtype = x.dtype
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (self.modulation.float() + time).split(1, dim=1)
        normed = (self.norm1(x) * (1 + scale) + shift).to(dtype)
        x = (x.float() + self.self_attn(normed, normed, table).float() * gate).to(dtype)
        x = x + self.cross_attn(self.norm3(x).to(dtype), text, None)
        normed = (self.norm2(x) * (1 + ffn_scale) + ffn_shift).to(dtype)
        return (x.float() + self.ffn(normed).float() * ffn_gate).to(dtype)


class Head(nn.Module):
    """Norm, modulation and projection to the patches' channels."""

    def __init__(self, args: WanModelArgs, out_features: int) -> None:
        super().__init__()
        self.norm = LayerNorm(args.dim, args.eps)
        self.head = nn.Linear(args.dim, out_features)
        self.modulation = nn.Parameter(torch.empty(1, 2, args.dim))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x: (batch, tokens, dim); time: fp32, (batch, dim)."""
        shift, scale = (self.modulation.float() + time.unsqueeze(1)).split(1, dim=1)
        return self.head((self.norm(x) * (1 + scale) + shift).to(x.dtype))
