"""Writes the table of docs/recipes.md, memory a GPU, from `tide plan` and the models' sizes.

python -m tests.recipe_memory
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torchtitan_tide import cpu

cpu.prepare()

from torchtitan_tide import job_check  # noqa: E402
from torchtitan_tide import plan as plan_command  # noqa: E402

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "train_configs"
PATH = ROOT / "docs" / "recipes.md"
BEGIN, END = "<!-- memory: python -m tests.recipe_memory -->\n", "<!-- end of memory -->\n"
GIB = 2**30
TOKENS = {
    "llama3.1_70b": (8192, 16384, 24576, 32768),
    "qwen3_30b_a3b": (8192, 16384, 32768),
    "wan2.2_t2v_a14b": (31200,),
}
BLOCK_BYTES_A_TOKEN = {"llama3": 506_120, "qwen3": 359_036, "wan": 462_884}
"""What scripts/bench/block_memory.py measured."""
STATE_BYTES = 16
"""A parameter's fp32 value, fp32 gradient, and AdamW's two fp32 moments."""
LOSS_COPIES = 2
"""Compiled, the loss holds the bf16 logits and their gradient."""


@functools.cache
def planned(name: str, machines: int = 8, gpus: int = 8, *overrides: str) -> Any:
    """The plan of a file of train_configs; made once, and not to be changed."""
    return plan_command.plan_job(str(CONFIGS / f"{name}.toml"), list(overrides), machines, gpus)


def args_of(name: str) -> Any:
    """TorchTitan's sizes of a recipe's model."""
    from torchtitan.protocols.train_spec import get_train_spec

    model = job_check.check(str(CONFIGS / f"{name}.toml"), [], 64, here=False).config.model
    return model.name, get_train_spec(model.name).model_args[model.flavor]


def memory_bytes(name: str, tokens: int) -> dict[str, float]:
    """By use, on a GPU of 8 x 8 with `tokens` of its own, when the last block's backward begins. With full checkpointing."""
    plan, (model, args) = planned(name), args_of(name)
    (arena,) = plan.arenas
    parameters = sum(len(group.names) * group.bytes_unsharded for group in plan.groups) / 2
    widest = max(group.bytes_unsharded for group in plan.groups if len(group.names) > 1)
    in_place = plan.config.memory_mode == "in_place"
    logits = 2 * tokens * getattr(args, "vocab_size", 0)
    return {
        "states": STATE_BYTES * parameters / len(arena.ranks),
        "arena": sum(arena.memory_bytes.values()),
        "gradients": (2 if in_place else 1) * widest,
        "inputs": 2 * tokens * args.dim * args.n_layers,
        "working": max(BLOCK_BYTES_A_TOKEN[model] * tokens, LOSS_COPIES * logits),
    }


def render() -> str:
    head = "| recipe | tokens a GPU | states | arena | gradients | blocks' inputs | one block or the loss | together, GiB |\n"
    lines = [BEGIN, head, "|---" * 8 + "|\n"]
    for name, counts in TOKENS.items():
        for variant in (name, f"{name}-hsdp"):
            for tokens in counts:
                parts = [value / GIB for value in memory_bytes(variant, tokens).values()]
                cells = [f"`{variant}`", f"{tokens:,}", *(f"{part:.1f}" for part in (*parts, sum(parts)))]
                lines.append(f"| {' | '.join(cells)} |\n")
    return "".join([*lines, END])


def with_table(text: str) -> str:
    """`text` with the table of now in the place of the one that is there."""
    before, rest = text.split(BEGIN)
    return before + render() + rest.split(END)[1]


if __name__ == "__main__":
    PATH.write_text(with_table(PATH.read_text()))
