"""matplotlib, which is an extra: without it there are tables and no plots."""

from __future__ import annotations

from typing import Any

from torchtitan_tide.errors import ConfigError

HOW = 'no plots: matplotlib is not installed; pip install -e ".[plots]"'
COLOURS = {
    "stock": "#6b7280",
    "stock again": "#d97706",
    "symm_mem": "#d97706",
    "tide": "#1d4ed8",
    "tide_slot_reuse": "#60a5fa",
    "tide_ag": "#7c3aed",
    "tide_rs": "#059669",
}
"""Of runs and rows, alike in all plots."""


def pyplot() -> Any:
    """`matplotlib.pyplot` that draws into files, no display needed. Raises `ConfigError` where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(HOW) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
