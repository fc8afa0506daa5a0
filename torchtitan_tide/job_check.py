"""Everything wrong with a job that can be told before it starts, as one `ConfigError`.

In order: the file, its TOML, names and types, values, and then what does not go together or does not exist here.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from dataclasses import dataclass, fields
from typing import Any

import torch

from torchtitan_tide import cpu
from torchtitan_tide.errors import ConfigError, did_you_mean
from torchtitan_tide.hints import check_tables, flatten
from torchtitan_tide.overrides import merge, parse, to_arguments
from torchtitan_tide.tokenizer import PYTHON_MANUAL
from torchtitan_tide.toml_file import read_toml

CONFIG_MODULE = "torchtitan_tide.job_config"


@dataclass
class Job:
    """A job that passed: TorchTitan's merged `JobConfig`, and the arguments that make TorchTitan build the same."""

    config: Any
    arguments: list[str]


def check(config_file: str | None, overrides: list[str], world_size: int, here: bool = True) -> Job:
    """The checked job of a TOML file (None: TorchTitan's defaults) and overrides, for `world_size` ranks.

    `here`: the job runs on this machine, so its devices, tokenizer and datasets are looked for; False for a job that is only planned.
    Raises `ConfigError` at the first thing that is wrong. Writes nothing.
    """
    tables = read_toml(config_file) if config_file is not None else {}
    where = config_file or "defaults"
    cpu.prepare()
    config_class, module = _config_class(tables, overrides, where)
    options = flatten(config_class)
    check_tables(config_class, tables, where)
    values = parse(overrides, options)
    if "job.config_file" in values:
        raise ConfigError("override --job.config_file: the file is named once, as the first argument")
    values["job.custom_config_module"] = module
    merged = copy.deepcopy(tables)
    merge(values, merged)
    config = _build(config_class, merged, where)
    _check_values(config)
    dims = _check_degrees(config, world_size)
    _check_model(config)
    if here:
        _check_devices(config)
        _check_wandb(config)
        _check_converters(config, dims)
        _check_data(config, dims.dp_replicate * dims.dp_shard)
        _check_weights(config, dims)
    file_argument = [f"--job.config_file={config_file}"] if config_file is not None else []
    return Job(config, file_argument + to_arguments(values, options))


def _config_class(tables: dict[str, Any], overrides: list[str], where: str) -> tuple[type, str]:
    """TorchTitan's `JobConfig` merged with that of the custom_config_module, and the module's name."""
    from torchtitan.config import ConfigManager, JobConfig

    job = tables.get("job", {})
    module = job.get("custom_config_module") if isinstance(job, dict) else None
    for i, arg in enumerate(overrides):
        key, has_value, value = arg.partition("=")
        if key.replace("-", "_") == "__job.custom_config_module":
            module = value if has_value else "".join(overrides[i + 1 : i + 2])
    # A TOML file written for TorchTitan alone gets the [tide] section too, with its defaults.
    module = module or CONFIG_MODULE
    try:
        custom = importlib.import_module(module).JobConfig
        merged = ConfigManager._merge_configs(JobConfig, custom)
    except Exception as error:
        raise ConfigError(f"{where}: job.custom_config_module = {module!r}: no JobConfig to be had: {error}") from None
    if "tide" not in {f.name for f in fields(merged)}:
        raise ConfigError(f"{where}: job.custom_config_module = {module!r}: its JobConfig needs the field `tide`")
    return merged, module


def _build(config_class: type, tables: dict[str, Any], where: str) -> Any:
    from torchtitan.config import ConfigManager

    try:
        return ConfigManager()._dict_to_dataclass(config_class, tables)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_values(config: Any) -> None:
    """Numbers that TorchTitan would divide by or loop over, and names it looks up late."""
    for name in (
        "training.steps",
        "training.local_batch_size",
        "training.seq_len",
        "training.gc_freq",
        "metrics.log_freq",
        "checkpoint.interval",
        "validation.freq",
    ):
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        if value < 1:
            raise ConfigError(f"{name} = {value}: takes a whole number >= 1")
    if config.optimizer.name not in ("Adam", "AdamW"):
        near = did_you_mean(config.optimizer.name, ["Adam", "AdamW"])
        raise ConfigError(f"optimizer.name = {config.optimizer.name!r}: unknown{near}")
    saved = config.checkpoint
    if saved.enable and saved.last_save_in_hf and not saved.last_save_model_only:
        # TorchTitan asserts it when the training is over.
        raise ConfigError("checkpoint.last_save_in_hf = true: takes checkpoint.last_save_model_only = true")
    if os.path.exists(config.job.dump_folder) and not os.path.isdir(config.job.dump_folder):
        raise ConfigError(f"job.dump_folder = {config.job.dump_folder!r}: is a file, takes a folder")


def parallel_dims(config: Any, world_size: int) -> Any:
    """TorchTitan's `ParallelDims` of a job. Raises its `AssertionError` for degrees that do not make up the ranks."""
    from torchtitan.distributed import ParallelDims

    degrees = config.parallelism
    return ParallelDims(
        dp_shard=degrees.data_parallel_shard_degree,
        dp_replicate=degrees.data_parallel_replicate_degree,
        cp=degrees.context_parallel_degree,
        tp=degrees.tensor_parallel_degree,
        pp=degrees.pipeline_parallel_degree,
        ep=degrees.expert_parallel_degree,
        etp=degrees.expert_tensor_parallel_degree,
        world_size=world_size,
    )


def _check_degrees(config: Any, world_size: int) -> Any:
    """What so many ranks allow. Returns TorchTitan's `ParallelDims`."""
    comm = config.tide.comm
    try:
        dims = parallel_dims(config, world_size)
    except AssertionError as error:
        raise ConfigError(f"[parallelism] with {world_size} ranks: {error}") from None
    if comm != "stock" and not dims.fsdp_enabled:
        raise ConfigError(
            f'tide.comm = "{comm}": nothing is sharded with {world_size} ranks and these [parallelism] degrees; '
            'takes at least two ranks to a shard group, or "stock"'
        )
    if config.tide.early_gather and (config.optimizer.early_step_in_backward or dims.pp_enabled):
        raise ConfigError(
            "tide.early_gather = true: needs one optimizer that steps after backward; takes false with "
            "optimizer.early_step_in_backward or pipeline parallelism"
        )
    if config.fault_tolerance.enable:
        raise ConfigError(
            "fault_tolerance.enable = true: needs TorchTitan's own trainer for torchft (torchtitan.experiments.ft.train), "
            "which TIDE does not start; takes false"
        )
    if config.checkpoint.create_seed_checkpoint and world_size != 1:
        raise ConfigError("checkpoint.create_seed_checkpoint = true: takes one rank (NGPU=1)")
    rank_batch = config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    if config.training.global_batch_size > 0 and config.training.global_batch_size % rank_batch:
        raise ConfigError(
            f"training.global_batch_size = {config.training.global_batch_size}: takes -1 or a multiple of "
            f"local_batch_size * data-parallel ranks = {rank_batch}"
        )
    return dims


def _check_devices(config: Any) -> None:
    """What the devices here allow."""
    if config.tide.comm == "symm_mem" and not torch.cuda.is_available():
        raise ConfigError('tide.comm = "symm_mem": needs CUDA GPUs, none found here; takes "stock" or "tide"')
    if config.profiling.enable_memory_snapshot and not cpu.has_accelerator():
        raise ConfigError("profiling.enable_memory_snapshot = true: needs a GPU, takes false here")
    mode = config.checkpoint.async_mode.lower()
    if config.checkpoint.enable and mode == "async_with_pinned_mem" and not cpu.has_accelerator():
        raise ConfigError(
            'checkpoint.async_mode = "async_with_pinned_mem": needs a GPU; takes "disabled" or "async" here'
        )


def _check_converters(config: Any, dims: Any) -> None:
    """Converters have to exist, and to find here what they need: TorchTitan asks for both when the ranks are running."""
    from torchtitan.protocols import model_converter

    known = model_converter._registry_model_converter_cls
    for name in config.model.converters:
        if name not in known:
            raise ConfigError(f"model.converters: {name!r} is unknown{did_you_mean(name, known)}")
    try:
        model_converter.build_model_converters(copy.deepcopy(config), dims)  # they take names out of the config
    except (AssertionError, ImportError, ValueError) as error:
        raise ConfigError(f"model.converters = {config.model.converters}: {error}") from None


def _check_wandb(config: Any) -> None:
    """TorchTitan would log an error and train on without it."""
    if not config.metrics.enable_wandb:
        return
    found = importlib.util.find_spec("wandb")
    # A folder `wandb` of earlier runs is found too, but is no module with a file.
    if found is None or found.origin is None:
        raise ConfigError(
            'metrics.enable_wandb = true: wandb is not installed; pip install -e ".[wandb]" (with scripts/train.sh: TIDE_EXTRAS=wandb)'
        )


def _check_model(config: Any) -> None:
    """Model and flavor have to exist, and the model has to have FSDP2 modules if they are to communicate otherwise than stock."""
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_tide import specs

    model, custom = config.model, config.experimental.custom_import
    if custom:
        # As the trainer does: it may register the model. TIDE then wraps what it registered.
        try:
            importlib.import_module(custom)
        except ImportError as error:
            raise ConfigError(f"experimental.custom_import = {custom!r}: {error}") from None
    if config.tide.comm != "stock" and (problem := specs.without_fsdp2(model.name)):
        raise ConfigError(
            f'model.name = {model.name!r} with tide.comm = "{config.tide.comm}": {problem}; takes "stock"'
        )
    try:
        specs.register(model.name)
        spec = get_train_spec(model.name)
        if model.name == "flux" and not hasattr(config, "encoder"):
            raise ConfigError('model.name = "flux": needs job.custom_config_module = "torchtitan_tide.job_config_flux"')
    except (ValueError, ImportError) as error:
        raise ConfigError(f"model.name = {model.name!r}: {error}{did_you_mean(model.name, specs.MODELS)}") from None
    if model.flavor not in spec.model_args:
        raise ConfigError(f"model.flavor = {model.flavor!r}: unknown{did_you_mean(model.flavor, spec.model_args)}")
    if config.parallelism.pipeline_parallel_degree > 1 and spec.pipelining_fn is None:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {config.parallelism.pipeline_parallel_degree}: TorchTitan's "
            f"{model.name} does not support pipeline parallelism; takes 1"
        )
    if config.validation.enable and spec.build_validator_fn is None:
        raise ConfigError(f"validation.enable = true: TorchTitan's {model.name} has no validator; takes false")
    if model.name == "wan":
        from torchtitan_tide.models.wan import check as wan_check

        wan_check.check_section(config)


def _check_weights(config: Any, dims: Any) -> None:
    """Weights to begin with have to be there, and to be this model's; a checkpoint to go on from has to be whole."""
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_tide import weights

    weights.check(config, get_train_spec(config.model.name), dims)


def _check_data(config: Any, dp_ranks: int) -> None:
    """Tokenizer and datasets have to exist. `_check_model` has registered the datasets."""
    from torchtitan_tide import data, manual

    model = config.model
    if model.name == "wan":
        from torchtitan.protocols.train_spec import get_train_spec

        from torchtitan_tide.models.wan import check as wan_check

        wan_check.check_data(config, get_train_spec("wan").model_args[model.flavor])
        return
    if model.name == "flux":
        from torchtitan.models.flux.flux_datasets import DATASETS
    else:
        from torchtitan.hf_datasets.text_datasets import DATASETS
    reads_text = model.name != "flux" or config.training.test_mode  # else encoders bring their tokenizers
    if reads_text and model.hf_assets_path != PYTHON_MANUAL and not os.path.isdir(model.hf_assets_path):
        raise ConfigError(
            f"model.hf_assets_path = {model.hf_assets_path!r}: no such folder "
            f'(a folder with tokenizer.json, or "{PYTHON_MANUAL}")'
        )
    used = [("training", config.training)] + [("validation", config.validation)] * config.validation.enable
    for section, source in used:
        name, path = source.dataset.lower(), source.dataset_path
        if name not in DATASETS:
            raise ConfigError(f"{section}.dataset = {source.dataset!r}: unknown{did_you_mean(name, DATASETS)}")
        if name == "text_folder":
            if path is None:
                raise ConfigError(f'{section}.dataset = "text_folder": needs {section}.dataset_path')
            try:
                data.folder_files(path)
            except ValueError as error:
                raise ConfigError(f"{section}.dataset_path: {error}") from None
        elif name.startswith("python_manual") and path is not None:
            raise ConfigError(f"{section}.dataset_path = {path!r}: {name} comes with Python, leave it out")
        if name.startswith("python_manual"):
            documents = len(manual.documents("train" if name == "python_manual" else "validation"))
            if documents < dp_ranks:
                raise ConfigError(
                    f"{section}.dataset = {name!r}: has {documents} documents, too few for {dp_ranks} data-parallel ranks"
                )
