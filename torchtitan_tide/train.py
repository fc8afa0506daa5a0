"""The training entry that torchrun starts: TorchTitan's `Trainer`, or a model's own, with TIDE in the parallelize step.

`torchrun ... -m torchtitan_tide.train --job.config_file CONFIG.toml [--section.key=value ...]`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torchtitan_tide import cpu
from torchtitan_tide.check import world_size_from_environment
from torchtitan_tide.errors import ConfigError

if TYPE_CHECKING:
    from torchtitan.train import Trainer

# Before anything imports torchtitan: it looks for its device at import.
cpu.prepare()


def split_config_file(args: list[str]) -> tuple[str | None, list[str]]:
    """The value of --job.config_file (None without one), and the other arguments. Raises `ConfigError`."""
    path, rest = None, []
    i = 0
    while i < len(args):
        key, has_value, value = args[i].partition("=")
        i += 1
        if key.replace("-", "_") != "__job.config_file":
            rest.append(args[i - 1])
            continue
        if not has_value:
            if i == len(args):
                raise ConfigError("--job.config_file: needs a path")
            value = args[i]
            i += 1
        path = value
    return path, rest


def tokenizer_folder() -> str:
    """Folder of the Python manual's tokenizer: made by local rank 0, awaited by the others."""
    from torchtitan_tide import tokenizer

    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        return str(tokenizer.ensure_manual_tokenizer())
    return str(tokenizer.wait_for_manual_tokenizer())


def trainer_class(model: str) -> type[Trainer]:
    """TorchTitan's trainer of a model: flux and wan have one of their own."""
    if model == "flux":
        from torchtitan.models.flux.train import FluxTrainer

        return FluxTrainer
    if model == "wan":
        from torchtitan_tide.models.wan.trainer import WanTrainer

        return WanTrainer
    from torchtitan.train import Trainer

    return Trainer


def run(arguments: list[str], watch: Callable[[Trainer], AbstractContextManager[object]] = nullcontext) -> None:
    """Train. `arguments` are checked, in the form that TorchTitan's parser takes; the training runs inside `watch(trainer)`."""
    import torch.distributed as dist
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import logger

    from torchtitan_tide import metrics, parallelize
    from torchtitan_tide.network import NetworkWatch

    trainer, network = None, NetworkWatch()
    try:
        config = ConfigManager().parse_args(arguments)
        trainer = trainer_class(config.model.name)(config)
        if config.tide.early_gather:
            parallelize.overlap_optimizers(list(trainer.optimizers))
        metrics.start(trainer.metrics_processor)
        network.start()
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            with watch(trainer):
                trainer.train()
            if dist.get_rank() == 0:
                for line in metrics.summary_lines(trainer.metrics_processor):
                    logger.info(line)
            for line in network.lines():
                logger.info(line)
        parallelize.detach_all()
    finally:
        if trainer is not None:
            trainer.close()
    dist.destroy_process_group()


def main(
    args: list[str] | None = None, watch: Callable[[Trainer], AbstractContextManager[object]] = nullcontext
) -> int:
    """Train as `args` (default: the command line) say, inside `watch(trainer)`.

    Exit code: 0 trained, 2 a bad configuration (one line, from rank 0); other failures end in their traceback.
    """
    from torchtitan.tools.logging import init_logger

    from torchtitan_tide import job_check, tokenizer

    try:
        config_file, overrides = split_config_file(sys.argv[1:] if args is None else args)
        job = job_check.check(config_file, overrides, world_size_from_environment())
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    init_logger()
    arguments = job.arguments
    if job.config.model.name != "wan" and job.config.model.hf_assets_path == tokenizer.PYTHON_MANUAL:
        arguments = [arg for arg in arguments if not arg.startswith("--model.hf_assets_path=")]
        arguments.append(f"--model.hf_assets_path={tokenizer_folder()}")
    run(arguments, watch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
