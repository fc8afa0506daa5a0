"""`python -m torchtitan_tide.check CONFIG [overrides]`: is this job sound? Run once, before torchrun starts.

Prints nothing but what is wrong: one line on stderr and exit code 2. With a sound job it also makes the cached
tokenizer, so that the ranks find it.
"""

from __future__ import annotations

import os
import sys

from torchtitan_tide.errors import ConfigError


def world_size_from_environment() -> int:
    """Ranks of the job: WORLD_SIZE inside torchrun, NGPU x NNODES before it. Raises `ConfigError`."""
    if "WORLD_SIZE" in os.environ:
        return _positive("WORLD_SIZE", "1")
    return _positive("NGPU", "1") * _positive("NNODES", "1")


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
        world_size = world_size_from_environment()
        from torchtitan_tide import job_check, tokenizer

        job = job_check.check(args[0], args[1:], world_size)
        if job.config.model.hf_assets_path == tokenizer.PYTHON_MANUAL:
            try:
                tokenizer.ensure_manual_tokenizer()
            except OSError as error:
                raise ConfigError(f"the tokenizer's cache cannot be written (set XDG_CACHE_HOME): {error}") from None
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
