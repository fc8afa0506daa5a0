"""The validation loss: the objective on held-out samples, with the same noise and noise levels every time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtitan.components.validate import BaseValidator
from torchtitan.distributed import utils as dist_utils

from torchtitan_tide.models.wan.data import build_loader
from torchtitan_tide.models.wan.objective import generator, noised
from torchtitan_tide.models.wan.trainer import VALIDATION_STREAM, objective_of

LEVELS = 8
"""Noise levels that samples take in turn, evenly over the expert's interval of u: the loss depends much on them."""


class WanValidator(BaseValidator):
    """Mean squared error over `validation.steps` batches a rank. No text is dropped."""

    def __init__(self, job_config: Any, model_args: Any, rank: int, ranks: int, **built: Any) -> None:
        super().__init__(job_config)
        self.model_args, self.rank, self.ranks = model_args, rank, ranks
        self.objective = objective_of(job_config, model_args)
        self.parallel_dims, self.loss_fn = built["parallel_dims"], built["loss_fn"]
        self.context, self.amp = built["validation_context"], built["maybe_enable_amp"]
        self.metrics_processor = built["metrics_processor"]

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Evaluate and log. Collective."""
        model = model_parts[0]
        model.eval()
        device = next(model.parameters()).device
        # Made anew, so that every validation sees the same samples.
        batches = iter(build_loader(self.job_config, self.model_args, self.rank, self.ranks, validation=True))
        total = torch.zeros(2, dtype=torch.float64, device="cpu")
        seen = 0
        for batch in range(self.job_config.validation.steps):
            input_dict, labels = next(batches)
            labels = labels.to(device)
            count = labels.shape[0]
            draw = generator(device, VALIDATION_STREAM, batch, self.rank)
            noise = torch.randn(labels.shape, generator=draw, device=device)
            uniform = ((torch.arange(seen, seen + count, device=device) + self.rank) % LEVELS + 0.5) / LEVELS
            seen += count
            self.metrics_processor.ntokens_since_last_log += labels.numel() // self.model_args.elements_per_token
            latents, t, target = noised(labels, noise, self.objective.noise_levels(uniform))
            inputs = {name: value.to(device) for name, value in input_dict.items()}
            with self.context():
                with self.amp:
                    velocity = model(latents, t, inputs["text"], inputs.get("condition"))
                squares = self.loss_fn(velocity, target)
            total += torch.tensor([squares.item(), labels.numel()], dtype=torch.float64)
        squared, elements = total[0].to(device, torch.float32), total[1].to(device, torch.float32)
        if self.parallel_dims.dp_cp_enabled:
            mesh = self.parallel_dims.get_optional_mesh("loss")
            loss = dist_utils.dist_sum(squared, mesh) / dist_utils.dist_sum(elements, mesh)
        else:
            loss = (squared / elements).item()
        self.metrics_processor.log_validation(loss=loss, step=step)
        model.train()
