"""The flow-matching objective, as Wan2.2's experts are trained.

Data x0 and noise are joined by a line: x_s = (1 - s) x0 + s noise. The model sees x_s and t = 1000 s and predicts the
velocity, noise - x0. s comes from a uniform u through the shift. The two experts split t, thus s: *after* the shift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

T_MAX = 1000.0
"""t of pure noise."""


def shifted(u: Tensor, shift: float) -> Tensor:
    """s = shift u / (1 + (shift - 1) u): 0 and 1 stay, shift > 1 moves all between towards noise."""
    return shift * u / (1 + (shift - 1) * u)


def unshifted(s: float, shift: float) -> float:
    """The u whose `shifted` is s."""
    return s / (shift - (shift - 1) * s)


@dataclass(frozen=True)
class Objective:
    """One expert's share of the noise levels."""

    expert: Literal["high_noise", "low_noise"]
    boundary_t: float
    shift: float

    def interval(self) -> tuple[float, float]:
        """Bounds of u, before the shift: T2V's high-noise expert with shift 5 has (0.5833, 1), for 5 u / (1 + 4 u) = 0.875."""
        middle = unshifted(self.boundary_t / T_MAX, self.shift)
        return (middle, 1.0) if self.expert == "high_noise" else (0.0, middle)

    def noise_levels(self, uniform: Tensor) -> Tensor:
        """s for numbers in [0, 1): fp32, within this expert's t whatever the rounding."""
        low, high = self.interval()
        s = shifted(low + (high - low) * uniform.double(), self.shift).float()
        boundary = self.boundary_t / T_MAX
        if self.expert == "high_noise":
            return s.clamp(min=boundary)
        return s.clamp(max=torch.nextafter(torch.tensor(boundary), torch.tensor(0.0)).item())


def noised(latents: Tensor, noise: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The model's input, its t, and the target: all fp32. latents, noise: (batch, ...); s: (batch,)."""
    latents, noise = latents.float(), noise.float()
    level = s.float().view(-1, *[1] * (latents.dim() - 1))
    return (1 - level) * latents + level * noise, T_MAX * s.float(), noise - latents


def drop_text(text: Tensor, empty: Tensor | None, uniform: Tensor, share: float) -> Tensor:
    """`text` (batch, tokens, channels) with `empty` (tokens, channels; None: zeros) where `uniform` (batch,) < share."""
    dropped = (uniform < share).view(-1, 1, 1)
    return torch.where(dropped, torch.zeros_like(text) if empty is None else empty.to(text), text)


def generator(device: torch.device, *key: int) -> torch.Generator:
    """A generator whose numbers follow from `key` alone: a resumed training draws what the uninterrupted one would."""
    seed = 0
    for part in key:
        # One round of splitmix64 a part, so that neighbouring keys have unrelated streams.
        seed = (seed + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        seed ^= seed >> 31
    return torch.Generator(device).manual_seed(seed)
