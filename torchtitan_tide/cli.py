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
        overrides: Values that replace those of the file: --training.steps=50 --tide.comm=stock
    """
    return job_check_command.main([config, *overrides])


def main() -> None:
    """Entry point of the console script."""
    args = sys.argv[1:]
    if args[:1] == ["check"] and len(args) > 2 and not args[1].startswith("-"):
        # Overrides belong to the job: without this, tyro would take them for options of its own.
        args.insert(2, "--")
    sys.exit(tyro.extras.subcommand_cli_from_dict({"check": check}, prog="tide", description=__doc__, args=args))


if __name__ == "__main__":
    main()
