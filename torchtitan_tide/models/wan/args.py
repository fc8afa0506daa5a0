"""Sizes of the Wan2.2 transformer, and the flavors that can be named in a TOML file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torchtitan.protocols import BaseModelArgs

Layout = Literal["original", "diffusers"]
"""Whose tensor names a checkpoint has."""


@dataclass
class WanModelArgs(BaseModelArgs):
    """One expert of Wan2.2; the defaults are T2V-A14B. High- and low-noise expert have one architecture.

    Latents are (channels, frames, height, width) as the VAE leaves them; a token is a patch of them.
    """

    dim: int = 5120
    ffn_dim: int = 13824
    n_heads: int = 40
    n_layers: int = 40
    latent_channels: int = 16
    condition_channels: int = 0
    """Channels of the first frame's condition, appended to the noisy latents: 20 for I2V (4 of mask, 16 of latents)."""
    text_dim: int = 4096
    text_len: int = 512
    """Text tokens a sample; shorter texts are padded with zeros, which are attended to."""
    freq_dim: int = 256
    patch_size: tuple[int, int, int] = (1, 2, 2)
    rope_theta: float = 10000.0
    eps: float = 1e-6
    boundary_t: float = 875.0
    """The high-noise expert is for t >= boundary_t, the low-noise expert for less; t runs from 0 (data) to 1000 (noise)."""
    checkpoint_layout: Layout = "diffusers"
    """Names of safetensors that are read or written; set from `wan.checkpoint_layout`."""

    def __post_init__(self) -> None:
        if self.dim % self.n_heads or self.head_dim % 2:
            raise ValueError(f"dim {self.dim}: takes an even multiple of n_heads {self.n_heads}")

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.dim // self.n_heads

    @property
    def elements_per_token(self) -> int:
        """Numbers of the latents that one token stands for: 64."""
        return self.latent_channels * math.prod(self.patch_size)

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Take over what a TOML file may say about the model."""
        self.checkpoint_layout = job_config.wan.checkpoint_layout

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and the FLOPs of forward and backward for each of `seq_len` video tokens.

        A multiplication and an addition count as two, the backward as two forwards, recomputation not at all.
        """
        parameters = sum(parameter.numel() for parameter in model.parameters())
        # Per video token: q, k, v, o and cross-attention's q, o; its k, v are per text token.
        weights = 6 * self.dim**2 + 2 * self.dim * self.ffn_dim
        weights += 2 * self.dim**2 * self.text_len // seq_len
        # Every token attends to every other: two products of seq_len x dim each, and the same with the text.
        attention = 2 * self.dim * (seq_len + self.text_len)
        return parameters, 6 * self.n_layers * (weights + attention)


I2V_CONDITION_CHANNELS = 20

_DEBUG = {
    "dim": 128,
    "ffn_dim": 256,
    "n_heads": 4,
    "n_layers": 4,
    "text_dim": 64,
    "text_len": 8,
    "freq_dim": 64,
}


def flavors() -> dict[str, WanModelArgs]:
    """Flavors by name. `tide_debug*` train on a CPU; `tide_shaped` has true blocks, but two of them."""
    return {
        "t2v_a14b": WanModelArgs(),
        "i2v_a14b": WanModelArgs(condition_channels=I2V_CONDITION_CHANNELS, boundary_t=900.0),
        "tide_shaped": WanModelArgs(n_layers=2),
        "tide_debug": WanModelArgs(**_DEBUG),  # type: ignore[arg-type]
        "tide_debug_i2v": WanModelArgs(condition_channels=I2V_CONDITION_CHANNELS, boundary_t=900.0, **_DEBUG),  # type: ignore[arg-type]
    }
