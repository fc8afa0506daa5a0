"""TorchTitan's train specs with TIDE's parallelize step, tokenizer, adapters and flavors.

Importing nothing of TorchTitan at module level: `torchtitan_tide.cpu.prepare()` has to run first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torchtitan_tide.flavors import DEBUG_PREFIX, own_flavors

MODELS = ("llama3", "llama3_ft", "llama4", "qwen3", "deepseek_v3", "gpt_oss", "flux", "wan")
"""What TorchTitan 0.2.2 ships, flux only where its dependencies are; and the project's own wan."""

WITHOUT_FSDP2 = ("simple_fsdp", "compiler_toolkit", "autoparallel")
"""TorchTitan's experiments that shard with DTensor or a compiler: they have no FSDP2 module."""


def without_fsdp2(name: str) -> str:
    """Why a model of this name has nothing that TIDE could replace, or ""."""
    family = name.partition(".")[0]
    if family not in WITHOUT_FSDP2:
        return ""
    return f"{family} shards without FSDP2 (fully_shard), whose communication TIDE replaces"


def _build_tokenizer(spec: Any, build: Callable[..., Any]) -> Callable[..., Any]:
    """`build`, which then fits the model's vocabulary: TorchTitan builds the tokenizer first and compares nothing."""

    @functools.wraps(build)
    def build_tokenizer(job_config: Any) -> Any:
        tokenizer = build(job_config)
        flavor, tokens = job_config.model.flavor, tokenizer.get_vocab_size()
        model_args = spec.model_args[flavor]
        if flavor.startswith(DEBUG_PREFIX):
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


def available() -> dict[str, str]:
    """Each of MODELS -> "", or why TorchTitan cannot import it here."""
    from torchtitan.protocols import train_spec

    _add_wan()
    found = {}
    for name in MODELS:
        try:
            train_spec.get_train_spec(name)
            found[name] = ""
        except ImportError as error:
            found[name] = str(error)
    return found


def register(name: str | None = None) -> None:
    """Register the datasets, and the train spec of `name` (None: of all MODELS) with TIDE's wrappers.

    Calling it again changes nothing. Raises what TorchTitan does for an unknown name, and `ImportError` for a model whose
    dependencies are not installed; without a name such models are left out.
    """
    from torchtitan_tide import cpu, data

    data.register()
    cpu.prepare_moe()
    cpu.prepare_attention()
    _initialize_gate_bias()
    _add_wan()
    if name is not None:
        _wrap(name)
        return
    for model, problem in available().items():
        if not problem:
            _wrap(model)


def _add_wan() -> None:
    """Make TorchTitan know the model that it does not bring."""
    from torchtitan.protocols import train_spec

    if "wan" not in train_spec._extra_train_specs:
        from torchtitan_tide.models.wan.spec import train_spec as wan_spec

        train_spec.register_train_spec("wan", wan_spec())


def _initialize_gate_bias() -> None:
    """gpt_oss routes with a bias that TorchTitan 0.2.2 never initializes: a fresh model would start from what memory holds, NaN too."""
    from torch import nn
    from torchtitan.models.moe import moe

    router = moe.TokenChoiceTopKRouter
    stock = router.init_weights
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def init_weights(self: Any, init_std: float) -> None:
        stock(self, init_std)
        if self.gate.bias is not None:
            nn.init.zeros_(self.gate.bias)

    router.init_weights = init_weights  # type: ignore[method-assign]


def _wrap(name: str) -> None:
    from torchtitan.protocols import train_spec

    from torchtitan_tide import adapters, metrics, parallelize

    stock = train_spec.get_train_spec(name)
    if getattr(stock.parallelize_fn, "tide", False):
        return
    spec = dataclasses.replace(stock, model_args={**stock.model_args, **own_flavors(name)})
    # Not `register_train_spec`, which refuses a name that a custom_import has registered.
    train_spec._extra_train_specs[name] = dataclasses.replace(
        spec,
        parallelize_fn=parallelize.wrap_parallelize(spec.parallelize_fn),
        pipelining_fn=spec.pipelining_fn and parallelize.wrap_pipelining(spec.pipelining_fn),
        build_tokenizer_fn=spec.build_tokenizer_fn and _build_tokenizer(spec, spec.build_tokenizer_fn),
        build_dataloader_fn=_build_dataloader(spec.build_dataloader_fn),
        build_metrics_processor_fn=spec.build_metrics_processor_fn or metrics.build,
        state_dict_adapter=adapters.mended(spec.state_dict_adapter),
    )
