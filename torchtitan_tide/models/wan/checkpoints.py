"""Wan checkpoints in safetensors, in the original's or diffusers' names: TorchTitan's adapter, and a converter.

Strict both ways: every tensor of the model with its shape, and no other. Original checkpoints lie in `high_noise_model/` and
`low_noise_model/`, those of diffusers in `transformer/` (high noise) and `transformer_2/`; a folder is one expert.

    python -m torchtitan_tide.models.wan.checkpoints FROM TO --layout original|diffusers
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from torchtitan_tide.models.wan.args import Layout, WanModelArgs
from torchtitan_tide.models.wan.model import WanModel
from torchtitan_tide.models.wan.names import to_diffusers, to_original

FILE_STEM = "diffusion_pytorch_model"
"""Of files and index, in both kinds of repository."""
FILE_BYTES = 5_000_000_000


def shapes(args: WanModelArgs) -> dict[str, torch.Size]:
    """The model's tensors, by original name, in the model's order."""
    with torch.device("meta"):
        return {name: value.shape for name, value in WanModel(args).state_dict().items()}


def originals(names: Iterable[str]) -> dict[str, str]:
    """Original names of tensors, by what they are called in a file of either layout. Raises `ValueError` for a mixture or others."""
    given = list(names)
    # The root's table is diffusers' name for a tensor that the original calls otherwise; all of its names differ in one place.
    theirs = any(name.startswith("condition_embedder.") or ".attn1." in name for name in given)
    found = {}
    for name in given:
        try:
            original = to_original(name) if theirs else name
            if not theirs:
                to_diffusers(name)
        except KeyError:
            layout = "diffusers" if theirs else "the original"
            raise ValueError(f"{name}: no tensor of a Wan transformer in the names of {layout}") from None
        found[name] = original
    return found


def check_names(found: Iterable[str], expected: Iterable[str], where: str) -> None:
    """Raise `ValueError` unless both hold the same original names."""
    names, wanted = set(found), set(expected)
    if missing := sorted(wanted - names):
        raise ValueError(f"{where}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if surplus := sorted(names - wanted):
        raise ValueError(f"{where}: {len(surplus)} tensors are none of this model's, the first is {surplus[0]}")


class StrictReader(HuggingFaceStorageReader):
    """Reads a folder that has the model's tensors in the layout that is asked for, and no others."""

    def __init__(self, path: str, args: WanModelArgs) -> None:
        super().__init__(path)
        self._folder, self._args = path, args

    def read_metadata(self, *arguments: Any, **options: Any) -> Any:
        """PyTorch's, checked."""
        metadata = super().read_metadata(*arguments, **options)
        names = originals(metadata.state_dict_metadata)
        check_names(names.values(), shapes(self._args), self._folder)
        layout = self._args.checkpoint_layout
        if any(name != named(original, layout) for name, original in names.items()):
            other = "original" if layout == "diffusers" else "diffusers"
            raise ValueError(f'{self._folder}: has names of another layout: wan.checkpoint_layout = "{other}"')
        return metadata


def named(original: str, layout: Layout) -> str:
    """An original name in a layout."""
    return original if layout == "original" else to_diffusers(original)


class WanStateDictAdapter(StateDictAdapter):
    """TorchTitan's hook for `checkpoint.initial_load_in_hf` and `last_save_in_hf`; the layout is `wan.checkpoint_layout`."""

    model_args: WanModelArgs

    def __init__(self, model_args: WanModelArgs, hf_assets_path: str | None) -> None:
        # TorchTitan's own looks for an index of another name, and warns when there is none.
        super().__init__(model_args, None)
        self.model_args, self.hf_assets_path = model_args, hf_assets_path
        sizes = {name: shape.numel() * 4 for name, shape in shapes(model_args).items()}
        files = split(sizes, FILE_BYTES)
        if len(files) > 1:
            layout = model_args.checkpoint_layout
            self.fqn_to_index_mapping = {named(n, layout): i + 1 for i, names in enumerate(files) for n in names}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The same tensors under the layout's names. Raises `ValueError` for missing or foreign ones."""
        check_names(state_dict, shapes(self.model_args), "the model's state")
        return {named(name, self.model_args.checkpoint_layout): value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The same tensors under the model's names, from either layout. Raises `ValueError` for missing or foreign ones."""
        names = originals(hf_state_dict)
        check_names(names.values(), shapes(self.model_args), "the checkpoint")
        return {names[name]: value for name, value in hf_state_dict.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """A reader that is strict. Raises `ValueError` for quantized checkpoints, which Wan has none of."""
        if from_quantized:
            raise ValueError("checkpoint.initial_load_in_hf_quantized: wan takes false")
        return StrictReader(path, self.model_args)


def split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order, cut into files of at most `limit` bytes (a larger tensor has its own)."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if files[-1] and filled + nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += nbytes
    return files


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor below a folder: by its index file, which has to be true, else by the files themselves."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update({name: path for name in file.keys()})
    if not found:
        raise ValueError(f"{folder}: holds no .safetensors file")
    for index in folder.glob("*.safetensors.index.json"):
        listed = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        if listed != found:
            wrong = sorted({name for name, _ in listed.items() ^ found.items()})
            raise ValueError(f"{index}: does not agree with the files about {len(wrong)} tensors, e.g. {wrong[0]}")
    return found


def args_of(found: Mapping[str, torch.Size]) -> WanModelArgs:
    """Sizes of the model that has these tensors, by original name. Heads leave no trace in shapes: one."""
    blocks = {int(match.group(1)) for name in found if (match := re.match(r"blocks\.(\d+)\.", name))}
    try:
        dim, channels = found["patch_embedding.weight"][:2]
        latent_channels = found["head.head.weight"][0] // 4
        return WanModelArgs(
            dim=dim,
            n_heads=1,
            n_layers=len(blocks),
            ffn_dim=found["blocks.0.ffn.0.weight"][0],
            latent_channels=latent_channels,
            condition_channels=channels - latent_channels,
            text_dim=found["text_embedding.0.weight"][1],
            freq_dim=found["time_embedding.0.weight"][1],
        )
    except KeyError as error:
        raise ValueError(f"the checkpoint lacks {error.args[0]}") from None


def convert(source: Path, target: Path, layout: Layout, file_bytes: int = FILE_BYTES) -> int:
    """Write the checkpoint of a folder to a new one in another layout; dtypes and numbers stay. Returns the number of tensors.

    One file at a time is in memory. Raises `ValueError` when the checkpoint is not whole, or `target` is not empty.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = tensor_files(source)
    names = originals(files)
    given = {original: name for name, original in names.items()}
    found: dict[str, torch.Size] = {}
    sizes: dict[str, int] = {}
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                view = file.get_slice(name)
                found[names[name]] = torch.Size(view.get_shape())
                sizes[names[name]] = found[names[name]].numel() * _dtype_bytes(view.get_dtype())
    expected = shapes(args_of(found))
    check_names(found, expected, str(source))
    if wrong := [name for name in expected if found[name] != expected[name]]:
        raise ValueError(f"{source}: {wrong[0]} is {tuple(found[wrong[0]])}, expected {tuple(expected[wrong[0]])}")
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise ValueError(f"{target}: is not empty")
    parts = split({name: sizes[name] for name in expected}, file_bytes)
    weight_map = {}
    for i, part in enumerate(parts):
        tensors = {}
        for name in part:
            with safe_open(files[given[name]], framework="pt") as file:
                tensors[named(name, layout)] = file.get_tensor(given[name])
        path = target / (f"{FILE_STEM}-{i + 1:05}-of-{len(parts):05}.safetensors")
        if len(parts) == 1:
            path = target / f"{FILE_STEM}.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        weight_map.update({name: path.name for name in tensors})
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (target / f"{FILE_STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return len(weight_map)


def _dtype_bytes(name: str) -> int:
    """Of a safetensors dtype: F32, BF16, F8_E4M3."""
    bits = re.match(r"[A-Z]+(\d+)", name)
    assert bits is not None, name
    return int(bits.group(1)) // 8


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 converted, 2 not (one line on stderr)."""
    parser = argparse.ArgumentParser(description="Convert a Wan transformer's safetensors between layouts.")
    parser.add_argument("source", type=Path, help="folder of one expert")
    parser.add_argument("target", type=Path, help="new folder")
    parser.add_argument("--layout", choices=get_args(Layout), required=True, help="tensor names to write")
    given = parser.parse_args(arguments)
    try:
        count = convert(given.source, given.target, given.layout)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.target}: {count} tensors in the names of {given.layout}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
