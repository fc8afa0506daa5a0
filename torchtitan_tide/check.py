"""`python -m torchtitan_tide.check CONFIG [overrides]`: is this job sound? Run once, before torchrun starts.

Prints what is wrong as one line on stderr, with exit code 2. For a sound job it makes the cached tokenizer, so that
the ranks find it, and prints what scripts/train.sh needs: `device=cpu NGPU=4`.
"""

from __future__ import annotations

import os
import sys

from torchtitan_tide.errors import ConfigError
from torchtitan_tide.toml_file import read_toml


def ranks_per_machine() -> int:
    """NGPU, or the number of GPUs, or 4 on a machine without. Raises `ConfigError` when NGPU is not possible here."""
    import torch

    gpus = torch.cuda.device_count()
    ranks = _positive("NGPU", str(gpus or 4))
    if gpus and ranks > gpus:
        raise ConfigError(f"NGPU={ranks}: this machine has {gpus} GPUs")
    return ranks


def world_size_from_environment() -> int:
    """Ranks of the job: WORLD_SIZE inside torchrun, NGPU x NNODES before it. Raises `ConfigError`."""
    if "WORLD_SIZE" in os.environ:
        return _positive("WORLD_SIZE", "1")
    return ranks_per_machine() * _positive("NNODES", "1")


def _positive(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name}={text}: takes a whole number >= 1")
    return int(text)


def main(args: list[str] | None = None) -> int:
    """Exit code: 0 sound, 2 not."""
    args = sys.argv[1:] if args is None else args
    try:
        if not args or args[0].startswith("-"):
            raise ConfigError("usage: python -m torchtitan_tide.check CONFIG.toml [--section.key=value ...]")
        read_toml(args[0])  # a missing or malformed file is told at once, without importing torch
        import torch

        from torchtitan_tide import job_check, tokenizer

        world_size, ranks = world_size_from_environment(), ranks_per_machine()
        job = job_check.check(args[0], args[1:], world_size)
        if job.config.model.name != "wan" and job.config.model.hf_assets_path == tokenizer.PYTHON_MANUAL:
            try:
                tokenizer.ensure_manual_tokenizer()
            except OSError as error:
                raise ConfigError(f"the tokenizer's cache cannot be written (set XDG_CACHE_HOME): {error}") from None
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"device={'cuda' if torch.cuda.is_available() else 'cpu'} NGPU={ranks}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
