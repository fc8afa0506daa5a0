"""What can be wrong with a folder of Hugging Face weights, told before ranks start: TorchTitan finds out on all of them.

Read are file headers and the index, no tensor.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan_tide.errors import ConfigError
from torchtitan_tide.flavors import DEBUG_PREFIX

INDEX = "model.safetensors.index.json"
CHECKED = ("llama3", "llama3_ft", "qwen3")
"""Models whose tensors are compared one by one: those that have been read and written here."""


def check(config: Any, spec: Any, dims: Any) -> None:
    """The weights that a job of TorchTitan's `ParallelDims` would begin with, and could save. Raises `ConfigError`."""
    asked = config.checkpoint
    if not asked.enable:
        return
    writes = asked.last_save_in_hf and "last_save_in_hf"
    reads = asked.initial_load_in_hf and "initial_load_in_hf"
    if (reads or writes) and importlib.util.find_spec("safetensors") is None:
        raise ConfigError(
            f'checkpoint.{reads or writes} = true: safetensors is not installed; pip install -e ".[weights]" '
            "(with scripts/train.sh: TIDE_EXTRAS=weights)"
        )
    if reads or writes:
        _check_whole_experts(spec.model_args[config.model.flavor], dims, f"checkpoint.{reads or writes} = true")
    own = Path(config.job.dump_folder, asked.folder)
    if own.is_dir():
        _check_own(own, asked.load_step)
        return  # whatever there was to begin with is not read again
    if not reads:
        return
    folder = asked.initial_load_path or config.model.hf_assets_path
    if not os.path.isdir(folder):
        raise ConfigError(f"checkpoint.initial_load_in_hf = true: {folder!r}: no such folder")
    if config.model.name == "wan":
        return  # its reader is strict, and its files have names of their own
    try:
        found = tensor_shapes(Path(folder))
        if config.model.name in CHECKED and not asked.initial_load_in_hf_quantized:
            args = copy.deepcopy(spec.model_args[config.model.flavor])
            follow = ("embed_tokens", "lm_head") if config.model.flavor.startswith(DEBUG_PREFIX) else ()
            compare(found, expected_shapes(spec, args), getattr(args, "enable_weight_tying", False), follow)
    except ValueError as error:
        flavor = f"model.flavor = {config.model.flavor!r}"
        raise ConfigError(f"checkpoint.initial_load_in_hf = true: {folder!r} for {flavor}: {error}") from None


def _check_whole_experts(args: Any, dims: Any, asked: str) -> None:
    """Each of Hugging Face's experts is one tensor, which TorchTitan's adapter takes from one rank (or cut on another dimension)."""
    if not getattr(args, "moe_enabled", False):
        return
    experts, shards = args.moe_args.num_experts, dims.dp_shard * dims.cp
    if dims.ep > 1:
        shards = shards * dims.tp // dims.etp
        if shards > experts:
            return  # TorchTitan cuts the second dimension then
    if experts % shards:
        raise ConfigError(
            f"{asked}: {experts} experts over {shards} ranks, which do not divide them; other numbers come with "
            "parallelism.data_parallel_replicate_degree or expert_parallel_degree"
        )


def _check_own(folder: Path, load_step: int) -> None:
    """The checkpoint that a job goes on from, chosen as TorchTitan chooses, must not be one that was saved for others."""
    steps = {int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(r"step-(\d+)", path.name))}
    whole = {step for step, path in steps.items() if (path / ".metadata").is_file()}
    exported = {step for step, path in steps.items() if (path / INDEX).is_file()} - whole
    chosen = load_step if load_step >= 0 else max(whole | exported, default=-1)
    if chosen not in exported:
        return
    if whole:
        way = f"checkpoint.load_step = {max(whole)} goes on from the last whole one"
    else:
        way = "begin another job with it (job.dump_folder, checkpoint.initial_load_path, checkpoint.initial_load_in_hf)"
    raise ConfigError(
        f"{str(steps[chosen])!r}: safetensors hold no optimizer, so the job cannot go on from there; {way}"
    )


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, of all .safetensors files in a folder. Raises `ValueError` for none, broken ones, or not those of the index."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    listed: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    if missing := sorted(set(listed.values()) - {file.name for file in files}):
        raise ValueError(f"{len(missing)} files of {INDEX} are missing, the first is {missing[0]}")
    if not files:
        raise ValueError("holds no .safetensors file")
    found: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                found.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})
        except SafetensorError as error:
            raise ValueError(f"{path.name} is damaged or not complete: {error}") from None
    return found


def expected_shapes(spec: Any, args: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face's names, of the model that TorchTitan makes of `args`."""
    with torch.device("meta"):
        model = spec.model_cls(args)
    tensors = spec.state_dict_adapter(args, None).to_hf(model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def compare(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    tied: bool = False,
    any_rows: tuple[str, ...] = (),
) -> None:
    """Raise `ValueError` unless both have the same tensors.

    `tied`: embedding and head are one tensor, which may be stored twice. `any_rows`: parts of names whose first dimension may differ.
    """
    if missing := sorted(set(expected) - set(found)):
        raise ValueError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    surplus = {name for name in set(found) - set(expected) if not name.endswith("rotary_emb.inv_freq")}
    surplus -= {"lm_head.weight"} if tied else set()
    if surplus:
        raise ValueError(f"{len(surplus)} tensors are none of this model's, the first is {min(surplus)}")
    for name, shape in expected.items():
        skip = any(part in name for part in any_rows)
        if found[name][skip:] != shape[skip:]:
            raise ValueError(f"{name} is {found[name]}, expected {shape}")
