"""Datasets added to TorchTitan's registry: `python_manual`, `python_manual_validation` and `text_folder`.

TorchTitan's own names (c4, c4_validation, c4_test) stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtitan_tide import manual

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")

FILE_PIECE_CHARS = 16_000
"""Characters of a text file after which `text_folder` starts the next document at a blank line."""


def folder_files(path: str) -> dict[str, list[str]]:
    """Files that `text_folder` reads below `path`, by builder ("text", "json", "parquet"), sorted.

    Raises `ValueError` when there is no such folder or nothing to read in it.
    """
    root = Path(path)
    if not root.is_dir():
        raise ValueError(f"{path!r}: no such folder")
    files: dict[str, list[str]] = {"text": [], "json": [], "parquet": []}
    builders = {".txt": "text", ".md": "text", ".jsonl": "json", ".parquet": "parquet"}
    for file in sorted(root.rglob("*")):
        if file.suffix in builders and file.is_file():
            files[builders[file.suffix]].append(str(file))
    found = {builder: names for builder, names in files.items() if names}
    if not found:
        raise ValueError(f"{path!r}: holds no {', '.join(SUFFIXES)} file")
    return found


def load_manual(path: str) -> Any:
    """`datasets.Dataset` with the column "text"; `path` is the split, "train" or "validation"."""
    from datasets import Dataset

    if path not in ("train", "validation"):
        raise ValueError(f"dataset_path = {path!r}: the Python manual comes with Python, leave dataset_path out")
    return Dataset.from_dict({"text": list(manual.documents("train" if path == "train" else "validation"))})


def load_text_folder(path: str) -> Any:
    """Streaming dataset with the column "text": a document a .jsonl line, a .parquet row or a piece of a text file.

    Text files are cut at blank lines (`FILE_PIECE_CHARS`), so that a single large one serves many ranks.
    Streamed, so that a corpus larger than memory works and nothing is copied into a cache. Raises `ValueError` when a
    file lacks the field "text".
    """
    from datasets import concatenate_datasets, load_dataset

    parts = []
    for builder, names in folder_files(path).items():
        options = {"sample_by": "document"} if builder == "text" else {}
        part = load_dataset(builder, data_files=names, split="train", streaming=True, **options)
        first = next(iter(part), None)
        if first is None:
            continue
        if "text" not in first:
            raise ValueError(f'{names[0]}: has the fields {sorted(first)}, needs the field "text"')
        part = part.select_columns(["text"])
        parts.append(part.map(_cut_files, batched=True, batch_size=8) if builder == "text" else part)
    if not parts:
        raise ValueError(f"{path!r}: all files are empty")
    return concatenate_datasets(parts)


def _cut_files(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    return {"text": [piece for text in batch["text"] for piece in manual.cut(text, FILE_PIECE_CHARS)]}


def _text(sample: dict[str, Any]) -> str:
    return sample["text"]


def register() -> None:
    """Add the datasets to TorchTitan's registry; calling it again changes nothing."""
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    DATASETS.setdefault("python_manual", DatasetConfig("train", load_manual, _text))
    DATASETS.setdefault("python_manual_validation", DatasetConfig("validation", load_manual, _text))
    DATASETS.setdefault("text_folder", DatasetConfig("", load_text_folder, _text))


def check_share(dataloader: Any, dp_world_size: int) -> None:
    """Raise `ValueError` when this rank's share of a dataset is empty: TorchTitan would loop over nothing for ever."""
    if next(iter(dataloader.dataset._data), None) is None:
        raise ValueError(f"training.dataset: has fewer documents than the {dp_world_size} data-parallel ranks")
