"""What step.py prints."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = {
    "step ms": ("step_ms", ".2f"),
    "min": ("min_ms", ".2f"),
    "max": ("max_ms", ".2f"),
    "to stock": ("to_stock", ".3f"),
    "to limit": ("to_limit", ".3f"),
    "peak GiB": ("peak_gib", ".2f"),
    "of it arena": ("arena_gib", ".2f"),
    "host ms": ("host_ms", ".1f"),
    "SM comm ms": ("comm_sm_ms", ".0f"),
    "NCCL": ("nccl_sm_ms", ".0f"),
    "sums": ("sum_sm_ms", ".0f"),
    "casts": ("cast_sm_ms", ".0f"),
    "SM layout ms": ("layout_sm_ms", ".0f"),
    "SM copy-in ms": ("copy_in_sm_ms", ".0f"),
    "resident": ("resident", ".1%"),
    "exposed ms": ("exposed_ms", ".1f"),
    "copies ms": ("copies_ms", ".1f"),
    "hidden": ("copies_hidden_ms", ".1f"),
    "CE": ("copy_engines", "s"),
    "SM MHz": ("sm_mhz", ".0f"),
    "W": ("power_w", ".0f"),
    "power-capped": ("power_capped", ".0%"),
}
WHEN_MEASURED = ("SM MHz", "W", "power-capped")
"""Columns that are left out where no row has them."""


def table_of(rows: dict[str, dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("row")
    columns = {
        name: (key, form)
        for name, (key, form) in COLUMNS.items()
        if name not in WHEN_MEASURED or any(found.get(key) is not None for found in rows.values())
    }
    for name in columns:
        table.add_column(name, justify="right")
    for row, found in rows.items():
        cells = ["-" if found.get(key) is None else format(found[key], form) for key, form in columns.values()]
        table.add_row(row, *cells)
    return table


def show(rows: dict[str, dict[str, Any]], found: dict[str, Any], tokens: int) -> None:
    """Print the rows at one number of tokens. `found`: the whole of the run's JSON."""
    options = found["options"]
    gpus = f", {found['gpus']} GPUs" if found["gpus"] else ""
    title = (
        f"{options['blocks']} {options['model']} blocks of {found['block_mib']:.0f} MiB, {tokens} tokens, {options['param_dtype']}, "
        f"{options['mode']}, checkpointing {options['checkpoint']}; {found['ranks']} ranks, {found['machine']}{gpus}, "
        f"PyTorch {found['torch']}, NCCL {found['nccl']}"
    )
    Console(width=None if sys.stdout.isatty() else 250).print(table_of(rows, title))
    clocks = [figures["clocks"] for figures in rows.values() if "clocks" in figures]
    if clocks and not any(map(any, clocks)):
        print("clocks and power: nvidia-smi has no sample from within the timed steps")
    for row, figures in rows.items():
        if "error" in figures:
            print(f"{row}: {figures['error']}")
