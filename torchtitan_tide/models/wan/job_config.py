"""The configuration of a Wan training: TIDE's, and the section `[wan]`.

Named in a TOML file as `[job] custom_config_module = "torchtitan_tide.models.wan.job_config"`. Not `from __future__
import annotations`: TorchTitan's merge reads `field.type` as a class.
"""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan_tide.job_config import JobConfig as TideJobConfig


@dataclass
class WanConfig:
    """What of Wan is trained, and on what."""

    expert: Literal["high_noise", "low_noise"] = "high_noise"
    """The expert: timesteps above or below the model's boundary (875 of 1000; image to video: 900)."""
    shift: float = 5.0
    """s = shift * u / (1 + (shift - 1) * u) with u uniform: more than 1 trains more at high noise."""
    text_drop: float = 0.1
    """Share of samples that are trained without their text, for classifier-free guidance."""
    empty_text: str = ""
    """.npy file of the empty text's embedding, which stands for a dropped text; "": zeros."""
    latents: Literal["normalised", "raw"] = "normalised"
    """Whether the data's latents have the VAE's mean and deviation taken out, or need it."""
    checkpoint_layout: Literal["original", "diffusers"] = "diffusers"
    """Tensor names of safetensors that are loaded and saved."""


@dataclass
class JobConfig(TideJobConfig):
    """The sections that TorchTitan does not have."""

    wan: WanConfig = field(default_factory=WanConfig)
    """The Wan model's."""
