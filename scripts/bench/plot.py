"""Figures for the documents from what the benchmarks wrote, as SVG.

python scripts/bench/plot.py step.json collectives.json beside.json ... [--out docs/figures]

  steps_to_stock.svg    step time / stock's, by model and tokens, of all step.py's files
  steps_to_limit.svg    step time / that without communication
  all_gather.svg        rates of a block's all-gather and, as a line, of the same copies by copy engines alone
  reduce_scatter.svg    the same; a rate is bytes of bf16 / time in all rows, also in stock's, which moves twice as many, in fp32
  beside.svg            slowdown of two multiplies beside each collective; hatched: the collectives had ended before the multiplies

Only figures for which there is a file are drawn. Of collectives.py's and beside.py's files the last counts, and of several that trained the
same at the same number of tokens. Needs matplotlib:
pip install -e ".[plots]".
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from figures import FiguresError, Run, load, measured

COLOURS = {
    "stock": "#6b7280",
    "nccl": "#9ca3af",
    "fsdp": "#6b7280",
    "symm_mem": "#d97706",
    "symm_mem fsdp": "#b45309",
    "tide": "#1d4ed8",
    "tide_early": "#3b82f6",
    "tide_all": "#60a5fa",
    "tide_ag": "#7c3aed",
    "tide_rs": "#059669",
    "none": "#111827",
}
"""Of rows, alike in all figures."""
LABELS = {
    "nccl": "NCCL alone",
    "fsdp": "FSDP2",
    "stock": "stock FSDP2",
    "symm_mem": "SymmMem",
    "symm_mem fsdp": "SymmMem with FSDP2's copies",
    "tide": "TIDE",
    "tide_early": "TIDE, early_reduce",
    "tide_all": "TIDE, early_reduce and early_gather",
    "none": "no communication",
}
SHADES = ("#bfdbfe", "#60a5fa", "#2563eb", "#1e3a8a")
"""Of TIDE's reduce-scatters, by thread blocks."""
BROAD_IN, DPI = 10.0, 100


def pyplot() -> Any:
    """Raises `FiguresError` without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise FiguresError('matplotlib is not installed; pip install -e ".[plots]"') from None
    matplotlib.use("Agg")
    # The same file for the same figures; text as text keeps it small.
    matplotlib.rcParams.update({"svg.hashsalt": "tide", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    return plt


def colour(row: str) -> str:
    return COLOURS.get(row, "#2563eb" if row.startswith("tide") else "#9ca3af")


def dark(shade: str) -> bool:
    """Whether white is read better on it (sRGB luma)."""
    red, green, blue = (int(shade[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


class Bars:
    """Groups of bars with their values. A group: label, values by row, height of a line across it or None."""

    def __init__(self, axes: Any, groups: Sequence[tuple[str, dict[str, float], float | None]]) -> None:
        self.axes, self.groups = axes, groups
        self.rows = list(dict.fromkeys(row for _, values, _ in groups for row in values))

    def draw(self, form: str, line_label: str, colours: dict[str, str], hatches: dict[str, str]) -> None:
        width = 0.86 / max(len(self.rows), 1)
        top = max([v for _, values, _ in self.groups for v in values.values()] + [g[2] or 0 for g in self.groups])
        size = 7 if len(self.groups) * len(self.rows) <= 40 else 5.5
        for i, row in enumerate(self.rows):
            places = [(x, values[row]) for x, (_, values, _) in enumerate(self.groups) if row in values]
            xs = [x + (i - (len(self.rows) - 1) / 2) * width for x, _ in places]
            heights = [value for _, value in places]
            look = {"color": colours.get(row, colour(row)), "hatch": hatches.get(row, ""), "edgecolor": "white"}
            self.axes.bar(xs, heights, width, label=LABELS.get(row, row), linewidth=0.4, **look)
            # At the foot of the bars, clear of the lines.
            words = {"color": "white" if dark(look["color"]) else "black", "fontsize": size, "rotation": 90}
            box = {"facecolor": look["color"], "edgecolor": "none", "pad": 0.6} if look["hatch"] else None
            for x, value in zip(xs, heights, strict=True):
                self.axes.text(x, top / 50, f"{value:{form}}", ha="center", va="bottom", bbox=box, **words)
        for x, (_, _, line) in enumerate(self.groups):
            if line is not None:
                label = line_label if x == next(i for i, g in enumerate(self.groups) if g[2] is not None) else None
                self.axes.hlines(line, x - 0.46, x + 0.46, colors="black", linewidth=1.2, label=label)
        self.axes.set_xticks(range(len(self.groups)), [label for label, _, _ in self.groups], fontsize=8)
        self.axes.set_ylim(0, top * 1.06)
        self.axes.grid(axis="y", alpha=0.3)
        self.axes.set_axisbelow(True)
        for side in ("top", "right"):
            self.axes.spines[side].set_visible(False)


def grouped(
    groups: Sequence[tuple[str, dict[str, float], float | None]],
    title: str,
    what: str,
    form: str,
    line: str,
    colours: dict[str, str] | None = None,
    hatches: dict[str, str] | None = None,
) -> Any:
    """A figure of one panel. `what`: the axis; `line`: what the lines are."""
    figure, axes = pyplot().subplots(figsize=(BROAD_IN, 4.2), layout="constrained")
    Bars(axes, groups).draw(form, line, colours or {}, hatches or {})
    axes.set_title(title, fontsize=10, loc="left", pad=16)  # the source stands below it
    axes.set_ylabel(what)
    figure.legend(
        loc="outside lower center",
        ncols=6 if len(axes.get_legend_handles_labels()[0]) <= 7 else 4,
        frameon=False,
        fontsize=8,
    )
    return figure


def steps(runs: Sequence[Run], key: str, title: str, what: str) -> Any:
    """`key`: to_stock or to_limit."""
    unit = {"to_stock": "stock", "to_limit": "none"}[key]
    found = {}
    for run in runs:
        for label, rows in run.steps():
            ratios = {row: value for row, value in measured(rows, key).items() if row != unit}
            found[label.replace(" tokens", "").replace(" parameters", "").replace(", ", "\n")] = ratios
    groups = [(label, found[label], 1.0) for label in sorted(found, key=_by_model) if found[label]]
    figure = grouped(groups, title, what, ".3f", LABELS[unit]) if groups else None
    if figure is not None:
        figure.axes[0].set_xlabel("model, tokens a GPU, parameters")
    return figure


def _by_model(label: str) -> tuple[str, int, list[str]]:
    model, tokens, *rest = label.split("\n")
    return model, int(tokens), rest


def rate(row: dict[str, Any], nbytes: float) -> float:
    """GB/s."""
    return nbytes / row["us"] / 1e3


def gathers(run: Run) -> Any:
    groups = []
    for model, kinds in run.found["models"].items():
        for dtype, rows in kinds["all_gather"].items():
            rates = {name: rate(row, row["link_bytes"]) for name, row in rows.items() if row.get("us")}
            if rates:
                groups.append((f"{model}\n{dtype} parameters", rates, rates.pop("copies", None)))
    title = "All-gather of one block into bf16"
    return grouped(groups, title, "GB/s to the other ranks", ".0f", "copy engines alone") if groups else None


def reduces(run: Run) -> Any:
    groups = []
    for model, kinds in run.found["models"].items():
        rows = {name: row for name, row in kinds["reduce_scatter"].items() if row.get("us")}
        if "copies" in rows:
            rates = {name: rate(row, rows["copies"]["link_bytes"]) for name, row in rows.items()}
            groups.append((model, rates, rates.pop("copies")))
    tide = [row for row in dict.fromkeys(row for _, rates, _ in groups for row in rates) if row.startswith("tide")]
    blocks, pieces = ([dict.fromkeys(row.split(", ")[i] for row in tide) for i in range(2)]) if tide else ({}, {})
    shades = {name: SHADES[min(i, len(SHADES) - 1)] for i, name in enumerate(blocks)}
    hatches = {row: "" if row.endswith(list(pieces)[0]) else "///" for row in tide}
    title, what = "Reduce-scatter of one block's bf16 gradients into fp32", "GB/s of bf16 gradients"
    colours = {row: shades[row.split(", ")[0]] for row in tide}
    return grouped(groups, title, what, ".0f", "copy engines alone", colours, hatches) if groups else None


def beside(run: Run) -> Any:
    """Horizontal bars from 1 on, a panel for each multiply."""
    cases = run.found["cases"]
    multiplies = list(dict.fromkeys(name for row in cases.values() for name in row if isinstance(row[name], dict)))
    if not multiplies:
        return None
    size = (BROAD_IN, 1.4 + 0.24 * len(cases))
    figure, panels = pyplot().subplots(
        1, len(multiplies), figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for axes, multiply in zip(panels[0], multiplies, strict=True):
        for y, (name, row) in enumerate(cases.items()):
            found = row.get(multiply, {})
            if "slowdown" not in found:
                axes.text(1, y, " failed", va="center", fontsize=7)
                continue
            short, slowdown = not found["lasted"], found["slowdown"]
            shown = name.split(" ", 1)[1].split(", ")[0]
            look = "#111827" if shown == "copies" else colour(shown)
            axes.barh(y, slowdown - 1, 0.78, left=1, color=look, hatch="///" if short else "", edgecolor="white")
            axes.text(max(slowdown, 1), y, f" {slowdown:.2f}{' short' if short else ''}", va="center", fontsize=7)
        axes.set_title(f"{multiply} in bf16", fontsize=9)
        axes.set_xlabel("time / time alone")
        slowdowns = [1.0, *(r[multiply]["slowdown"] for r in cases.values() if "slowdown" in r.get(multiply, {}))]
        axes.set_xlim(min(slowdowns), max(1.01, 1.15 * max(slowdowns) - 0.15))
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0][0].set_yticks(range(len(cases)), list(cases), fontsize=8)
    panels[0][0].invert_yaxis()
    figure.suptitle(f"Multiplies beside collectives of a {run.options['model']} block", fontsize=10, x=0.01, ha="left")
    return figure


def sources(runs: Sequence[Run]) -> str:
    """Once for all runs that differ in their commit alone."""
    commits: dict[str, list[str]] = {}
    for run in runs:
        about, _, commit = run.source.rpartition(", commit ")
        commits.setdefault(about, []).append(commit)
    return "; ".join(f"{about}, commit {', '.join(dict.fromkeys(found))}" for about, found in commits.items())


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Files written. Raises `FiguresError` where a file lacks something, without matplotlib, or if nothing is left to draw."""
    of = {kind: [run for run in runs if run.kind == kind] for kind in ("step", "collectives", "beside")}
    ratio = "time of a step / "
    wanted: list[tuple[str, list[Run], Callable[[], Any]]] = []
    if mine := of["step"]:
        wanted += [
            ("steps_to_stock", mine, lambda: steps(mine, "to_stock", "Steps against stock FSDP2", f"{ratio}stock's")),
            (
                "steps_to_limit",
                mine,
                lambda: steps(mine, "to_limit", "Steps against the limit", f"{ratio}without communication"),
            ),
        ]
    if collective := of["collectives"][-1:]:
        wanted += [("all_gather", collective, lambda: gathers(collective[0]))]
        wanted += [("reduce_scatter", collective, lambda: reduces(collective[0]))]
    if multiply := of["beside"][-1:]:
        wanted += [("beside", multiply, lambda: beside(multiply[0]))]
    plt = pyplot()
    written = []
    for name, used, make in wanted:
        try:
            figure = make()
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            files = ", ".join(run.file for run in used)
            raise FiguresError(f"{files}: not as {used[0].kind}.py writes it: {type(error).__name__} {error}") from None
        if figure is None:
            continue
        axes = figure.axes[-1]
        alone = len(figure.axes) == 1
        look = {"fontsize": 6.5, "color": "#6b7280", "ha": "left" if alone else "right", "va": "bottom"}
        place = (0, 1.015) if alone else (1, 1.08)
        axes.text(*place, sources(used), transform=axes.transAxes, **look).set_in_layout(not alone)
        path = folder / f"{name}.svg"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Date": None})
        except OSError as error:
            raise FiguresError(f"{error.filename or path}: {error.strerror}") from None
        plt.close(figure)
        written.append(path)
    if not written:
        raise FiguresError("nothing to draw: no row of these files has a figure")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE.json", help="of step.py, collectives.py, beside.py"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder, made if there is none")
    options = parser.parse_args()
    try:
        for path in draw(load(options.files), options.out):
            print(path)
    except FiguresError as error:
        raise SystemExit(f"plot.py: {error}") from None


if __name__ == "__main__":
    main()
