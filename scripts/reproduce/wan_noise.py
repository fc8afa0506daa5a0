"""Writes stand-ins for Wan's latents and text embeddings, of the published size, filled with noise: to measure steps, not to train.

python scripts/reproduce/wan_noise.py data/wan_noise
... then --training.dataset_path=data/wan_noise --wan.empty_text= with `tide reproduce`

A file a rank (64), one sample each: 16 x 20 x 60 x 104 latents, 31,200 tokens after patching, and texts of 512 x 4096; 6.4 MB a file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from torchtitan_tide.models.wan.parquet import write_parquet
from torchtitan_tide.models.wan.samples import Sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=64, help="at least one a rank")
    parser.add_argument(
        "--latents", type=int, nargs=4, default=(16, 20, 60, 104), help="channels, frames, rows, columns"
    )
    parser.add_argument("--text", type=int, nargs=2, default=(512, 4096), help="tokens, channels")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(1)
    for i in range(options.files):
        latents = torch.randn(*options.latents, generator=draw).bfloat16()
        text = torch.randn(*options.text, generator=draw).bfloat16()
        write_parquet(
            options.folder / f"noise-{i:05}.parquet", [(f"noise-{i}", "noise", Sample(latents, text))], "normalised"
        )
    frames, rows, columns = options.latents[1:]
    print(f"{options.files} files in {options.folder}, {frames * (rows // 2) * (columns // 2)} tokens a sample")


if __name__ == "__main__":
    main()
