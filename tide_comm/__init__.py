"""Layout-aware collectives for FSDP2: parameters land at their final address, gradients are read where they are.

from tide_comm import TideConfig, attach
report = attach(model, TideConfig(memory_mode="slot_reuse"))   # after fully_shard
"""

from tide_comm.config import TideConfig, TideConfigError
from tide_comm.errors import TideError
from tide_comm.fsdp.attach import attach
from tide_comm.fsdp.report import Report

__all__ = ["Report", "TideConfig", "TideConfigError", "TideError", "attach"]
