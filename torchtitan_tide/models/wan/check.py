"""What can be wrong with a Wan job before it starts; the counterpart of `job_check` for a model without a tokenizer."""

from __future__ import annotations

import os
from typing import Any

from torchtitan_tide.errors import ConfigError, did_you_mean
from torchtitan_tide.models.wan.args import WanModelArgs

CONFIG_MODULE = "torchtitan_tide.models.wan.job_config"


def check_section(config: Any) -> None:
    """The [wan] section and what does not go together with it. Raises `ConfigError`."""
    if not hasattr(config, "wan"):
        raise ConfigError(f'model.name = "wan": takes [job] custom_config_module = "{CONFIG_MODULE}"')
    wan, degrees = config.wan, config.parallelism
    for name, valid, takes in (
        ("shift", wan.shift > 0, "a number > 0"),
        ("text_drop", 0 <= wan.text_drop <= 1, "a share from 0 to 1"),
    ):
        if not valid:
            raise ConfigError(f"wan.{name} = {getattr(wan, name)}: takes {takes}")
    for kind in ("tensor", "pipeline", "context", "expert"):
        degree = getattr(degrees, f"{kind}_parallel_degree")
        if degree != 1:
            raise ConfigError(f"parallelism.{kind}_parallel_degree = {degree}: wan takes 1")
    if config.validation.enable and config.validation.steps < 1:
        raise ConfigError(f"validation.steps = {config.validation.steps}: wan takes a whole number >= 1")


def check_data(config: Any, args: WanModelArgs) -> None:
    """Datasets and files have to exist. Raises `ConfigError`."""
    from torchtitan_tide.models.wan import data

    used = [("training", config.training)] + [("validation", config.validation)] * config.validation.enable
    for section, source in used:
        name = source.dataset.lower()
        if name not in data.DATASETS:
            raise ConfigError(f"{section}.dataset = {source.dataset!r}: unknown{did_you_mean(name, data.DATASETS)}")
        if name.startswith("wan_photographs") and source.dataset_path is not None:
            raise ConfigError(f"{section}.dataset_path = {source.dataset_path!r}: {name} takes none, leave it out")
        try:
            data.open_source(name, source.dataset_path, args, config.wan.latents)
        except ValueError as error:
            raise ConfigError(f"{section}: {error}") from None
    if config.wan.empty_text and not os.path.isfile(config.wan.empty_text):
        raise ConfigError(f"wan.empty_text = {config.wan.empty_text!r}: no such file")
