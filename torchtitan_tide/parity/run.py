"""`tide parity`: the trainings of the loss protocol, and what comes of them."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from torchtitan_tide.errors import ConfigError
from torchtitan_tide.measure.launch import ending_on_sigterm
from torchtitan_tide.measure.nodes import NodesLauncher
from torchtitan_tide.measure.options import LaunchOptions
from torchtitan_tide.measure.session import Result, Session, Training
from torchtitan_tide.parity.protocol import AGAIN, NUDGED, REFERENCE, TIDE, gap

SEED = 42
"""Of runs whose configuration names none: TorchTitan would draw another one for each."""


def trainings(config: str, steps: int, overrides: tuple[str, ...], nudged: int) -> list[Training]:
    """The protocol's runs, then `nudged` nudged stock runs. `overrides` must say nothing of tide.comm."""

    def one(name: str, comm: str, nudge: int = 0) -> Training:
        recorder = ("losses", str(steps), str(nudge))
        return Training(name.replace(" ", "_"), config, (*overrides, f"--tide.comm={comm}"), recorder)

    runs = [one(REFERENCE, "stock"), one(AGAIN, "stock"), one(TIDE, "tide")]
    return runs + [one(f"{NUDGED} {i}", "stock", i) for i in range(1, nudged + 1)]


def checked_overrides(config: str, overrides: tuple[str, ...], world_size: int) -> tuple[str, ...]:
    """The overrides, with a seed where the job has none. Raises `ConfigError` for a job that is wrong, before any training starts."""
    from torchtitan_tide import job_check

    for override in overrides:
        name = override.partition("=")[0].replace("-", "_")
        if name in ("__tide.comm", "__training.steps"):
            raise ConfigError(
                f"override {override!r}: tide parity sets this itself (--steps N, and stock and tide in turn)"
            )
    job = job_check.check(config, list(overrides), world_size, here=False)
    return overrides if job.config.debug.seed is not None else (*overrides, f"--debug.seed={SEED}")


def tell(line: str) -> None:
    print(f"[parity] {line}", file=sys.stderr, flush=True)


def wants_nudged(stock: list[float], again: list[float], tide: list[float], window: int) -> bool:
    """Whether stock says nothing about how far a rounding carries, and the verdict needs to know."""
    try:
        gaps = gap(again, stock, window), gap(tide, stock, window)
    except ValueError:
        return False  # the report says what is wrong with the curves
    return gaps[0].largest == 0 and not gaps[1].equal


def needed_runs(
    session: Session, config: str, steps: int, overrides: tuple[str, ...], nudged: int, window: int
) -> dict[str, Result]:
    """Run what is needed: nudged runs only where the stock runs are equal and TIDE's is not. Results by the runs' names."""
    all_runs = trainings(config, steps, overrides, nudged)
    results = session.finish(all_runs[:3], tell)
    records = [results[t.name].record for t in all_runs[:3]]
    if all(records):
        stock, again, tide = (record["losses"] for record in records if record)
        if wants_nudged(stock, again, tide, window):
            tell("stock repeats itself and TIDE differs: nudged stock runs will say how far a rounding carries")
            results |= session.finish(all_runs[3:], tell)
    return {name.replace("_", " "): result for name, result in results.items()}


def run(
    config: str, overrides: tuple[str, ...], steps: int, window: int, nudged: int, out: str, where: LaunchOptions
) -> int:
    """Exit code: 0 TIDE passes, 1 it does not or a training failed, 2 a mistake in what was asked (one line on stderr), 130 interrupted."""
    from torchtitan_tide.parity import report

    try:
        if window < 1 or steps < 2 * window:
            raise ConfigError(f"--steps {steps} --window {window}: takes at least two windows of steps")
        if nudged < 1:
            raise ConfigError(f"--nudged {nudged}: takes a whole number >= 1")
        checked = checked_overrides(config, overrides, where.world_size)
        folder = Path(out or f"outputs/parity/{Path(config).stem}")
        with ending_on_sigterm(), closing(where.start()) as launcher:
            if isinstance(launcher, NodesLauncher) and launcher.node_rank:
                return launcher.follow(tell)
            results = needed_runs(where.session(folder, launcher), config, steps, checked, nudged, window)
    except KeyboardInterrupt:
        tell("interrupted; start it again to go on")
        return 130
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return report.write(folder, config, checked, steps, window, results)
