"""`tide plan`: a job's programs for machines that need not be there.

The model is built on the meta device over a fake process group and goes through TorchTitan's own converters and parallelize step, so its
groups are those of the job. Nothing is allocated, nothing is sent.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchtitan_tide.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from tide_comm.fsdp.planned import ModelPlan

MAX_GPUS = 1024 * 64
"""A bound on M*L that keeps a typing error from filling the memory."""


def run(config: str, machines: int, gpus: int, json_file: str | None, overrides: tuple[str, ...]) -> int:
    """Exit code: 0 planned, 2 not (one line on stderr)."""
    started = time.monotonic()
    try:
        plan = plan_job(config, list(overrides), machines, gpus)
        if json_file is not None:
            _write(json_file, plan, machines, gpus)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    where = f"{machines} machine{'s' * (machines > 1)} of {gpus} GPUs"
    print(f"{config} on {where}; taken for granted: Hopper or newer, peer access, a rail a GPU")
    print(plan)
    print(f"Planned in {time.monotonic() - started:.1f} s.")
    return 0


def plan_job(config_file: str, overrides: list[str], machines: int, gpus: int) -> ModelPlan:
    """Rank 0's plan of a job on `machines` machines of `gpus` GPUs. Raises `ConfigError` with what is wrong in one line."""
    for name, value in (("--machines", machines), ("--gpus", gpus)):
        if value < 1:
            raise ConfigError(f"{name} {value}: takes a whole number >= 1")
    if machines * gpus > MAX_GPUS:
        raise ConfigError(f"--machines {machines} --gpus {gpus}: takes at most {MAX_GPUS} GPUs together")
    from torchtitan_tide import job_check

    job = job_check.check(config_file, overrides, machines * gpus, here=False)
    from tide_comm.fsdp.planned import plan
    from tide_comm.fsdp.verdict import Capabilities

    emulated = job.config.tide.gpus_per_machine

    def place(rank: int) -> tuple[int, int]:
        return rank // gpus, rank % gpus // emulated if emulated else 0

    with model_parts(job.config, machines * gpus) as parts:
        # What machines of the kind that TIDE is for can do: Hopper or newer, peer access, a network line a GPU.
        return plan(parts, job.config.tide, place, Capabilities("cuda", engine=True))


@contextmanager
def model_parts(config: Any, world_size: int, rank: int = 0) -> Iterator[list[nn.Module]]:
    """`rank`'s model of a job, or its pipeline stages, on the meta device and over a fake process group that ends with the context.

    Raises `ConfigError` for what TorchTitan and FSDP2 refuse: degrees, dimensions that do not divide, extensions that are not installed.
    """
    with fake_process_group(world_size, rank):
        try:
            yield _build(config, world_size)
        except (AssertionError, ValueError, RuntimeError, ImportError) as error:
            model = config.model
            raise ConfigError(f"{model.name} {model.flavor} on {world_size} GPUs: {error}") from error


@contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """A process group of `world_size` ranks in which nothing is sent; this process is `rank`."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _build(job_config: Any, world_size: int) -> list[nn.Module]:
    """This rank's model, or its pipeline stages: as TorchTitan's `Trainer` makes them, up to where it would allocate memory."""
    import torch
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.protocols import model_converter
    from torchtitan.protocols.train_spec import get_train_spec
    from torchtitan.tools import utils

    from torchtitan_tide import job_check

    config = copy.deepcopy(job_config)
    # They change no group, and importing a compiler takes longer than all else here.
    config.compile.enable = config.parallelism.enable_async_tensor_parallel = False
    config.activation_checkpoint.mode = "none"
    dims = job_check.parallel_dims(config, world_size)
    dims.build_mesh()
    if config.experimental.custom_import:
        importlib.import_module(config.experimental.custom_import)
    spec = get_train_spec(config.model.name)
    args = copy.deepcopy(spec.model_args[config.model.flavor])  # the spec's own are shared with whoever comes next
    args.update_from_config(config)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model_cls(args)
    for name in config.model.converters:
        if name not in model_converter._registry_model_converter_cls:
            raise ValueError(f"model.converters: {name!r} is unknown")
    model_converter.build_model_converters(config, dims).convert(model)
    # Without TIDE's wrapper: attaching needs real machines.
    parallelize = getattr(spec.parallelize_fn, "__wrapped__", spec.parallelize_fn)
    if not dims.pp_enabled:
        return [parallelize(model, dims, config)]
    if spec.pipelining_fn is None:
        raise ValueError("does not support pipeline parallelism")
    pipeline = getattr(spec.pipelining_fn, "__wrapped__", spec.pipelining_fn)
    loss = spec.build_loss_fn(config, parallel_dims=dims)
    return list(pipeline(model, dims, config, torch.device("meta"), args, parallelize, loss)[1])


def _write(path: str, plan: ModelPlan, machines: int, gpus: int) -> None:
    from tide_comm.fsdp.plan_report import as_data

    try:
        with open(path, "w") as file:
            json.dump({"machines": machines, "gpus": gpus, **as_data(plan)}, file, indent=1)
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error.strerror}") from None
