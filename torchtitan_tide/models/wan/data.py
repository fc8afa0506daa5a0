"""Wan's dataloader: samples of a source, shared out over ranks, in an order that a checkpoint can continue."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.dataloader import ParallelAwareDataloader

from torchtitan_tide.models.wan.args import WanModelArgs
from torchtitan_tide.models.wan.samples import Sample, Source, condition_of, normalise

DATASETS = ("wan_photographs", "wan_photographs_validation", "wan_parquet", "wan_webdataset", "wan_noise")


def open_source(name: str, path: str | None, args: WanModelArgs, latents: str) -> Source:
    """The source that a TOML file's `dataset` names. Raises `ValueError` when it is not there or lacks something."""
    first_frame = args.condition_channels > 0
    if name.startswith("wan_photographs"):
        from torchtitan_tide.models.wan.photographs import PhotographSource

        split = "validation" if name.endswith("validation") else "train"
        return PhotographSource(split, args.text_dim, first_frame)  # type: ignore[arg-type]
    if name == "wan_noise":
        from torchtitan_tide.models.wan.noise import NoiseSource

        return NoiseSource(args.text_len, args.text_dim, first_frame)
    if path is None:
        raise ValueError(f'dataset = "{name}": needs dataset_path')
    if name == "wan_parquet":
        from torchtitan_tide.models.wan.parquet import ParquetSource

        return ParquetSource(path, first_frame, latents)
    if name == "wan_webdataset":
        from torchtitan_tide.models.wan.webdataset import WebdatasetSource

        return WebdatasetSource(path, first_frame, latents)
    raise ValueError(f"dataset = {name!r}: unknown, takes {', '.join(DATASETS)}")


class WanDataset(IterableDataset, Stateful):
    """Samples without end: an epoch after the other, each with the shards in another order.

    A rank reads shards of its own; where there are fewer shards than ranks, it reads all and takes samples of its own.
    Yields ({"text", "condition"?}, latents): fp32, (text_len, text_dim), (20, frames, rows, columns), (16, frames, ...).
    """

    def __init__(self, source: Source, args: WanModelArgs, rank: int, ranks: int, latents: str = "normalised") -> None:
        self.source, self.args, self.rank, self.ranks = source, args, rank, ranks
        self.raw = latents == "raw"
        self.epoch = self.position = self.index = 0

    def state_dict(self) -> dict[str, int]:
        """Where the next sample is: epoch, shard in the epoch's order, sample in the shard."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "index": self.index,
            "shards": self.source.shards,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there. Raises `ValueError` when the source has other shards than then."""
        if state["shards"] != self.source.shards:
            raise ValueError(
                f"the checkpoint's data had {state['shards']} shards, there are {self.source.shards}: "
                'its position means nothing here (checkpoint.exclude_from_loading = ["dataloader"] starts over)'
            )
        self.epoch, self.position, self.index = state["epoch"], state["position"], state["index"]

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        part, parts = self.rank * workers + number, self.ranks * workers
        by_shard = self.source.shards >= parts
        while True:
            mine = list(range(self.source.shards))[part::parts] if by_shard else list(range(self.source.shards))
            random.Random(self.epoch).shuffle(mine)
            whole_epoch, found = self.position == self.index == 0, False
            for shard in mine[self.position :]:
                for sample in self.source.read(shard, self.index):
                    own = by_shard or (self.index + shard) % parts == part
                    self.index += 1
                    if own:
                        found = True
                        yield self._tensors(sample())
                self.position, self.index = self.position + 1, 0
            if whole_epoch and not found:
                raise ValueError(f"the dataset has too few samples for {parts} ranks and dataloader workers")
            self.epoch, self.position = self.epoch + 1, 0

    def _tensors(self, sample: Sample) -> tuple[dict[str, Tensor], Tensor]:
        args = self.args
        latents, text, first_frame = sample.latents, sample.text, sample.first_frame
        if latents.dim() != 4 or latents.shape[0] != args.latent_channels:
            raise ValueError(f"latents {tuple(latents.shape)}: takes ({args.latent_channels}, frames, rows, columns)")
        if text.dim() != 2 or text.shape[0] > args.text_len or text.shape[1] != args.text_dim:
            raise ValueError(f"text {tuple(text.shape)}: takes (up to {args.text_len}, {args.text_dim})")
        padded = torch.nn.functional.pad(text.float(), (0, 0, 0, args.text_len - text.shape[0]))
        inputs = {"text": padded}
        if args.condition_channels:
            if first_frame is None or first_frame.shape != latents.shape:
                found = None if first_frame is None else tuple(first_frame.shape)
                raise ValueError(f"first frame's latents {found}: take the video's {tuple(latents.shape)}")
            inputs["condition"] = condition_of(normalise(first_frame) if self.raw else first_frame)
        return inputs, normalise(latents) if self.raw else latents.float()


def collate(samples: list[tuple[dict[str, Tensor], Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """A batch. Raises `ValueError` for samples of different sizes."""
    shapes = sorted({tuple(latents.shape) for _, latents in samples})
    if len(shapes) > 1:
        raise ValueError(f"a batch has latents of {shapes}: takes one size, or local_batch_size 1")
    inputs = {name: torch.stack([given[name] for given, _ in samples]) for name in samples[0][0]}
    return inputs, torch.stack([latents for _, latents in samples])


def build_loader(
    job_config: Any, args: WanModelArgs, rank: int, ranks: int, validation: bool = False
) -> ParallelAwareDataloader:
    """The dataloader of [training] or [validation] for one of `ranks` data-parallel ranks."""
    section = job_config.validation if validation else job_config.training
    source = open_source(section.dataset.lower(), section.dataset_path, args, job_config.wan.latents)
    dataset = WanDataset(source, args, rank, ranks, job_config.wan.latents)
    options = {**asdict(section.dataloader), "batch_size": section.local_batch_size, "collate_fn": collate}
    return ParallelAwareDataloader(dataset, rank, ranks, **options)
