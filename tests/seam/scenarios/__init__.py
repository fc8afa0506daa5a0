"""The table of scenarios, by name."""

from tests.seam.scenarios import order, reductions, units, writes
from tests.seam.scenarios.registry import SCENARIOS, add

__all__ = ["SCENARIOS", "add", "order", "reductions", "units", "writes"]
