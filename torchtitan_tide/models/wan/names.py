"""Tensor names of Wan checkpoints: the original's, which are the model's own, and those of diffusers. No tensor changes."""

from __future__ import annotations

import re

_IN_BLOCK = (
    ("self_attn.o.", "attn1.to_out.0."),
    ("cross_attn.o.", "attn2.to_out.0."),
    ("self_attn.norm_", "attn1.norm_"),
    ("cross_attn.norm_", "attn2.norm_"),
    ("self_attn.", "attn1.to_"),
    ("cross_attn.", "attn2.to_"),
    ("ffn.0.", "ffn.net.0.proj."),
    ("ffn.2.", "ffn.net.2."),
    ("norm3.", "norm2."),
    ("modulation", "scale_shift_table"),
)
"""Prefixes within a block; the first that fits counts."""

_OUTSIDE = (
    ("head.modulation", "scale_shift_table"),
    ("head.head.", "proj_out."),
    ("text_embedding.0.", "condition_embedder.text_embedder.linear_1."),
    ("text_embedding.2.", "condition_embedder.text_embedder.linear_2."),
    ("time_embedding.0.", "condition_embedder.time_embedder.linear_1."),
    ("time_embedding.2.", "condition_embedder.time_embedder.linear_2."),
    ("time_projection.1.", "condition_embedder.time_proj."),
    ("patch_embedding.", "patch_embedding."),
)


def to_diffusers(name: str) -> str:
    """The diffusers name of an original one. Raises `KeyError` for a name that is none."""
    return _rename(name, [(ours, theirs) for ours, theirs in _IN_BLOCK], [(ours, theirs) for ours, theirs in _OUTSIDE])


def to_original(name: str) -> str:
    """The original name of one of diffusers. Raises `KeyError` for a name that is none."""
    return _rename(name, [(theirs, ours) for ours, theirs in _IN_BLOCK], [(theirs, ours) for ours, theirs in _OUTSIDE])


def _rename(name: str, in_block: list[tuple[str, str]], outside: list[tuple[str, str]]) -> str:
    block = re.match(r"blocks\.\d+\.", name)
    start = block.group() if block else ""
    rest = name[len(start) :]
    for before, after in in_block if block else outside:
        if rest.startswith(before):
            return start + after + rest[len(before) :]
    raise KeyError(name)
