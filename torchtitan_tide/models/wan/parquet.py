"""Samples in parquet files, in FastVideo's schema: for each tensor three columns, its bytes, shape and dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_tide.models.wan.samples import FIELDS, Sample, check_stated, files_below

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PARTS = ("bytes", "shape", "dtype")
STATED = b"wan_latents"
"""Key of a file's schema metadata that says "normalised" or "raw"; files of others may lack it."""


class ParquetSource:
    """A shard is a file, read a few rows at a time."""

    def __init__(self, folder: str, first_frame: bool, latents: str) -> None:
        self.files = files_below(folder, ".parquet")
        self.shards = len(self.files)
        self._fields = FIELDS if first_frame else FIELDS[:2]
        self._latents = latents
        self._open(self.files[0]).close()

    def _open(self, path: Path) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path}: no parquet file: {error}") from None
        names = set(file.schema_arrow.names)
        if missing := [column for column in self._columns() if column not in names]:
            raise ValueError(f"{path}: lacks the columns {', '.join(missing)}")
        stated = (file.schema_arrow.metadata or {}).get(STATED)
        check_stated(path, stated.decode() if stated else None, self._latents)
        return file

    def _columns(self) -> list[str]:
        return [f"{name}_{part}" for name in self._fields for part in PARTS]

    def read(self, shard: int, start: int) -> Iterator[Callable[[], Sample]]:
        """See `Source`."""
        path = self.files[shard]
        with self._open(path) as file:
            row = 0
            groups: list[int] = []
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                # Whole groups before the start are not read.
                if not groups and row + rows <= start:
                    row += rows
                else:
                    groups.append(group)
            for batch in file.iter_batches(batch_size=4, row_groups=groups, columns=self._columns()):
                for i in range(batch.num_rows):
                    if row >= start:
                        yield functools.partial(self._decode, path, batch, i)
                    row += 1

    def _decode(self, path: Path, batch: Any, i: int) -> Sample:
        found: list[Tensor] = []
        for name in self._fields:
            nbytes, shape, dtype = (batch.column(f"{name}_{part}")[i].as_py() for part in PARTS)
            try:
                found.append(torch.frombuffer(bytearray(nbytes), dtype=DTYPES[dtype]).view(shape))
            except (KeyError, RuntimeError, ValueError, TypeError) as error:
                raise ValueError(f"{path}: {name} of shape {shape} and dtype {dtype!r}: {error}") from None
        return Sample(*found)


def write_parquet(path: Path, samples: list[tuple[str, str, Sample]], latents: str) -> None:
    """Write (id, caption, sample) rows. latents: "normalised" or "raw", kept in the file. Shapes and dtypes are kept."""
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, list[Any]] = {
        "id": [name for name, _, _ in samples],
        "caption": [text for _, text, _ in samples],
    }
    types = {"bytes": pyarrow.binary(), "shape": pyarrow.list_(pyarrow.int64()), "dtype": pyarrow.string()}
    schema = [("id", pyarrow.string()), ("caption", pyarrow.string())]
    with_first_frame = bool(samples) and samples[0][2].first_frame is not None
    for field in FIELDS if with_first_frame else FIELDS[:2]:
        tensors = [getattr(sample, _ATTRIBUTES[field]).contiguous() for _, _, sample in samples]
        columns[f"{field}_bytes"] = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]
        columns[f"{field}_shape"] = [list(tensor.shape) for tensor in tensors]
        columns[f"{field}_dtype"] = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        schema += [(f"{field}_{part}", types[part]) for part in PARTS]
    table = pyarrow.table(columns, schema=pyarrow.schema(schema, metadata={STATED: latents.encode()}))
    # Small groups: a reader that starts in the middle skips whole ones.
    pyarrow.parquet.write_table(table, path, row_group_size=8)


_ATTRIBUTES = {"vae_latent": "latents", "text_embedding": "text", "first_frame_latent": "first_frame"}
