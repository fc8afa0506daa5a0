"""transformers' models of TorchTitan's sizes, checkpoints as transformers writes them, and both models in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

FLAVORS = {"llama3": "tide_debug", "qwen3": "tide_debug_moe"}


def config_of(model: str, args: Any) -> Any:
    """transformers' configuration of a model with TorchTitan's sizes."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    common = {
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "rms_norm_eps": args.norm_eps,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "use_cache": False,
    }
    if model == "llama3":
        scaling = args.rope_scaling_args
        rope = {
            "rope_type": "llama3",
            "rope_theta": float(args.rope_theta),
            "factor": scaling.scaling_factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
        hidden = hidden_of(args)
        return LlamaConfig(**common, intermediate_size=hidden, max_position_embeddings=131072, rope_parameters=rope)
    return Qwen3MoeConfig(
        **common,
        head_dim=args.head_dim,
        intermediate_size=args.hidden_dim,
        moe_intermediate_size=args.moe_inter_dim,
        num_experts=args.moe_args.num_experts,
        num_experts_per_tok=args.moe_args.top_k,
        norm_topk_prob=args.moe_args.route_norm,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_parameters={"rope_type": "default", "rope_theta": float(args.rope_theta)},
    )


def hidden_of(args: Any) -> int:
    """Width of a Llama's feed-forward layer."""
    hidden = int(2 * 4 * args.dim / 3)
    if args.ffn_dim_multiplier is not None:
        hidden = int(args.ffn_dim_multiplier * hidden)
    return args.multiple_of * ((hidden + args.multiple_of - 1) // args.multiple_of)


def args_of(model: str, **changes: Any) -> Any:
    """Sizes of the debug flavor, this caller's own."""
    import copy
    import dataclasses

    from torchtitan_tide.flavors import own_flavors

    return dataclasses.replace(copy.deepcopy(own_flavors(model)[FLAVORS[model]]), **changes)


def theirs(model: str, args: Any, seed: int = 0) -> nn.Module:
    """transformers' model in fp32: fresh, but norms are not 1, and attention and routers have opinions."""
    from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    made = (LlamaForCausalLM if model == "llama3" else Qwen3MoeForCausalLM)(config_of(model, args))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif any(part in name for part in ("mlp.gate.weight", "q_proj", "k_proj")):
                parameter.mul_(5)
    return made


def save(model: nn.Module, folder: Path, max_shard_size: str = "300KB") -> dict[str, Any]:
    """Writes it as transformers does, over many files with an index. Returns the index's weight_map."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def adapter_of(model: str, args: Any, folder: Path | None = None) -> Any:
    """The adapter that a training with TIDE takes."""
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_tide import specs

    specs.register(model)
    return get_train_spec(model).state_dict_adapter(args, str(folder) if folder else None)


def ours(model: str, args: Any, folder: Path) -> nn.Module:
    """TorchTitan's model with the weights of a folder, read as its trainer reads them."""
    import torch.distributed.checkpoint as dcp
    from torchtitan.protocols.train_spec import get_train_spec

    adapter = adapter_of(model, args, folder)
    made = get_train_spec(model).model_cls(args)
    with torch.no_grad():
        made.init_weights(buffer_device=torch.device("cpu"))
        for parameter in made.parameters():
            parameter.fill_(float("nan"))  # whatever is not read shows
    tensors = adapter.to_hf(made.state_dict())
    dcp.load(tensors, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)
    missing = made.load_state_dict(adapter.from_hf(tensors), strict=False).missing_keys
    assert not {key for key in missing if "expert_bias" not in key and "tokens_per_expert" not in key}, missing
    return made
