"""What `tide reproduce` leaves: tables on the terminal and as Markdown, all cells as CSV and JSON."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from torchtitan_tide.measure.session import Result
from torchtitan_tide.reproduce.matrix import TABLES, Cell, cells_of
from torchtitan_tide.reproduce.seed import FIGURES, Measured, Missing

Rows = list[tuple[str, ...]]
COLUMNS = (
    "model",
    "tokens a GPU",
    "row",
    "step ms",
    "to stock",
    "peak GiB",
    "to stock GiB",
    "of it arena",
    "comm SM s",
    "resident",
    "copies ms",
    "state",
)
FIGURE_COLUMNS = ("table", "figure", "published", "measured")


@dataclass(frozen=True)
class Outcome:
    """What is known: every cell that was asked for with its result. `not_possible`: cells that cannot run here, with the reason."""

    cells: Sequence[Cell]
    results: Mapping[str, Result]
    not_possible: Mapping[str, str]
    tables: Sequence[str]
    debug: bool
    overrides: Sequence[str]
    loss_gaps: Mapping[str, float]
    collectives: Mapping[str, Any]

    def record(self, cell: Cell) -> dict[str, Any] | None:
        return self.results.get(cell.name, Result()).record

    def measured(self) -> Measured:
        """What published figures may be computed from: not cells of TIDE in which something ran on stock."""
        found = {cell.key: record for cell in self.cells if (record := self.record(cell)) is not None}
        unusable = {}
        for cell in self.cells:
            state = self.state(cell)
            if state.startswith("FAILED"):
                unusable[cell.key] = "failed"
            elif state != "done":
                unusable[cell.key] = "ran partly on stock" if cell.key in found else state
        usable = {key: record for key, record in found.items() if key not in unusable}
        return Measured(usable, unusable, self.loss_gaps, self.collectives)

    def state(self, cell: Cell) -> str:
        """done, with what ran on stock; or why there is no record."""
        result = self.results.get(cell.name, Result())
        if result.record is None:
            return self.not_possible.get(cell.name) or (f"FAILED: {result.error}" if result.error else "not run")
        groups, collectives = result.record["groups_stock"], result.record["collectives_stock"]
        if cell.row.startswith("tide") and (groups or collectives):
            reasons = "; ".join(result.record["stock_reasons"])
            return f"ON STOCK: {groups} of {result.record['groups']} groups ({reasons}), {collectives} collectives"
        return "done"


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def cell_row(outcome: Outcome, cell: Cell) -> tuple[str, ...]:
    """The cells of a table's row."""
    head = (cell.model.title, cell.size.label, cell.row)
    record = outcome.record(cell)
    if record is None:
        return (*head, *("",) * (len(COLUMNS) - len(head) - 1), outcome.state(cell))
    stock = outcome.record(Cell(cell.model, cell.size, "stock"))
    profile = record["profile"] or {}
    seconds = profile.get("comm_sm_ms")
    return (
        *head,
        f"{record['step_ms']:.1f}",
        f"{record['step_ms'] / stock['step_ms']:.3f}" if stock else "",
        f"{record['peak_gib']:.2f}",
        f"{record['peak_gib'] - stock['peak_gib']:+.2f}" if stock else "",
        f"{record['arena_gib']:.2f}",
        _number(None if seconds is None else seconds / 1e3, ".2f"),
        _number(profile.get("resident"), ".1%"),
        _number(profile.get("layout_ms"), ".1f"),
        outcome.state(cell),
    )


def table_rows(outcome: Outcome, table: str) -> Rows:
    """A published table's cells."""
    wanted = {cell.key for cell in cells_of([table], list({c.model.key: c.model for c in outcome.cells}.values()))}
    return [cell_row(outcome, cell) for cell in outcome.cells if cell.key in wanted]


def figure_rows(outcome: Outcome) -> Rows:
    """Published figures beside measured ones; what could not be computed says why, in brackets."""
    measured = outcome.measured()
    rows: Rows = []
    for figure in FIGURES:
        if figure.table in TABLES and figure.table not in outcome.tables:
            continue
        try:
            value = ("debug sizes: " if outcome.debug else "") + figure.measure(measured)
        except Missing as missing:
            value = f"({missing})"
        rows.append((figure.table, figure.what, figure.published, value))
    return rows


def head_lines(outcome: Outcome) -> list[str]:
    """Machine, dates, versions, commits of what was run."""
    done = [outcome.results[c.name] for c in outcome.cells if outcome.record(c) is not None]
    states = Counter(
        "not possible here" if c.name in outcome.not_possible else outcome.results.get(c.name, Result()).state
        for c in outcome.cells
    )
    lines = ["Cells: " + ", ".join(f"{count} {state}" for state, count in states.items()) + "."]
    abouts = {json.dumps(result.record["about"], sort_keys=True) for result in done if result.record}
    for text in sorted(abouts):
        a = json.loads(text)
        nccl = f", NCCL {a['nccl']}" if a["nccl"] else ""
        lines.append(
            f"{a['ranks']} ranks, {a['ranks_a_machine']} a machine, {a['device']}, PyTorch {a['torch']}{nccl}."
        )
    if done:
        days = sorted({result.began[:10] for result in done})
        commits = sorted({result.commit or "unknown" for result in done})
        lines.append(f"Run {' and '.join(days)}, commit {', '.join(commits)}.")
    if outcome.overrides:
        lines.append(f"Overrides: {shlex.join(outcome.overrides)}")
    if outcome.debug:
        lines.append(
            "DEBUG: small models. Nothing here says how fast anything is; figures beside published ones only show that they are computed."
        )
    return lines


def write(folder: Path, outcome: Outcome, settings: Mapping[str, Any]) -> None:
    """reproduce.md, cells.csv, reproduce.json, and the same tables on the terminal."""
    parts: list[tuple[str, Sequence[str], Rows]] = [
        (TABLES[name].title, COLUMNS, rows) for name in outcome.tables if (rows := table_rows(outcome, name))
    ]
    parts.append(("Published and measured", FIGURE_COLUMNS, figure_rows(outcome)))
    head = head_lines(outcome)
    text = ["# tide reproduce", *head]
    console = Console(width=None if sys.stdout.isatty() else 190)
    for title, columns, rows in parts:
        text += [f"## {title}", _markdown(columns, rows)]
        table = RichTable(title=title, title_justify="left")
        for name in columns:
            table.add_column(
                name, justify="right" if columns is COLUMNS and name not in ("model", "row", "state") else "left"
            )
        for row in rows:
            table.add_row(*row)
        console.print(table, markup=False)
    for line in head:
        print(line)
    (folder / "reproduce.md").write_text("\n\n".join(text) + "\n")
    _write_csv(folder / "cells.csv", outcome)
    data = {
        "settings": dict(settings),
        "figures": [dict(zip(FIGURE_COLUMNS, row, strict=True)) for row in figure_rows(outcome)],
        "cells": [
            {
                "name": cell.name,
                "model": cell.model.title,
                "config": cell.model.config,
                "tokens": cell.size.tokens,
                "stands_for": cell.size.name,
                "row": cell.row,
                "state": outcome.state(cell),
                "record": outcome.record(cell),
            }
            for cell in outcome.cells
        ],
    }
    (folder / "reproduce.json").write_text(json.dumps(data, indent=1) + "\n")


def _markdown(columns: Sequence[str], rows: Rows) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def _write_csv(path: Path, outcome: Outcome) -> None:
    numbers = (
        "step_ms",
        "host_ms",
        "peak_gib",
        "arena_gib",
        "device_gib",
        "loss",
        "groups",
        "groups_stock",
        "collectives_stock",
    )
    profile = (
        "comm_sm_ms",
        "nccl_sm_ms",
        "sum_sm_ms",
        "cast_sm_ms",
        "layout_sm_ms",
        "layout_ms",
        "resident",
        "exposed_ms",
        "copies_ms",
        "span_ms",
    )
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["model", "tokens", "stands for", "row", "state", *numbers, *profile])
        for cell in outcome.cells:
            record = outcome.record(cell) or {}
            profiled = record.get("profile") or {}
            values = [record.get(name, "") for name in numbers] + [profiled.get(name, "") for name in profile]
            head = [cell.model.title, cell.size.tokens, cell.size.name, cell.row, outcome.state(cell)]
            out.writerow(head + ["" if value is None else value for value in values])
