"""`tide reproduce`: run the matrix, cell by cell, and report."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchtitan_tide.errors import ConfigError
from torchtitan_tide.measure.launch import TemplateLauncher, ending_on_sigterm
from torchtitan_tide.measure.nodes import NodesLauncher
from torchtitan_tide.measure.options import LaunchOptions
from torchtitan_tide.measure.session import Result, Training
from torchtitan_tide.reproduce import plots, tables
from torchtitan_tide.reproduce.asked import Asked
from torchtitan_tide.reproduce.matrix import DEBUG, FULL, GPU_ROWS, ROWS, TABLES, Cell, cells_of, chosen, with_configs

NO_GPU = "not possible without a GPU"


def tell(line: str) -> None:
    print(f"[reproduce] {line}", file=sys.stderr, flush=True)


def chosen_cells(asked: Asked, table_names: tuple[str, ...]) -> list[Cell]:
    """The cells that were asked for. Raises `ConfigError`."""
    known = with_configs(DEBUG if asked.debug else FULL, asked.configs)
    keys = chosen(asked.models, [model.key for model in known], "--models")
    names = list(dict.fromkeys(size.name for model in known for size in model.sizes))
    cells = cells_of(
        table_names,
        [model for model in known if model.key in keys],
        chosen(asked.sizes, names, "--sizes"),
        chosen(asked.rows, list(ROWS), "--rows"),
    )
    if not cells:
        raise ConfigError(
            f"--tables {','.join(table_names)} --models {asked.models} --sizes {asked.sizes} --rows {asked.rows}: no cell is in all of them"
        )
    for path in dict.fromkeys(cell.model.config for cell in cells):
        if not Path(path).is_file():
            raise ConfigError(
                f"{path}: no such file; run this in the project's folder, or name another: --configs MODEL=FILE"
            )
    return cells


def collectives(folder: Path) -> dict[str, Any]:
    """What scripts/bench/reduce_scatter.py wrote into this folder; {} where it was not run."""
    try:
        return json.loads((folder / "collectives.json").read_text())
    except (OSError, ValueError):
        return {}


def loss_gaps(folder: Path) -> dict[str, float]:
    """Largest gaps of `tide parity`, where it was run into this folder's `parity`; {} where not."""
    try:
        found = json.loads((folder / "parity" / "parity.json").read_text())["gaps"]
    except (OSError, ValueError, KeyError):
        return {}
    return {name: gap["largest"] for name, gap in found.items()}


def run(asked: Asked, where: LaunchOptions, overrides: tuple[str, ...]) -> int:
    """Exit code: 0 every cell that can run here is done, 1 some failed or were not run, 2 a mistake in what was asked."""
    import torch

    try:
        asked.check()
        if asked.debug and not where.ranks:
            where = replace(where, ranks=2)
        names = chosen(asked.tables, list(TABLES), "--tables")
        cells = chosen_cells(asked, names)
        # A launcher of the user's may start ranks where there are GPUs.
        no_gpu = not where.launcher and not torch.cuda.is_available()
        impossible = {cell.name: NO_GPU for cell in cells if no_gpu and cell.row in GPU_ROWS}
        folder = Path(asked.out or ("outputs/reproduce_debug" if asked.debug else "outputs/reproduce"))
        trainings = [
            cell.training(asked.warmup, asked.steps, overrides) for cell in cells if cell.name not in impossible
        ]
        results = _results(trainings, folder, where, asked)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if results is None:
        return 0  # another machine's part
    outcome = tables.Outcome(
        cells, results, impossible, names, asked.debug, overrides, loss_gaps(folder), collectives(folder)
    )
    tables.write(folder, outcome, {"asked": asdict(asked), "where": asdict(where), "overrides": overrides})
    written = "reproduce.md, cells.csv, reproduce.json"
    try:
        print(f"Written to {folder}: {', '.join([written, *plots.draw(folder, outcome)])}")
    except ConfigError as error:
        print(f"Written to {folder}: {written}; {error}")
    return 0 if all(results[training.name].record is not None for training in trainings) else 1


def _results(trainings: list[Training], folder: Path, where: LaunchOptions, asked: Asked) -> dict[str, Result] | None:
    """What cells showed, by name; None on machines that only follow. After Ctrl-C: of what was finished until then."""
    if asked.report_only:
        session = where.session(folder, TemplateLauncher(where.ranks_here))
        return {training.name: session.result(training) for training in trainings}
    with ending_on_sigterm(), closing(where.start()) as launcher:
        if isinstance(launcher, NodesLauncher) and launcher.node_rank:
            launcher.follow(tell)
            return None
        session = where.session(folder, launcher)
        try:
            return session.finish(trainings, tell, asked.again)
        except KeyboardInterrupt:
            tell("interrupted; start it again to go on")
            return {training.name: session.result(training) for training in trainings}
