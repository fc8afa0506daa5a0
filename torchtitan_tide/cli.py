"""The command line `tide`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import tyro

from torchtitan_tide import check as job_check_command
from torchtitan_tide import plan as plan_command
from torchtitan_tide import tune as tune_command
from torchtitan_tide.measure.options import LaunchOptions
from torchtitan_tide.reproduce.asked import Asked

LAUNCH = ("--ranks", "--machines", "--launcher", "--node-rank", "--master-addr", "--master-port", "--limit-s")
OWN_OPTIONS: dict[str, tuple[str, ...]] = {
    "check": (),
    "plan": ("--machines", "--gpus", "--json"),
    "parity": ("--steps", "--window", "--nudged", "--out", *LAUNCH),
    "tune": ("--write", "--out"),
    "reproduce": ("--tables", "--models", "--sizes", "--rows", "--configs", "--warmup", "--steps", "--out", *LAUNCH),
}
"""Options of each subcommand that takes a job or overrides: everything else with dashes is an override of the job's."""
OWN_FLAGS: dict[str, tuple[str, ...]] = {"reproduce": ("--debug", "--again", "--report-only")}
"""The same, without a value."""
WITHOUT_CONFIG = ("reproduce",)


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


def plan(
    config: Annotated[str, tyro.conf.Positional],
    machines: int,
    gpus: int,
    json: str | None = None,
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
) -> int:
    """Show what TIDE would do for a job on machines that need not be there: rounds, operations, bytes, memory, and what falls back.

    Args:
        config: The TOML file.
        machines: Number of machines.
        gpus: GPUs a machine.
        json: Also write the plan to this file, as JSON.
        overrides: Values that replace those of the file: --tide.memory_mode=slot_reuse
    """
    return plan_command.run(config, machines, gpus, json, overrides)


def tune(
    config: Annotated[str, tyro.conf.Positional],
    write: str | None = None,
    out: str | None = None,
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
) -> int:
    """Measure this cluster for a job's groups and choose [tide] values.

    Alone it starts a rank on each GPU of this machine (NGPU ranks); for a cluster start it by torchrun: -m torchtitan_tide.cli tune CONFIG

    Args:
        config: The TOML file.
        write: Write the file with the chosen values, all else as it stands, to this new file, or to the file itself.
        out: Also write every measured value to this file, as JSON.
        overrides: Values that replace those of the file: --tide.memory_mode=slot_reuse
    """
    return tune_command.run(config, write, out, overrides)


def parity(
    config: Annotated[str, tyro.conf.Positional],
    where: Annotated[LaunchOptions, tyro.conf.arg(name="")],
    steps: int = 1000,
    window: int = 50,
    nudged: int = 2,
    out: str = "",
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
) -> int:
    """Compare the loss curve of a training with TIDE to two with stock communication. What is finished is kept: start it again to go on.

    Exit code 0 where TIDE passes, 1 where not; docs/parity.md says how it is judged.

    Args:
        config: The TOML file.
        where: Where trainings run.
        steps: Steps of each training.
        window: Steps of the moving average.
        nudged: Most stock runs with disturbed initial weights; they are made only where stock repeats itself to the bit and TIDE differs.
        out: Folder for runs, table and plot; default outputs/parity/NAME OF THE CONFIG.
        overrides: Values that replace those of the file, in all trainings: --training.seq_len=128
    """
    from torchtitan_tide.parity.run import run

    return run(config, overrides, steps, window, nudged, out, where)


def reproduce(
    asked: Annotated[Asked, tyro.conf.arg(name="")],
    where: Annotated[LaunchOptions, tyro.conf.arg(name="")],
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
) -> int:
    """Measure the published tables anew: each cell (model, tokens, communication) in fresh processes, beside the published figures.

    What is finished is kept: start it again to go on. Exit code 0 where every cell that can run here is done, 1 where not.
    docs/reproduce.md says how it runs on several machines.

    Args:
        asked: What is measured.
        where: Where trainings run.
        overrides: Values that replace those of the TOML files in all cells, --training.dataset=c4, or in those of a model,
            --wan:training.dataset_path=data/wan
    """
    from torchtitan_tide.reproduce.run import run

    return run(asked, where, overrides)


def doctor(json: tyro.conf.FlagCreatePairsOff[bool] = False) -> int:
    """Say what this machine has, what TIDE needs of it, what falls back, and how to mend it. Under torchrun: of all machines.

    Exit code 0 where TIDE's engine for the hardware that is there works, 1 where not.

    Args:
        json: Print it as JSON.
    """
    from tide_comm.doctor.together import run

    return run(json)


def overrides_last(args: list[str]) -> list[str]:
    """The arguments with the job's overrides behind a `--`: without it tyro would take them for options of its own."""
    if not args or args[0] not in OWN_OPTIONS:
        return args
    own, overrides = [], []
    config, i = args[0] in WITHOUT_CONFIG, 1
    while i < len(args):
        arg = args[i]
        i += 1
        if arg in OWN_OPTIONS[args[0]]:
            own += [arg, *args[i : i + 1]]
            i += 1
        elif arg in ("-h", "--help", *OWN_FLAGS.get(args[0], ())) or arg.startswith(
            tuple(f"{name}=" for name in OWN_OPTIONS[args[0]])
        ):
            own.append(arg)
        elif not config and not arg.startswith("-"):
            own.append(arg)
            config = True
        elif arg != "--":
            overrides.append(arg)
    return [args[0], *own, *(["--", *overrides] if overrides else [])]


def main() -> None:
    """Entry point of the console script."""
    commands: dict[str, Callable[..., int]] = {
        "check": check,
        "doctor": doctor,
        "parity": parity,
        "plan": plan,
        "reproduce": reproduce,
        "tune": tune,
    }
    args = overrides_last(sys.argv[1:])
    code: int = tyro.extras.subcommand_cli_from_dict(commands, prog="tide", description=__doc__, args=args)
    sys.exit(code)


if __name__ == "__main__":
    main()
