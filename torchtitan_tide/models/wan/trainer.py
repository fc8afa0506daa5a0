"""TorchTitan's trainer with a diffusion step, after the template of its own flux trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torchtitan.train import Trainer

from torchtitan_tide.models.wan.objective import Objective, drop_text, generator, noised

NOISE_STREAM, VALIDATION_STREAM = 1, 2


def objective_of(job_config: Any, model_args: Any) -> Objective:
    """The objective that a TOML file's [wan] describes."""
    return Objective(job_config.wan.expert, model_args.boundary_t, job_config.wan.shift)


def load_empty_text(path: str, model_args: Any) -> Tensor | None:
    """The empty text's embedding: fp32, (text_len, text_dim), zeros appended; None without a path. Raises `ValueError`."""
    if not path:
        return None
    import numpy

    found = torch.from_numpy(numpy.load(path)).float()
    if found.dim() != 2 or found.shape[0] > model_args.text_len or found.shape[1] != model_args.text_dim:
        expected = f"(up to {model_args.text_len}, {model_args.text_dim})"
        raise ValueError(f"wan.empty_text = {path!r}: has the shape {tuple(found.shape)}, takes {expected}")
    return torch.nn.functional.pad(found, (0, 0, 0, model_args.text_len - found.shape[0]))


class WanTrainer(Trainer):
    """Latents and text embeddings come precomputed from the dataloader; noise, timestep and text drop are drawn here.

    What is drawn follows from the seed, the step, the microbatch and the rank, so a resumed training draws the same.
    """

    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        self.objective = objective_of(job_config, self.model_args)
        self.empty_text = load_empty_text(job_config.wan.empty_text, self.model_args)
        self._dp_rank = self.parallel_dims.get_mesh("batch").get_local_rank() if self.parallel_dims.dp_enabled else 0
        # TorchTitan has seeded all ranks alike, with debug.seed or a number of its own.
        self._seed = torch.initial_seed()
        self._microbatch = 0

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, Tensor], Tensor]]
    ) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """TorchTitan's, which counts the labels' elements as tokens: here a token is a patch of all channels."""
        for input_dict, labels in super().batch_generator(data_iterable):
            surplus = labels.numel() - labels.numel() // self.model_args.elements_per_token
            self.ntokens_seen -= surplus
            self.metrics_processor.ntokens_since_last_log -= surplus
            yield input_dict, labels

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """One optimizer step, over all microbatches."""
        self._microbatch = 0
        super().train_step(data_iterator)

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        """This rank's share of the loss: a sum over elements, divided by the elements of all ranks and microbatches.

        input_dict: `text` (batch, tokens, channels), and `condition` with image to video; labels: clean latents (batch,
        channels, frames, rows, columns).
        """
        draw = generator(self.device, NOISE_STREAM, self._seed, self.step, self._microbatch, self._dp_rank)
        self._microbatch += 1
        batch = labels.shape[0]
        noise = torch.randn(labels.shape, generator=draw, device=labels.device)
        uniform, drop = torch.rand((2, batch), generator=draw, device=labels.device).unbind(0)
        latents, t, target = noised(labels, noise, self.objective.noise_levels(uniform))
        text = drop_text(input_dict["text"], self.empty_text, drop, self.job_config.wan.text_drop)
        with self.train_context():
            with self.maybe_enable_amp:
                velocity = self.model_parts[0](latents, t, text, input_dict.get("condition"))
            # In fp32, and outside autocast.
            loss = self.loss_fn(velocity, target) / global_valid_tokens
            del velocity
            loss.backward()
        return loss
