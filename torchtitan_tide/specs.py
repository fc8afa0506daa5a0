"""TorchTitan's train specs of llama3 and qwen3 with TIDE's parallelize step, tokenizer and small flavors; and wan's.

Importing nothing of TorchTitan at module level: `torchtitan_tide.cpu.prepare()` has to run first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

STOCK_MODELS = ("llama3", "qwen3")
MODELS = (*STOCK_MODELS, "wan")
OWN_FLAVOR_PREFIX = "tide_"


def _own_flavors(model: str) -> dict[str, Any]:
    """Flavors that train on two CPU cores in a minute or two; their vocabulary follows the tokenizer."""
    if model == "llama3":
        from torchtitan.models.llama3 import TransformerModelArgs

        return {
            "tide_debug": TransformerModelArgs(
                dim=128, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=2048, multiple_of=64, rope_theta=500000
            )
        }
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3ModelArgs

    dense = Qwen3ModelArgs(
        vocab_size=2048, head_dim=32, dim=128, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=384, qk_norm=True
    )
    routing = MoEArgs(
        num_experts=8, num_shared_experts=0, top_k=2, score_func="softmax", route_norm=True, score_before_experts=False
    )
    moe = dataclasses.replace(dense, moe_enabled=True, moe_inter_dim=128, moe_args=routing)
    return {"tide_debug": dense, "tide_debug_moe": moe}


def _build_tokenizer(spec: Any, build: Callable[..., Any]) -> Callable[..., Any]:
    """`build`, which then fits the model's vocabulary: TorchTitan builds the tokenizer first and compares nothing."""

    @functools.wraps(build)
    def build_tokenizer(job_config: Any) -> Any:
        tokenizer = build(job_config)
        flavor, tokens = job_config.model.flavor, tokenizer.get_vocab_size()
        model_args = spec.model_args[flavor]
        if flavor.startswith(OWN_FLAVOR_PREFIX):
            model_args.vocab_size = tokens
        elif model_args.vocab_size < tokens:
            raise ValueError(
                f"model.hf_assets_path = {job_config.model.hf_assets_path!r}: the tokenizer has {tokens} tokens, "
                f"model.flavor = {flavor!r} only {model_args.vocab_size}"
            )
        return tokenizer

    return build_tokenizer


def _build_dataloader(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, **more: Any) -> Any:
        from torchtitan_tide.data import check_share

        dataloader = build(
            dp_world_size=dp_world_size, dp_rank=dp_rank, tokenizer=tokenizer, job_config=job_config, **more
        )
        if job_config.training.dataset.lower() == "text_folder":
            check_share(dataloader, dp_world_size)
        return dataloader

    return build_dataloader


def register() -> None:
    """Register the datasets and the wrapped train specs with TorchTitan; calling it again changes nothing."""
    from torchtitan.protocols import train_spec

    from torchtitan_tide import cpu, data, metrics, parallelize

    data.register()
    cpu.prepare_moe()
    for name in STOCK_MODELS:
        if name in train_spec._extra_train_specs:
            continue
        stock = train_spec.get_train_spec(name)
        flavors = {**stock.model_args, **_own_flavors(name)}
        spec = dataclasses.replace(stock, model_args=flavors)
        train_spec.register_train_spec(
            name,
            dataclasses.replace(
                spec,
                parallelize_fn=parallelize.wrap_parallelize(spec.parallelize_fn),
                pipelining_fn=spec.pipelining_fn and parallelize.wrap_pipelining(spec.pipelining_fn),
                build_tokenizer_fn=spec.build_tokenizer_fn and _build_tokenizer(spec, spec.build_tokenizer_fn),
                build_dataloader_fn=_build_dataloader(spec.build_dataloader_fn),
                build_metrics_processor_fn=spec.build_metrics_processor_fn or metrics.build,
            ),
        )
    if "wan" not in train_spec._extra_train_specs:
        from torchtitan_tide.models.wan.spec import train_spec as wan_spec

        wan = wan_spec()
        wan = dataclasses.replace(
            wan,
            parallelize_fn=parallelize.wrap_parallelize(wan.parallelize_fn),
            build_metrics_processor_fn=metrics.build,
        )
        train_spec.register_train_spec("wan", wan)


def trainer_class(model: str) -> type:
    """The trainer of a model: TorchTitan's, or a model's own, as TRAIN_FILE chooses it in TorchTitan."""
    if model == "wan":
        from torchtitan_tide.models.wan.trainer import WanTrainer

        return WanTrainer
    from torchtitan.train import Trainer

    return Trainer
