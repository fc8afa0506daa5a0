"""Samples in tar files as webdataset lays them out: neighbouring members KEY.vae_latent.npy, KEY.text_embedding.npy, and
for image to video KEY.first_frame_latent.npy. A member KEY.json may state {"wan_latents": "normalised" | "raw"}.

Read with the standard library: the format is tar and names, and a resumed reading has to skip members without reading them.
"""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor

from torchtitan_tide.models.wan.samples import FIELDS, Sample, check_stated, files_below


class WebdatasetSource:
    """A shard is a tar file, not compressed."""

    def __init__(self, folder: str, first_frame: bool, latents: str) -> None:
        self.files = files_below(folder, ".tar")
        self.shards = len(self.files)
        self._fields = FIELDS if first_frame else FIELDS[:2]
        self._latents = latents
        first = next(self.read(0, 0), None)
        if first is not None:
            first()

    def read(self, shard: int, start: int) -> Iterator[Callable[[], Sample]]:
        """See `Source`."""
        path = self.files[shard]
        try:
            with tarfile.open(path, "r:") as tar:
                for i, members in enumerate(_samples(tar)):
                    if i >= start:
                        yield functools.partial(self._decode, path, members)
        except tarfile.TarError as error:
            raise ValueError(f"{path}: no tar file without compression: {error}") from None

    def _decode(self, path: Path, members: dict[str, tarfile.TarInfo]) -> Sample:
        found: list[Tensor] = []
        if "json" in members:
            stated = json.loads(_bytes(path, members["json"])).get("wan_latents")
            check_stated(f"{path}: {members['json'].name}", stated, self._latents)
        for field in self._fields:
            if (member := members.get(f"{field}.npy")) is None:
                name = next(iter(members.values())).name
                raise ValueError(f"{path}: the sample of {name} has no .{field}.npy, only {', '.join(members)}")
            found.append(torch.from_numpy(numpy.load(io.BytesIO(_bytes(path, member)))))
        return Sample(*found)


def _samples(tar: tarfile.TarFile) -> Iterator[dict[str, tarfile.TarInfo]]:
    """Members by what follows the first dot of their names, a sample at a time."""
    key: tuple[str, str] | None = None
    members: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        if not member.isfile():
            continue
        folder, _, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        if key != (folder, stem):
            if members:
                yield members
            key, members = (folder, stem), {}
        members[extension] = member
    if members:
        yield members


def _bytes(path: Path, member: tarfile.TarInfo) -> bytes:
    """From the file itself, so that a sample can be decoded when its tar is no longer open."""
    with open(path, "rb") as file:
        file.seek(member.offset_data)
        return file.read(member.size)


def write_webdataset(path: Path, samples: list[tuple[str, str, Sample]], latents: str) -> None:
    """Write (id, caption, sample); ids without dots. npy knows no bf16: it is written as fp32, which holds the same numbers."""
    with tarfile.open(path, "w") as tar:
        for name, caption, sample in samples:
            stated = json.dumps({"wan_latents": latents, "caption": caption}).encode()
            contents = {"json": stated}
            for field, tensor in zip(FIELDS, (sample.latents, sample.text, sample.first_frame), strict=True):
                if tensor is not None:
                    buffer = io.BytesIO()
                    numpy.save(buffer, (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())
                    contents[f"{field}.npy"] = buffer.getvalue()
            for extension, content in contents.items():
                info = tarfile.TarInfo(f"{name}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
