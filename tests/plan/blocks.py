"""Blocks of the three models, as FSDP2 groups: the shapes that real programs have, those of the benchmarks (scripts/bench/shapes.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from tide_comm.plan.layout import GroupLayout

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import shapes

BLOCKS = {"llama": (9, 1632.0), "qwen3": (12, 1188.5), "wan": (27, 670.2)}
"""Tensors and MiB in bf16 of a block."""


def block(model: str, world: int, param_dtype: str = "float32") -> GroupLayout:
    """A block's layout over `world` ranks, gathered in bf16. `param_dtype`: the optimizer's."""
    tensors, mib = BLOCKS[model]
    layout = shapes.block_layout(model, shapes.SIZES[model], world, param_dtype)
    assert len(layout.params) == tensors and layout.bytes_unsharded / 2**20 - mib < 0.1
    return layout
