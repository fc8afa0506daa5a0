"""Wan's TorchTitan train spec, without TIDE: `torchtitan_tide.specs` adds that, as to TorchTitan's own models."""

from __future__ import annotations

from typing import Any

from torchtitan.components.loss import build_mse_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_tide.models.wan.args import flavors
from torchtitan_tide.models.wan.checkpoints import WanStateDictAdapter
from torchtitan_tide.models.wan.data import build_loader
from torchtitan_tide.models.wan.model import WanModel
from torchtitan_tide.models.wan.parallelize import parallelize_wan
from torchtitan_tide.models.wan.validate import WanValidator


def train_spec() -> TrainSpec:
    """A new spec; there is no tokenizer, and no pipelining."""
    model_args = flavors()

    def build_dataloader(dp_world_size: int, dp_rank: int, job_config: Any, **rest: Any) -> Any:
        return build_loader(job_config, model_args[job_config.model.flavor], dp_rank, dp_world_size)

    def build_validator(job_config: Any, dp_world_size: int, dp_rank: int, **rest: Any) -> WanValidator:
        return WanValidator(job_config, model_args[job_config.model.flavor], dp_rank, dp_world_size, **rest)

    return TrainSpec(
        model_cls=WanModel,
        model_args=model_args,
        parallelize_fn=parallelize_wan,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=None,
        build_loss_fn=build_mse_loss,
        build_validator_fn=build_validator,
        state_dict_adapter=WanStateDictAdapter,
    )
