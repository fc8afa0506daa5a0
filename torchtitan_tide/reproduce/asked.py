"""What `tide reproduce` is asked to measure: its options."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from torchtitan_tide.errors import ConfigError


@dataclass(frozen=True)
class Asked:
    """What is measured. Lists are names separated by commas, or "all"."""

    tables: str = "all"
    """Of step_time, sm_time, ablation, memory."""
    models: str = "all"
    """Of llama, qwen, wan."""
    sizes: str = "all"
    """Published token counts a GPU: of 8K, 16K, 24K, 32K, 31.2K."""
    rows: str = "all"
    """Of stock, symm_mem, tide, tide_slot_reuse, tide_ag, tide_rs."""
    configs: str = ""
    """Other TOML files: llama=FILE,wan=FILE"""
    warmup: int = 5
    """Steps before the timed ones."""
    steps: int = 10
    """Timed steps."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small models, for a CPU and minutes; 2 ranks unless --ranks says otherwise."""
    again: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also run cells that are finished."""
    report_only: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run nothing: tables and plots of what there is."""
    out: str = ""
    """Folder for runs, tables and plots; default outputs/reproduce, with --debug outputs/reproduce_debug."""

    def check(self) -> None:
        """Raises `ConfigError` for numbers that cannot be; names are looked up where they are used."""
        for name, value in (("--warmup", self.warmup), ("--steps", self.steps)):
            if value < 1:
                raise ConfigError(f"{name} {value}: takes a whole number >= 1")
