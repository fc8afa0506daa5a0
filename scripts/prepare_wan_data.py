#!/usr/bin/env python3
"""Encode a folder of videos and captions for a Wan training, with the VAE and umT5 of a diffusers repository.

    python scripts/prepare_wan_data.py VIDEOS OUTPUT --model Wan2.2-T2V-A14B-Diffusers [--first-frame] [--format webdataset]

VIDEOS holds video files and, beside each, its caption in a .txt file of the same name. A video gives its first `--frames`
frames at `--fps`, scaled and cropped to `--height` x `--width`. Needs the extra `wan`; several GPUs: start one process each
with --part 0/8, 1/8, ... The output is read again and checked. Train on it with

    [training] dataset = "wan_parquet" (or "wan_webdataset"), dataset_path = OUTPUT
    [wan] empty_text = "OUTPUT/empty_text.npy"
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_tide.models.wan.samples import VAE_MEAN, VAE_STD, Sample, files_below, normalise

SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
TEXT_TOKENS = 512
IN_SPACE, IN_TIME = 8, 4
"""Pixels and frames that one latent stands for; the first frame has a latent of its own."""


class Unusable(Exception):
    """A video that is left out, with the reason."""


def find_videos(folder: Path, part: int, parts: int) -> list[tuple[Path, str]]:
    """This part's videos with their captions, shuffled: training reads files in their order. Raises `ValueError`."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not found:
        raise ValueError(f"{folder}: holds no video ({', '.join(SUFFIXES)})")
    random.Random(0).shuffle(found)
    pairs = []
    for path in found[part::parts]:
        text = path.with_suffix(".txt")
        if not text.is_file():
            raise ValueError(f"{path}: its caption {text.name} is missing")
        pairs.append((path, " ".join(text.read_text().split())))
    return pairs


def read_frames(path: Path, count: int, fps: float) -> Iterator[numpy.ndarray]:
    """RGB frames (rows, columns, 3) of the times 0, 1/fps, ...: for each the first frame that is not before it."""
    import av

    taken = 0
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                # A frame may serve twice, where the video has fewer than `fps`.
                while taken < count and frame.time is not None and frame.time >= taken / fps - 1e-3:
                    taken += 1
                    yield frame.to_ndarray(format="rgb24")
                if taken == count:
                    return
    except av.FFmpegError as error:
        raise Unusable(f"cannot be decoded: {error}") from None
    raise Unusable(f"has {taken} frames at {fps:g} a second, {count} are needed")


def pixels(path: Path, count: int, fps: float, height: int, width: int) -> Tensor:
    """(3, count, height, width) from -1 to 1, scaled to cover and cropped in the middle."""
    frames = []
    for frame in read_frames(path, count, fps):
        image = torch.from_numpy(frame).permute(2, 0, 1).float().unsqueeze(0)
        scale = max(height / image.shape[2], width / image.shape[3])
        size = (max(height, round(image.shape[2] * scale)), max(width, round(image.shape[3] * scale)))
        image = torch.nn.functional.interpolate(image, size, mode="bicubic", antialias=True)
        top, left = (size[0] - height) // 2, (size[1] - width) // 2
        frames.append(image[0, :, top : top + height, left : left + width].clamp(0, 255))
    return torch.stack(frames, dim=1) / 127.5 - 1


class Encoders:
    """The VAE and the text encoder of a diffusers repository: a folder, or a name that Hugging Face's hub knows."""

    def __init__(self, model: str, device: torch.device, dtype: torch.dtype) -> None:
        from diffusers import AutoencoderKLWan
        from transformers import AutoTokenizer, UMT5EncoderModel

        self.device = device
        self.vae = AutoencoderKLWan.from_pretrained(model, subfolder="vae").to(device).eval()
        if tuple(self.vae.config.latents_mean) != VAE_MEAN or tuple(self.vae.config.latents_std) != VAE_STD:
            raise ValueError(f"{model}: its VAE has other statistics than that of Wan2.2 A14B (the Wan2.1 VAE)")
        folder = Path(model) / "tokenizer"
        self.tokenizer = (
            AutoTokenizer.from_pretrained(str(folder))
            if folder.is_dir()
            else (AutoTokenizer.from_pretrained(model, subfolder="tokenizer"))
        )
        self.text_encoder = UMT5EncoderModel.from_pretrained(model, subfolder="text_encoder", dtype=dtype)
        self.text_encoder = self.text_encoder.to(device).eval()

    @torch.no_grad()
    def latents(self, video: Tensor) -> Tensor:
        """Raw latents, fp32 on the CPU, of (3, frames, height, width): the mode, so that encoding again gives the same."""
        return self.vae.encode(video.unsqueeze(0).to(self.device)).latent_dist.mode()[0].float().cpu()

    @torch.no_grad()
    def decoded(self, latents: Tensor) -> Tensor:
        """(3, frames, height, width) from -1 to 1 of raw latents."""
        return self.vae.decode(latents.unsqueeze(0).to(self.device)).sample[0].float().cpu()

    @torch.no_grad()
    def text(self, caption: str) -> Tensor:
        """The caption's tokens alone, without padding: (tokens, channels), on the CPU."""
        given = self.tokenizer(caption, truncation=True, max_length=TEXT_TOKENS, return_tensors="pt").to(self.device)
        hidden = self.text_encoder(given["input_ids"], attention_mask=given["attention_mask"]).last_hidden_state
        return hidden[0].cpu()


def encode(encoders: Encoders, path: Path, caption: str, given: argparse.Namespace) -> tuple[Sample, float]:
    """The sample, and the PSNR in dB of the video that its latents decode to. Raises `Unusable`."""
    video = pixels(path, given.frames, given.fps, given.height, given.width)
    raw = encoders.latents(video)
    first = None
    if given.first_frame:
        blank = torch.zeros_like(video)
        blank[:, 0] = video[:, 0]
        first = encoders.latents(blank)
    psnr = float("nan")
    if given.psnr:
        error = (encoders.decoded(raw).clamp(-1, 1) - video).square().mean().item()
        psnr = 10 * numpy.log10(4 / max(error, 1e-12))
    prepare = normalise if given.latents == "normalised" else torch.Tensor.float
    return Sample(prepare(raw), encoders.text(caption), None if first is None else prepare(first)), psnr


def writer(form: str) -> tuple[Any, str]:
    """The function that writes a file of samples, and the files' suffix."""
    if form == "parquet":
        from torchtitan_tide.models.wan.parquet import write_parquet

        return write_parquet, ".parquet"
    from torchtitan_tide.models.wan.webdataset import write_webdataset

    return write_webdataset, ".tar"


def check_output(given: argparse.Namespace) -> str:
    """Read all samples again, as training would. Returns what was found; raises `ValueError` for what training could not use."""
    from torchtitan_tide.models.wan.parquet import ParquetSource
    from torchtitan_tide.models.wan.webdataset import WebdatasetSource

    kind = ParquetSource if given.format == "parquet" else WebdatasetSource
    source = kind(str(given.output), given.first_frame, given.latents)
    shape = (16, (given.frames - 1) // IN_TIME + 1, given.height // IN_SPACE, given.width // IN_SPACE)
    count, total, squares, widths = 0, 0.0, 0.0, set()
    for shard in range(source.shards):
        for call in source.read(shard, 0):
            sample = call()
            count += 1
            for what, tensor in (
                ("latents", sample.latents),
                ("first frame", sample.first_frame),
                ("text", sample.text),
            ):
                if tensor is None:
                    continue
                if what != "text" and tuple(tensor.shape) != shape:
                    raise ValueError(f"{source.files[shard]}: {what} {tuple(tensor.shape)}, expected {shape}")
                if not tensor.isfinite().all():
                    raise ValueError(f"{source.files[shard]}: {what} of sample {count} are not finite")
            widths.add(sample.text.shape[1])
            total += sample.latents.double().mean().item()
            squares += sample.latents.double().square().mean().item()
    if len(widths) != 1:
        raise ValueError(f"texts of {sorted(widths)} channels: takes one width")
    mean = total / count
    return (
        f"{count} samples in {source.shards} files, latents {shape}, mean {mean:.3f}, deviation "
        f"{max(0.0, squares / count - mean**2) ** 0.5:.3f}, text of {widths.pop()} channels"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line. Raises `ValueError` for sizes that the VAE does not take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", required=True, help="diffusers repository with vae, text_encoder and tokenizer")
    parser.add_argument("--format", choices=("parquet", "webdataset"), default="parquet")
    parser.add_argument("--latents", choices=("normalised", "raw"), default="normalised")
    parser.add_argument("--first-frame", action="store_true", help="also what image to video is conditioned on")
    parser.add_argument("--frames", type=int, default=77, help="4 n + 1")
    parser.add_argument("--height", type=int, default=480, help="a multiple of 16")
    parser.add_argument("--width", type=int, default=832, help="a multiple of 16")
    parser.add_argument("--fps", type=float, default=16.0)
    parser.add_argument("--samples-per-file", type=int, default=64)
    parser.add_argument("--part", default="0/1", help="which of how many processes this is")
    parser.add_argument("--psnr", action="store_true", help="decode each video again and tell how near it is")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    if given.frames < 1 or given.frames % IN_TIME != 1:
        raise ValueError(f"--frames {given.frames}: takes 4 n + 1")
    for name in ("height", "width"):
        if getattr(given, name) < 1 or getattr(given, name) % (2 * IN_SPACE):
            raise ValueError(f"--{name} {getattr(given, name)}: takes a multiple of 16")
    if given.samples_per_file < 1 or given.fps <= 0:
        raise ValueError("--samples-per-file, --fps: take numbers > 0")
    part, _, parts = given.part.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise ValueError(f"--part {given.part}: takes I/N with I < N")
    given.part, given.parts = int(part), int(parts)
    return given


def run(given: argparse.Namespace) -> None:
    """Encode, write, check. Raises `ValueError` with what is wrong."""
    videos = find_videos(given.videos, given.part, given.parts)
    write, suffix = writer(given.format)
    stem = f"part-{given.part:03}"
    given.output.mkdir(parents=True, exist_ok=True)
    if any(given.output.glob(f"{stem}-*")):
        raise ValueError(f"{given.output}: has files of part {given.part} already")
    device = torch.device(given.device)
    encoders = Encoders(given.model, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    if given.part == 0:
        numpy.save(given.output / "empty_text.npy", encoders.text("").float().numpy())
    pending: list[tuple[str, str, Sample]] = []
    files = left_out = 0
    for i, (path, caption) in enumerate(videos):
        try:
            sample, psnr = encode(encoders, path, caption, given)
            told = f", {psnr:.1f} dB" if given.psnr else ""
            print(f"{i + 1}/{len(videos)} {path.name}: text of {len(sample.text)} tokens{told}", flush=True)
            # Ids name tar members, where a dot would end them.
            pending.append((f"{given.part:03}{i:08}", caption, sample))
        except Unusable as error:
            left_out += 1
            print(f"{i + 1}/{len(videos)} {path.name}: left out: {error}", flush=True)
        if pending and (len(pending) == given.samples_per_file or i + 1 == len(videos)):
            write(given.output / f"{stem}-{files:05}{suffix}", pending, given.latents)
            files, pending = files + 1, []
    if not files:
        raise ValueError(f"{given.videos}: none of {len(videos)} videos could be used")
    files_below(str(given.output), suffix)
    print(f"{check_output(given)}; {left_out} videos left out")


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 written and checked, 2 not (one line on stderr)."""
    try:
        run(parse(arguments))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
