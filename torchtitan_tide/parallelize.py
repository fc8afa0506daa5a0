"""TorchTitan's parallelize step, followed by the choice of who communicates: `tide.comm`.

The stock function applies FSDP2 and all else; the wrapper only looks at the `FSDPModule`s of what it returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torchtitan.tools.logging import logger

from tide_comm.config import TideConfig, TideConfigError
from torchtitan_tide.cpu import has_accelerator

_reports: list[Any] = []


def reports() -> list[Any]:
    """Reports of the `attach` calls of this process: one, or none without TIDE."""
    return list(_reports)


def detach_all() -> None:
    """Return every attached model to stock communication. Collective."""
    while _reports:
        _reports.pop().detach()


def overlap_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """tide.early_gather: `Report.overlap` for the trainer's optimizers. Raises `TideError` for one that it does not take."""
    for report in _reports:
        for optimizer in optimizers:
            report.overlap(optimizer)


def fsdp_modules(parts: Sequence[nn.Module]) -> list[FSDPModule]:
    """The modules of `parts` that `fully_shard` was applied to, in module order."""
    return [module for part in parts for module in part.modules() if isinstance(module, FSDPModule)]


def choose_communication(parts: Sequence[nn.Module], cfg: TideConfig) -> None:
    """Give the FSDP groups of `parts` (the model, or its pipeline stages on this rank) the collectives of `cfg.comm`.

    Collective over each shard group. Raises `TideConfigError` when the model cannot use what was asked.
    """
    modules = fsdp_modules(parts)
    if not modules and cfg.comm != "stock":
        raise TideConfigError(
            f'tide.comm = "{cfg.comm}": the model has no FSDP2 module; it takes at least two ranks, '
            'parallelism.data_parallel_shard_degree other than 1 and no simple_fsdp (or use "stock")'
        )
    on_cpu = not has_accelerator()
    for module in modules:
        if on_cpu or cfg.comm == "symm_mem":
            # gloo has no PREMUL_SUM, and NCCL's symmetric reduce-scatter takes plain sums only.
            module.set_force_sum_reduction_for_comms(True)
    if cfg.comm == "symm_mem":
        if on_cpu:
            raise TideConfigError('tide.comm = "symm_mem": needs CUDA GPUs; takes "stock" or "tide" without')
        for module in modules:
            # A module whose parameters all belong to its children has no parameter group: the call does nothing.
            module.set_symm_mem_for_comm("NCCL")
    elif cfg.comm == "tide":
        from tide_comm import attach

        report = attach(parts[0] if len(parts) == 1 else list(parts), cfg)
        _reports.append(report)
        if dist.get_rank() == 0:
            logger.info("TIDE, group by group:\n%s", report)


def wrap_parallelize(stock: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`stock`, a TrainSpec's parallelize_fn, followed by `choose_communication`."""

    @functools.wraps(stock)
    def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
        model = stock(model, parallel_dims, job_config)
        choose_communication([model], job_config.tide)
        return model

    parallelize.tide = True  # type: ignore[attr-defined]
    return parallelize


def wrap_pipelining(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`stock`, a TrainSpec's pipelining_fn, followed by one `choose_communication` over all stages of this rank.

    The stages share one arena a shard group, so they are attached together and not one by one as they are made.
    """

    @functools.wraps(stock)
    def pipeline(
        model: nn.Module,
        parallel_dims: Any,
        job_config: Any,
        device: Any,
        model_args: Any,
        parallelize_fn: Callable[..., nn.Module],
        loss_fn: Any,
    ) -> Any:
        stock_parallelize = getattr(parallelize_fn, "__wrapped__", parallelize_fn)
        made = stock(model, parallel_dims, job_config, device, model_args, stock_parallelize, loss_fn)
        choose_communication(made[1], job_config.tide)
        return made

    return pipeline
