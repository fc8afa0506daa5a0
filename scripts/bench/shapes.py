"""The parameters of one FSDP2 unit of each model that TIDE is measured with, in the order in which the modules list them.

The tests of plans take them from here, too (tests/plan/blocks.py).

Sources: torchtitan 0.2.2's Llama-3.1-70B and Qwen3-30B-A3B (experts stacked as three tensors), Wan2.2-T2V-A14B as this project has it.
MiB are of bf16, without padding: 1632.0, 1188.5 and 670.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tide_comm.plan.layout import GroupLayout, ParamLayout

Shape = tuple[int, ...]
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Of the parameters that the optimizer updates, as options name them and as layouts do."""


@dataclass(frozen=True)
class Sizes:
    """Of a block. `kv`: features of all keys (values) together; `experts` and `top_k` are 0 where there are none."""

    dim: int
    hidden: int
    heads: int
    head: int
    kv: int = 0
    experts: int = 0
    top_k: int = 0
    text: int = 0
    """Text tokens that a block attends to."""

    @property
    def queries(self) -> int:
        return self.heads * self.head


SIZES = {
    "llama": Sizes(8192, 28672, 64, 128, kv=1024),
    "qwen3": Sizes(2048, 768, 32, 128, kv=512, experts=128, top_k=8),
    "wan": Sizes(5120, 13824, 40, 128, text=512),
}
DEBUG = {
    "llama": Sizes(64, 96, 8, 8, kv=8),
    "qwen3": Sizes(32, 24, 4, 8, kv=16, experts=4, top_k=2),
    "wan": Sizes(64, 96, 8, 8, text=4),
}
"""For runs on the CPU."""


def shapes_of(model: str, sizes: Sizes) -> list[Shape]:
    """Shapes of a block's parameters. Raises `KeyError` for an unknown model."""
    return {"llama": _llama, "qwen3": _qwen3, "wan": _wan}[model](sizes)


def _llama(s: Sizes) -> list[Shape]:
    attention = [(s.queries, s.dim), (s.kv, s.dim), (s.kv, s.dim), (s.dim, s.queries)]
    return [*attention, (s.hidden, s.dim), (s.dim, s.hidden), (s.hidden, s.dim), (s.dim,), (s.dim,)]


def _qwen3(s: Sizes) -> list[Shape]:
    attention = [(s.queries, s.dim), (s.kv, s.dim), (s.kv, s.dim), (s.dim, s.queries), (s.head,), (s.head,)]
    experts = [(s.experts, s.hidden, s.dim), (s.experts, s.dim, s.hidden), (s.experts, s.hidden, s.dim)]
    return [*attention, *experts, (s.experts, s.dim), (s.dim,), (s.dim,)]


def _wan(s: Sizes) -> list[Shape]:
    attention = [(s.dim, s.dim), (s.dim,)] * 4 + [(s.dim,)] * 2
    mlp = [(s.hidden, s.dim), (s.hidden,), (s.dim, s.hidden), (s.dim,)]
    return [(1, 6, s.dim), *attention, *attention, (s.dim,), (s.dim,), *mlp]


def block_layout(model: str, sizes: Sizes, world: int, param_dtype: str) -> GroupLayout:
    """A block as a group over `world` ranks, gathered in bf16. `param_dtype`: "float32" or "bfloat16", the optimizer's."""
    params = (
        ParamLayout(f"{model}#{i}", shape, param_dtype, "bfloat16", world)
        for i, shape in enumerate(shapes_of(model, sizes))
    )
    return GroupLayout(model, tuple(params), world)


def mib_of(model: str, sizes: Sizes) -> float:
    """MiB of a block in bf16."""
    return sum(2 * math.prod(shape) for shape in shapes_of(model, sizes)) / 2**20
