"""Blocks of the three models, as FSDP2 groups: the shapes that real programs have."""

from __future__ import annotations

from tide_comm.plan.layout import GroupLayout, ParamLayout

# bf16 over fp32 masters.
LLAMA = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192)] + [(28672, 8192), (8192, 28672), (28672, 8192)]
LLAMA += [(8192,)] * 2
QWEN = [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128,), (128,)]
QWEN += [(128, 768, 2048), (128, 2048, 768), (128, 768, 2048), (128, 2048), (2048,), (2048,)]
DIM, FFN = 5120, 13824
WAN = [(1, 6, DIM)] + ([(DIM, DIM), (DIM,)] * 4 + [(DIM,)] * 2) * 2 + [(DIM,)] * 2
WAN += [(FFN, DIM), (FFN,), (DIM, FFN), (DIM,)]
BLOCKS = {"llama": (LLAMA, 9, 1632.0), "qwen": (QWEN, 12, 1188.5), "wan": (WAN, 27, 670.2)}
"""Shapes, tensors and MiB in bf16 of a block."""


def block(model: str, world: int) -> GroupLayout:
    """A block's layout over `world` ranks."""
    shapes, tensors, mib = BLOCKS[model]
    params = (ParamLayout(str(i), tuple(s), "float32", "bfloat16", world) for i, s in enumerate(shapes))
    layout = GroupLayout(model, tuple(params), world)
    assert len(layout.params) == tensors and layout.bytes_unsharded / 2**20 - mib < 0.1
    return layout
