"""Videos of noise, as large as the paper's: for measuring steps where no data are at hand. There is nothing to learn in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from torchtitan_tide.models.wan.samples import Sample

LATENTS = (16, 20, 60, 104)
"""What the VAE makes of 77 frames of 480 x 832 pixels: 31,200 tokens."""
SHARDS, SHARD_SAMPLES = 1024, 64


class NoiseSource:
    """The same videos every time; texts of full length."""

    def __init__(self, text_len: int, text_dim: int, first_frame: bool) -> None:
        self.text, self.first_frame = (text_len, text_dim), first_frame
        self.shards = SHARDS

    def read(self, shard: int, start: int) -> Iterator[Callable[[], Sample]]:
        """See `Source`."""
        for i in range(start, SHARD_SAMPLES):
            yield functools.partial(self._make, shard * SHARD_SAMPLES + i)

    def _make(self, number: int) -> Sample:
        draw = torch.Generator().manual_seed(number)
        latents = torch.randn(LATENTS, generator=draw)
        return Sample(latents, torch.randn(self.text, generator=draw), latents if self.first_frame else None)
