"""TorchTitan's `JobConfig`, extended by the `[tide]` section.

Named in a TOML file as `[job] custom_config_module = "torchtitan_tide.job_config"`; TorchTitan merges the sections
of this `JobConfig` into its own. Not `from __future__ import annotations`: the merge reads `field.type` as a class.
"""

from dataclasses import dataclass, field

from tide_comm.config import TideConfig


@dataclass
class JobConfig:
    """Only the sections that TorchTitan does not have."""

    tide: TideConfig = field(default_factory=TideConfig)
    """What TIDE replaces and how."""
