"""The command line `tide`."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from torchtitan_tide import check as job_check_command


def check(
    config: Annotated[str, tyro.conf.Positional],
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
) -> int:
    """Check a training job before it starts: file, names, types, values, and what this machine lacks.

    Args:
        config: The TOML file.
        overrides: Values that replace those of the file, after `--`: -- --training.steps=50 --tide.comm=stock
    """
    return job_check_command.main([config, *overrides])


def main() -> None:
    """Entry point of the console script."""
    sys.exit(tyro.extras.subcommand_cli_from_dict({"check": check}, prog="tide", description="TIDE's command line."))


if __name__ == "__main__":
    main()
