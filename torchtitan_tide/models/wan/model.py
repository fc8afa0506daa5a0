"""The Wan2.2 A14B transformer (one expert), text to video and image to video.

    noisy latents (batch, 16, frames, rows, columns) -> patches of 1 x 2 x 2 -> tokens (31,200 for 77 frames of 480 x 832)
    t -> cos, sin -> e (batch, dim) -> time (batch, 6, dim), shared by all tokens of a sample and all blocks
    text (batch, 512, 4096) -> (batch, 512, dim)
    40 blocks; head; patches -> velocity, shaped like the latents

All parameters have one dtype, which is what FSDP2 asks of a group. What needs fp32 (timesteps, norms, modulation) is
computed in fp32 whatever that dtype is: rounding t to bf16 would turn 893 into 892.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.protocols import ModelProtocol

from torchtitan_tide.models.wan.args import WanModelArgs
from torchtitan_tide.models.wan.layers import Block, Head, rope_table


def time_features(t: Tensor, freq_dim: int) -> Tensor:
    """cos and sin of t at freq_dim / 2 frequencies from 1 down to 1/10000. t: (batch,). Returns fp32, (batch, freq_dim)."""
    half = freq_dim // 2
    exponents = torch.arange(half, dtype=torch.float64, device=t.device) / half
    angles = torch.outer(t.double(), 10000.0**-exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


class WanModel(ModelProtocol):
    """Predicts the velocity `noise - latents`. The parameters outside the blocks are 15, and the root's FSDP group."""

    def __init__(self, model_args: WanModelArgs) -> None:
        super().__init__(model_args)
        self.model_args = args = model_args
        channels = args.latent_channels + args.condition_channels
        self.patch_embedding = nn.Conv3d(channels, args.dim, kernel_size=args.patch_size, stride=args.patch_size)
        self.text_embedding = nn.Sequential(
            nn.Linear(args.text_dim, args.dim), nn.GELU(approximate="tanh"), nn.Linear(args.dim, args.dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(args.freq_dim, args.dim), nn.SiLU(), nn.Linear(args.dim, args.dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(args.dim, 6 * args.dim))
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.head = Head(args, args.elements_per_token)

    def init_weights(self, buffer_device: torch.device | None = None, **kwargs: Any) -> None:
        """As Wan initialises it. The head starts at zero, so that all other gradients are exactly zero in the first step."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                # The text's and the time's own layers start small, all others after Glorot.
                if name.startswith(("text_embedding", "time_embedding")):
                    nn.init.normal_(module.weight, std=0.02)
                else:
                    nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
        for name, parameter in self.named_parameters():
            if name.endswith("modulation"):
                nn.init.normal_(parameter, std=self.model_args.dim**-0.5)
            elif name.endswith("norm3.weight"):
                nn.init.ones_(parameter)
            elif name.endswith("norm3.bias"):
                nn.init.zeros_(parameter)
        # A patch is a vector and its embedding a matrix: Glorot's bound of that matrix.
        weight = self.patch_embedding.weight
        bound = math.sqrt(6 / (weight.shape[0] + math.prod(weight.shape[1:])))
        nn.init.uniform_(weight, -bound, bound)
        assert self.patch_embedding.bias is not None
        nn.init.zeros_(self.patch_embedding.bias)
        nn.init.zeros_(self.head.head.weight)

    def forward(self, latents: Tensor, t: Tensor, text: Tensor, condition: Tensor | None = None) -> Tensor:
        """The velocity, in the parameters' dtype, shaped like `latents`.

        latents: noisy, (batch, channels, frames, rows, columns), rows and columns multiples of the patch's; t: fp32,
        (batch,), 0 to 1000; text: (batch, at most text_len, text_dim); condition: (batch, condition_channels, frames,
        rows, columns), with image to video only. Raises `ValueError` for shapes that do not fit.
        """
        args = self.model_args
        self._check(latents, text, condition)
        dtype = self.patch_embedding.weight.dtype
        if condition is not None:
            latents = torch.cat([latents, condition], dim=1)
        x = self.patch_embedding(latents.to(dtype))
        grid = x.shape[2:]
        x = x.flatten(2).transpose(1, 2).contiguous()
        table = rope_table(tuple(grid), args.head_dim, args.rope_theta, x.device)
        e = self._embed_time(t)
        time = self.time_projection(e.to(dtype)).float().unflatten(1, (6, args.dim))
        context = self.text_embedding(F.pad(text, (0, 0, 0, args.text_len - text.shape[1])).to(dtype))
        for block in self.blocks:
            x = block(x, time, context, table)
        return self._unpatchify(self.head(x, e), grid)

    def _embed_time(self, t: Tensor) -> Tensor:
        """fp32, (batch, dim), with fp32 copies of the two layers' weights: small, unlike those of the projection."""
        device_type = "cpu" if t.is_meta else t.device.type  # autocast knows no meta device
        with torch.autocast(device_type, enabled=False):
            e = time_features(t, self.model_args.freq_dim)
            for layer in self.time_embedding:
                if isinstance(layer, nn.Linear):
                    e = F.linear(e, layer.weight.float(), layer.bias.float())
                else:
                    e = layer(e)
        return e

    def _unpatchify(self, patches: Tensor, grid: torch.Size) -> Tensor:
        """(batch, tokens, patch x channels) -> (batch, channels, frames, rows, columns); channels are a patch's last axis."""
        pt, ph, pw = self.model_args.patch_size
        x = patches.unflatten(1, grid).unflatten(-1, (pt, ph, pw, -1))
        frames, rows, columns = grid
        # One copy, and no view of it: FSDP2 warns of outputs that are views.
        return x.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(len(x), -1, frames * pt, rows * ph, columns * pw)

    def _check(self, latents: Tensor, text: Tensor, condition: Tensor | None) -> None:
        args = self.model_args
        if latents.dim() != 5 or latents.shape[1] != args.latent_channels:
            raise ValueError(
                f"latents {tuple(latents.shape)}: takes (batch, {args.latent_channels}, frames, rows, columns)"
            )
        if any(size % patch for size, patch in zip(latents.shape[2:], args.patch_size, strict=True)):
            raise ValueError(f"latents {tuple(latents.shape)}: takes multiples of the patch {args.patch_size}")
        if text.shape[-1] != args.text_dim or text.shape[1] > args.text_len:
            raise ValueError(f"text {tuple(text.shape)}: takes (batch, up to {args.text_len}, {args.text_dim})")
        found = 0 if condition is None else condition.shape[1]
        if found != args.condition_channels:
            raise ValueError(f"condition: has {found} channels, the model takes {args.condition_channels}")
