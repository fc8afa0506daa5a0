"""What one block of a recipe's model holds in its forward and backward, a token: the "a block's backward" of docs/recipes.md.

    PYTHONPATH=. python scripts/bench/block_memory.py llama3|qwen3|wan [--tokens 512 1024]

On the CPU, in bf16, with the block's true sizes (of Qwen3's 128 experts the 8 that a token goes to: the rest hold no activations).
Counted is the highest sum of PyTorch's allocations beyond parameters, their gradients and the block's input; the figure is the slope
between two token counts. A GPU's kernels differ in what they need beside that: a few percent, not known better here.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from torchtitan_tide import cpu


class _Enough(Exception):
    """Ends a forward when the block's inputs are known."""


def model_of(name: str) -> tuple[nn.Module, nn.Module]:
    """A model of one block with weights of 0.01, and the block."""
    cpu.prepare()
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_tide import specs

    specs.register(name)
    spec = get_train_spec(name)
    args = dataclasses.replace(copy.deepcopy(spec.model_args["tide_shaped"]), n_layers=1)
    if name != "wan":
        args = dataclasses.replace(args, vocab_size=16, max_seq_len=4096)
    if name == "qwen3":
        args.moe_args.num_experts = args.moe_args.top_k
    with torch.device("meta"):
        model = spec.model_cls(args)
    model = model.bfloat16().to_empty(device="cpu").requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
        for buffer in model.buffers():
            buffer.zero_()
    block = model.blocks[0] if name == "wan" else model.layers["0"]
    for parameter in block.requires_grad_().parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, block


def inputs_of(name: str, model: Any, block: nn.Module, tokens: int) -> tuple[list[Any], dict[str, Any]]:
    """What the model gives its block for so many tokens; the first input takes a gradient."""
    given: dict[str, Any] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.update(args=args, kwargs=kwargs)
        raise _Enough

    if name == "wan":
        sizes = model.model_args
        latents, text = torch.randn(1, 16, 1, 8, tokens // 2), torch.randn(1, sizes.text_len, sizes.text_dim)
        arguments: tuple[Any, ...] = (latents, torch.tensor([500.0]), text)
    else:
        arguments = (torch.arange(tokens).view(1, -1) % 16,)
    hook = block.register_forward_pre_hook(note, with_kwargs=True)
    try:
        model(*arguments)
    except _Enough:
        pass
    hook.remove()
    x, *rest = given["args"]
    assert x.shape[1] == tokens
    return [x.detach().requires_grad_(), *rest], given["kwargs"]


def peak_bytes(block: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> int:
    """The highest sum of allocations while the block goes forward and backward."""
    gradient = torch.randn_like(args[0])
    with torch.profiler.profile(profile_memory=True) as profiler:
        block(*args, **kwargs).backward(gradient)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["llama3", "qwen3", "wan"])
    parser.add_argument("--tokens", type=int, nargs=2, default=[512, 1024], help="multiples of 8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, block = model_of(options.model)
    low, high = (peak_bytes(block, *inputs_of(options.model, model, block, tokens)) for tokens in options.tokens)
    print(f"{options.model}: {(high - low) / (options.tokens[1] - options.tokens[0]):.0f} bytes a token")


if __name__ == "__main__":
    main()
