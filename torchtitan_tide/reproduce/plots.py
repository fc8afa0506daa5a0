"""Plots of `tide reproduce`: bars of what was measured, and where there is a published value for the same bar, a mark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchtitan_tide.measure.plotting import COLOURS, pyplot
from torchtitan_tide.reproduce.matrix import Cell
from torchtitan_tide.reproduce.seed import SAVED
from torchtitan_tide.reproduce.tables import Outcome

PUBLISHED_SM = {"stock": 78.0, "tide": 3.8}
PUBLISHED_RESIDENT = {"stock": 89.0, "tide": 8.0}
PUBLISHED_PARTS = {"tide": 100.0, "tide_ag": 50.0, "tide_rs": 58.0}

Value = Callable[[dict[str, Any], dict[str, Any]], float | None]
"""A bar's height from a cell's record and stock's; None: no bar."""


def bars(
    axes: Any, outcome: Outcome, cells: Sequence[Cell], value: Value, mark: Callable[[Cell], float | None]
) -> bool:
    """Bars, those of a model and size together. Whether there is any."""
    groups = list(dict.fromkeys((cell.model.title, cell.size.label) for cell in cells))
    rows = list(dict.fromkeys(cell.row for cell in cells))
    width = 0.8 / max(len(rows), 1)
    drawn: set[str] = set()
    marked = False
    for cell in cells:
        record, stock = outcome.record(cell), outcome.record(Cell(cell.model, cell.size, "stock"))
        if outcome.state(cell) != "done":
            continue
        if record is None or stock is None or (height := value(record, stock)) is None:
            continue
        x = groups.index((cell.model.title, cell.size.label)) + (rows.index(cell.row) - (len(rows) - 1) / 2) * width
        axes.bar(x, height, width * 0.95, color=COLOURS[cell.row], label=None if cell.row in drawn else cell.row)
        axes.text(x, height, f"{height:.3g}", ha="center", va="bottom", fontsize=7)
        drawn.add(cell.row)
        if (published := mark(cell)) is not None:
            label = None if marked else "published (64 GPUs)"
            axes.plot(x, published, marker="_", markersize=18, color="black", linestyle="none", label=label)
            marked = True
    axes.set_xticks(range(len(groups)), [f"{model}\n{size}" for model, size in groups], fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return bool(drawn)


def _of(outcome: Outcome, rows: Sequence[str], model: str | None = None, size: str | None = None) -> list[Cell]:
    return [
        cell
        for cell in outcome.cells
        if cell.row in rows and model in (None, cell.model.key) and size in (None, cell.size.name)
    ]


def _profiled(name: str, scale: float) -> Value:
    def value(record: dict[str, Any], stock: dict[str, Any]) -> float | None:
        return record["profile"][name] * scale if record["profile"] else None

    return value


def _part(outcome: Outcome) -> Value:
    done = [cell for cell in _of(outcome, ["tide"], "llama", "24K") if outcome.state(cell) == "done"]
    whole = outcome.record(done[0]) if done else None

    def value(record: dict[str, Any], stock: dict[str, Any]) -> float | None:
        if whole is None or stock["step_ms"] <= whole["step_ms"]:
            return None
        return (stock["step_ms"] - record["step_ms"]) / (stock["step_ms"] - whole["step_ms"]) * 100

    return value


def draw(folder: Path, outcome: Outcome) -> list[str]:
    """Names of the plots written: of each table for which there is a bar. Raises `ConfigError` without matplotlib."""
    plt = pyplot()
    written: list[str] = []

    def figure(name: str, panels: Sequence[tuple[str, Sequence[Cell], Value, Callable[[Cell], float | None]]]) -> None:
        drawing, axes = plt.subplots(
            1, len(panels), figsize=(max(6, 5 * len(panels)), 4), layout="constrained", squeeze=False
        )
        drawn = [
            bars(ax, outcome, cells, value, mark) for ax, (_, cells, value, mark) in zip(axes[0], panels, strict=True)
        ]
        for ax, (title, *_) in zip(axes[0], panels, strict=True):
            ax.set_title(title + ("; debug sizes" if outcome.debug else ""), fontsize=9)
        labels = {
            label: handle for ax in axes[0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        drawing.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        if any(drawn):
            drawing.savefig(folder / f"{name}.png", dpi=120)
            written.append(f"{name}.png")
        plt.close(drawing)

    def nothing(cell: Cell) -> None:
        return None

    def to_stock(cell: Cell) -> float | None:
        saved = SAVED.get((cell.model.key, cell.size.name))
        return 1 - saved if saved is not None and cell.row == "tide" else None

    three = ("stock", "symm_mem", "tide")
    if "step_time" in outcome.tables:
        step = ("step time, to stock", _of(outcome, three), lambda r, s: r["step_ms"] / s["step_ms"], to_stock)
        figure("step_time", [step])
    if "sm_time" in outcome.tables:
        cells = _of(outcome, three, "llama", "8K")
        sm = (
            "SM time of communication, SM s a step",
            cells,
            _profiled("comm_sm_ms", 1e-3),
            lambda c: PUBLISHED_SM.get(c.row),
        )
        share = (
            "communication kernel resident, % of the step",
            cells,
            _profiled("resident", 100),
            lambda c: PUBLISHED_RESIDENT.get(c.row),
        )
        figure("sm_time", [sm, share])
    if "ablation" in outcome.tables:
        cells = _of(outcome, ("tide_ag", "tide_rs", "tide"), "llama", "24K")
        figure("ablation", [("of TIDE's saving, %", cells, _part(outcome), lambda c: PUBLISHED_PARTS.get(c.row))])
    if "memory" in outcome.tables:
        four = (*three, "tide_slot_reuse")
        cells = _of(outcome, four, "llama", "24K") + _of(outcome, four, "wan", "31.2K")
        figure("memory", [("peak memory, GiB", cells, lambda r, s: r["peak_gib"], nothing)])
    return written
