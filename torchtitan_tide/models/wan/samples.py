"""What a Wan training sample is, and what the sources of samples have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

VAE_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
VAE_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)
"""Of the Wan2.1 VAE, which A14B uses, by channel: raw latents less the mean, divided by the deviation, are normalised."""

FIELDS = ("vae_latent", "text_embedding", "first_frame_latent")
"""Tensors of a stored sample; the last with image to video only."""


@dataclass
class Sample:
    """One video: latents (channels, frames, rows, columns), text (tokens, channels), and for image to video the latents
    of the video that is the first frame followed by blank ones. Any floating-point dtype."""

    latents: Tensor
    text: Tensor
    first_frame: Tensor | None = None


class Source(Protocol):
    """Samples in shards, which are what ranks share out. `shards`: how many there are."""

    shards: int

    def read(self, shard: int, start: int) -> Iterator[Callable[[], Sample]]:
        """The shard's samples from its `start`-th on; a sample that is not called for is not decoded."""
        ...


def normalise(latents: Tensor) -> Tensor:
    """Raw VAE latents (16, frames, rows, columns) with mean and deviation taken out: fp32."""
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (VAE_MEAN, VAE_STD))
    return (latents.float() - mean) / std


def condition_of(first_frame: Tensor) -> Tensor:
    """What I2V appends to the noisy latents: a mask of 4 channels, 1 in the given frame, and the first frame's latents."""
    mask = torch.zeros(4, *first_frame.shape[1:])
    mask[:, 0] = 1
    return torch.cat([mask, first_frame.float()])


def check_stated(path: object, stated: str | None, configured: str) -> None:
    """Raise `ValueError` when a file states other latents ("normalised" or "raw") than `wan.latents` says."""
    if stated is not None and stated != configured:
        raise ValueError(f'{path}: holds {stated} latents, wan.latents is "{configured}"')


def files_below(folder: str, suffix: str) -> list[Path]:
    """Files of that suffix below a folder, sorted. Raises `ValueError` when there is none."""
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{folder!r}: no such folder")
    found = sorted(path for path in root.rglob(f"*{suffix}") if path.is_file())
    if not found:
        raise ValueError(f"{folder!r}: holds no {suffix} file")
    return found
