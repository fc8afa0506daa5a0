"""FSDP2, activation checkpointing and compilation of the Wan transformer, with TorchTitan's functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_ddp, disable_fsdp_gradient_division
from torchtitan.tools.logging import logger

KEPT_BY_SELECTIVE_CHECKPOINTING = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
}
"""Attention only: over 31,200 tokens it is the dearest to repeat and the smallest to keep, 0.3 GB a block in bf16. The
linear layers' outputs would be 3 GB a block."""


def unsupported(parallel_dims: Any) -> str | None:
    """What of the [parallelism] degrees this model cannot do, in words; None if nothing."""
    for degree, name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        if getattr(parallel_dims, degree) > 1:
            return f"parallelism.{name}_parallel_degree = {getattr(parallel_dims, degree)}: wan takes 1"
    return None


def parallelize_wan(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """The model, with each block and the root as an FSDP2 group. Raises `ValueError` for other parallelisms."""
    if (reason := unsupported(parallel_dims)) is not None:
        raise ValueError(reason)
    # TorchTitan looks for blocks under the name `layers`; the model keeps the checkpoints' name for them.
    holder = nn.Module()
    holder.layers = model.blocks
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            holder,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=KEPT_BY_SELECTIVE_CHECKPOINTING,
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        apply_compile(holder, job_config.compile)
    if parallel_dims.fsdp_enabled:
        _apply_fsdp(model, parallel_dims, job_config)
    elif parallel_dims.dp_replicate_enabled:
        apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), enable_compile=compiled)
    return model


def _apply_fsdp(model: nn.Module, parallel_dims: Any, job_config: Any) -> None:
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    training = job_config.training
    options: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(names),
        # Inputs are left as they are: a timestep in bf16 is another timestep.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
    }
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    # "default" frees parameters after the forward, as without pipeline parallelism everywhere in TorchTitan.
    reshard = job_config.parallelism.fsdp_reshard_after_forward != "never"
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        fully_shard(block, **options, reshard_after_forward=reshard)
    fully_shard(model, **options)
    disable_fsdp_gradient_division(model)
    logger.info("Applied %s to the model", "HSDP" if len(names) == 2 else "FSDP")
