"""Layout-aware collectives for FSDP2: parameters land at their final address, gradients are read where they are.

from tide_comm import TideConfig, attach
report = attach(model, TideConfig(memory_mode="slot_reuse"))   # after fully_shard
"""

from typing import TYPE_CHECKING, Any

from tide_comm.config import TideConfig, TideConfigError
from tide_comm.errors import TideError

if TYPE_CHECKING:
    from tide_comm.fsdp.attach import attach
    from tide_comm.fsdp.report import Report

__all__ = ["Report", "TideConfig", "TideConfigError", "TideError", "attach"]


def __getattr__(name: str) -> Any:
    """Load what needs PyTorch when it is asked for, so that checking a configuration stays fast."""
    if name == "attach":
        from tide_comm.fsdp.attach import attach

        return attach
    if name == "Report":
        from tide_comm.fsdp.report import Report

        return Report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
