"""TorchTitan's `JobConfig` for flux, extended by the `[tide]` section: `[job] custom_config_module = "torchtitan_tide.job_config_flux"`.

Not `from __future__ import annotations`: the merge reads `field.type` as a class.
"""

from dataclasses import dataclass, field

from torchtitan.models.flux.job_config import JobConfig as FluxJobConfig

from tide_comm.config import TideConfig


@dataclass
class JobConfig(FluxJobConfig):
    """flux's own sections and keys, and [tide]."""

    tide: TideConfig = field(default_factory=TideConfig)
    """What TIDE replaces and how."""
