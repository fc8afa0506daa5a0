"""What `tide parity` leaves: a table on the terminal and as Markdown, all figures as JSON and CSV, a plot."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torchtitan_tide.errors import ConfigError
from torchtitan_tide.measure.plotting import COLOURS, pyplot
from torchtitan_tide.measure.session import Result
from torchtitan_tide.parity.protocol import (
    AGAIN,
    NUDGED,
    REFERENCE,
    TIDE,
    Gap,
    Verdict,
    gap,
    moving_average,
    stock_words,
    verdict,
)

SEED = "Published: Qwen3-30B-A3B, 64 GPUs, 1,000 steps: TIDE 0.73 %, a second stock run 1.12 %."
HEAD = ("run", "largest gap", "at step", "mean gap", "losses that differ", "last average")


def rows(curves: Mapping[str, list[float]], gaps: Mapping[str, Gap], window: int) -> list[tuple[str, ...]]:
    """A row a run: the table's cells."""
    reference = curves[REFERENCE]
    found: list[tuple[str, ...]] = []
    for name, losses in curves.items():
        last = f"{moving_average(losses, window)[-1]:.5f}"
        if name == REFERENCE:
            found.append((name, "reference", "", "", "", last))
            continue
        g = gaps[name]
        differ = sum(a != b for a, b in zip(losses, reference, strict=True))
        since = f"{differ} of {len(losses)}, from step {g.first_different} on" if differ else "none, to the bit"
        found.append((name, f"{g.largest:.3%}", str(g.at_step), f"{g.mean:+.3%}", since, last))
    return found


def markdown(lines: list[str], table: list[tuple[str, ...]], head: tuple[str, ...]) -> str:
    """A Markdown table with text above."""
    text = ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *table)]
    return "\n\n".join([*lines, "\n".join(text)]) + "\n"


def plot(path: Path, curves: Mapping[str, list[float]], gaps: Mapping[str, Gap], window: int, title: str) -> None:
    """Averaged losses above, relative distance to the first stock run below. Raises `ConfigError` without matplotlib."""
    plt = pyplot()
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    reference = moving_average(curves[REFERENCE], window)
    at = range(window, window + len(reference))
    for name, losses in curves.items():
        averages = moving_average(losses, window)
        style: dict[str, Any] = {"color": COLOURS.get(name, "#9ca3af"), "linestyle": "--" if name == TIDE else "-"}
        if name.startswith(NUDGED):
            style["zorder"] = 1  # behind the curves that are compared
        above.plot(at, averages, label=name, **style)
        if name != REFERENCE:
            distance = [(a - b) / b * 100 for a, b in zip(averages, reference, strict=True)]
            below.plot(at, distance, label=f"{name}: at most {gaps[name].largest:.3%}", **style)
    half = len(curves[REFERENCE]) // 2
    for axes in (above, below):
        axes.axvspan(half, len(curves[REFERENCE]), color="#f3f4f6", zorder=0)
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    above.set(title=title, ylabel=f"loss, mean of {window} steps")
    below.set(xlabel="step (grey: where gaps are taken)", ylabel="distance to the first stock run, %")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def carried_words(record: Mapping[str, Any]) -> str:
    """How much of the TIDE run TIDE carried."""
    groups, stock, collectives = record["groups"], record["groups_stock"], record["collectives_stock"]
    if stock == groups:
        return f"NOTHING RAN ON TIDE: {'; '.join(record['stock_reasons']) or 'it has no groups'}."
    if not stock and not collectives:
        return f"TIDE carried all {groups} groups."
    reasons = f" ({'; '.join(record['stock_reasons'])})" if record["stock_reasons"] else ""
    return f"NOT ALL ON TIDE: {stock} of {groups} groups{reasons} and {collectives} collectives ran on stock."


def write(
    folder: Path, config: str, overrides: tuple[str, ...], steps: int, window: int, results: Mapping[str, Result]
) -> int:
    """Write and print everything. Exit code: 0 TIDE passes, 1 not, or a training is missing."""
    failed = {name: result.error for name, result in results.items() if result.record is None}
    if failed:
        for name, error in failed.items():
            print(f"error: {name}: {error}", file=sys.stderr)
        return 1
    records: dict[str, dict[str, Any]] = {name: result.record for name, result in results.items() if result.record}
    curves = {name: record["losses"] for name, record in records.items()}
    try:
        gaps = {name: gap(losses, curves[REFERENCE], window) for name, losses in curves.items() if name != REFERENCE}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    said = verdict(gaps)
    if records[TIDE]["groups_stock"] == records[TIDE]["groups"]:
        said = Verdict("no yardstick", False, "no group ran on TIDE, so there is nothing to compare")
    about, first = records[TIDE]["about"], results[REFERENCE]
    what = shlex.join((config, *overrides))
    lines = [
        f"`tide parity {what}`, {steps} steps, moving average of {window}, gaps over steps {max(steps // 2, window)} to {steps}.",
        f"{first.began[:10]}, {about['ranks']} ranks, {about['device']}, PyTorch {about['torch']}, commit {first.commit or 'unknown'}.",
        f"**{'PASSES' if said.passed else 'DOES NOT PASS'}** ({said.outcome}): {said.text}. {stock_words(gaps[AGAIN])} "
        f"{carried_words(records[TIDE])}",
        SEED,
    ]
    table = rows(curves, gaps, window)
    (folder / "parity.md").write_text(markdown(lines, table, HEAD))
    _write_data(folder, lines, curves, gaps, said, about, window)
    _show(lines, table)
    try:
        plot(folder / "parity.png", curves, gaps, window, f"{Path(config).stem}, {about['ranks']} ranks")
        print(f"Written to {folder}: parity.md, parity.json, parity.csv, parity.png")
    except ConfigError as error:
        print(f"Written to {folder}: parity.md, parity.json, parity.csv; {error}")
    return 0 if said.passed else 1


def _write_data(
    folder: Path,
    lines: list[str],
    curves: Mapping[str, list[float]],
    gaps: Mapping[str, Gap],
    said: Verdict,
    about: Mapping[str, Any],
    window: int,
) -> None:
    data = {
        "what": lines[:2],
        "about": about,
        "window": window,
        "gaps": {name: vars(g) for name, g in gaps.items()},
        "verdict": vars(said),
    }
    (folder / "parity.json").write_text(json.dumps(data, indent=1) + "\n")
    averages = {name: [float("nan")] * (window - 1) + moving_average(losses, window) for name, losses in curves.items()}
    with (folder / "parity.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["step", *curves, *(f"{name}, mean of {window}" for name in curves)])
        for i in range(len(curves[REFERENCE])):
            mean = ["" if i < window - 1 else repr(averages[name][i]) for name in curves]
            out.writerow([i + 1, *(repr(losses[i]) for losses in curves.values()), *mean])


def _show(lines: list[str], cells: list[tuple[str, ...]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table()
    for name in HEAD:
        table.add_column(name)
    for row in cells:
        table.add_row(*row)
    console.print(table)
    for line in lines:
        console.print(line.replace("**", "").replace("`", ""), markup=False, highlight=False)
