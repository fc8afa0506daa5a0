"""Small pseudo-latents of two real photographs, for the debug configuration.

They are *not* latents of Wan's VAE, which no package brings: a window is moved over a photograph, and each patch of 4 x 4
pixels becomes 16 numbers, its lowest cosine coefficients (10 of brightness, 3 of each colour difference), bent by asinh,
scaled to mean 0 and deviation 1 a channel and then to mean square 1 a video. Neither are the texts umT5's: each word of a
caption has a fixed random vector.
The photographs come with scikit-learn (`load_sample_images`, CC-BY); only its image files are read.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy
import torch
from torch import Tensor

from torchtitan_tide.models.wan.samples import Sample

PHOTOGRAPHS = {"china": "temple", "flower": "flower"}
"""File, and the word for it in captions."""
FRAMES, ROWS, COLUMNS = 3, 8, 12
MOVES = {"still": (0, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Movement of the window, in patches a frame."""
SHARDS, SHARD_SAMPLES = 64, 64
PATCH = 4


def folder() -> Path | None:
    """Where the photographs are; None without scikit-learn."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "datasets" / "images"


@functools.cache
def coefficients(name: str) -> Tensor:
    """Pseudo-latents of a whole photograph at half its size: fp32, (16, rows, columns), about 53 x 80."""
    from PIL import Image

    root = folder()
    if root is None:
        raise ValueError('the photographs come with scikit-learn: pip install -e ".[photos]"')
    with Image.open(root / f"{name}.jpg") as image:
        size = (image.width // 2 // PATCH * PATCH, image.height // 2 // PATCH * PATCH)
        pixels = numpy.array(image.convert("YCbCr").resize(size), dtype=numpy.float32)
    planes = torch.from_numpy(pixels).permute(2, 0, 1) / 255
    patches = planes.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    # The cosine transform of a patch, rows then columns.
    frequency, position = torch.arange(PATCH).view(-1, 1), torch.arange(PATCH) + 0.5
    basis = torch.cos(torch.pi / PATCH * frequency * position)
    spectrum = torch.einsum("fi,gj,crsij->cfgrs", basis, basis, patches)
    order = sorted(((f, g) for f in range(PATCH) for g in range(PATCH)), key=lambda at: (sum(at), at))
    chosen = [spectrum[plane, f, g] for plane, count in ((0, 10), (1, 3), (2, 3)) for f, g in order[:count]]
    stacked = torch.stack(chosen)
    # Edges give a few coefficients of many deviations, unlike a VAE: bent before the last scaling.
    return _standardised(torch.asinh(2 * _standardised(stacked)))


def _standardised(planes: Tensor) -> Tensor:
    mean, std = (fn(planes, dim=(1, 2), keepdim=True) for fn in (torch.mean, torch.std))
    return (planes - mean) / std


def word_vector(word: str, channels: int) -> Tensor:
    """A word's pseudo-embedding: fp32, (channels,), the same everywhere."""
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "little")
    return torch.randn(channels, generator=torch.Generator().manual_seed(seed))


class PhotographSource:
    """Videos of 3 frames of 8 x 12. Training windows lie in the left four fifths of the photographs, validation's right of them."""

    def __init__(self, split: Literal["train", "validation"], text_dim: int, first_frame: bool) -> None:
        self.split, self.text_dim, self.first_frame = split, text_dim, first_frame
        self.shards = SHARDS
        for name in PHOTOGRAPHS:
            coefficients(name)

    def read(self, shard: int, start: int) -> Iterator[Callable[[], Sample]]:
        """See `Source`."""
        for i in range(start, SHARD_SAMPLES):
            yield functools.partial(self._make, shard * SHARD_SAMPLES + i)

    def _make(self, number: int) -> Sample:
        draw = random.Random(f"{self.split} {number}")
        name, (move, (down, right)) = draw.choice(list(PHOTOGRAPHS)), draw.choice(list(MOVES.items()))
        picture = coefficients(name)
        border = picture.shape[2] * 4 // 5
        columns = (0, border) if self.split == "train" else (border, picture.shape[2])
        # Room for the movement, in whichever direction.
        reach = FRAMES - 1
        row = draw.randint(reach * (down < 0), picture.shape[1] - ROWS - reach * (down > 0))
        column = draw.randint(columns[0] + reach * (right < 0), columns[1] - COLUMNS - reach * (right > 0))
        frames = []
        for frame in range(FRAMES):
            y, x = row + frame * down, column + frame * right
            frames.append(picture[:, y : y + ROWS, x : x + COLUMNS])
        latents = torch.stack(frames, dim=1)
        # Plain sky and a flower's edges differ tenfold; a batch's loss would tell which it got and little else.
        latents = latents / latents.square().mean().sqrt()
        caption = ["camera", move, PHOTOGRAPHS[name]]
        text = torch.stack([word_vector(word, self.text_dim) for word in caption])
        if not self.first_frame:
            return Sample(latents, text)
        given = torch.zeros_like(latents)
        given[:, 0] = latents[:, 0]
        return Sample(latents, text, given)
