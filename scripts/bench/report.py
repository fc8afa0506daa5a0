"""Markdown tables for docs/benchmarks.md from what the benchmarks wrote: figures there are printed, not typed.

python scripts/bench/report.py step.json collectives.json beside.json ...

Under each heading: the command, and date, machine, versions and commit as the file has them. Columns: README.md beside this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from figures import FiguresError, Run, load
from step_table import COLUMNS

LEFT_OUT = ("min", "max", "copies ms", "hidden")
"""Columns of a step that the file has and the document not."""


def table(header: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
    """Markdown; columns without any figure are left out. `words`: so many columns on the left are text."""
    kept = [i for i in range(len(header)) if i < words or any(line[i] != "-" for line in lines)]
    rows = [header, ["---" if i < words else "---:" for i in range(len(header))], *lines]
    return "\n".join("| " + " | ".join(row[i].replace("|", "\\|") for i in kept) + " |" for row in rows)


def cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def failed(rows: dict[str, dict[str, Any]]) -> str:
    """A line for each row that failed."""
    lines = [f"- {name}: {str(row['error']).splitlines()[0]}" for name, row in rows.items() if row.get("error")]
    return "\n".join(lines)


def step_tables(run: Run) -> Iterator[tuple[str, str]]:
    """(heading, text)."""
    columns = {name: how for name, how in COLUMNS.items() if name not in LEFT_OUT}
    for what, rows in run.steps():
        lines = [
            [name, *(cell(row.get(key), form) for key, form in columns.values())]
            for name, row in rows.items()
            if row.get("step_ms") is not None
        ]
        o = run.options
        how = f"{o['blocks']} blocks of {run.found['block_mib']:.0f} MiB; medians of {o['rounds']} rounds of {o['steps']} steps."
        yield f"Steps: {what}", "\n\n".join(filter(None, (how, table(["row", *columns], lines), failed(rows))))


COLLECTIVE = {
    "us": ("us", ".0f"),
    "GB/s": ("gb_per_s", ".1f"),
    "to fsdp": ("to_fsdp", ".3f"),
    "to copies": ("to_copies", ".3f"),
    "host us": ("host_us", ".0f"),
    "CE": ("copy_engines", "s"),
}


def equal(row: dict[str, Any]) -> str:
    found = row.get("matches")
    return "-" if found is None else "yes" if found is True else str(found)


def collective_tables(run: Run) -> Iterator[tuple[str, str]]:
    for model, kinds in run.found["models"].items():
        gathers = {f"{name}, {dtype}": row for dtype, rows in kinds["all_gather"].items() for name, row in rows.items()}
        for title, rows in (("All-gather", gathers), ("Reduce-scatter", kinds["reduce_scatter"])):
            lines = [
                [name, *(cell(row.get(key), form) for key, form in COLLECTIVE.values()), equal(row)]
                for name, row in rows.items()
                if row.get("us")
            ]
            text = table(["row", *COLLECTIVE, "equal to NCCL's"], lines)
            yield f"{title}: {model}", "\n\n".join(filter(None, (text, failed(rows))))


def beside_tables(run: Run) -> Iterator[tuple[str, str]]:
    cases = run.found["cases"]
    multiplies = list(dict.fromkeys(name for row in cases.values() for name in row if isinstance(row[name], dict)))
    header, wrong = ["beside"], {}
    for name in multiplies:
        alone = [row[name]["alone_us"] for row in cases.values() if "alone_us" in row.get(name, {})]
        header.append(f"{name} (alone {sorted(alone)[len(alone) // 2]:.0f} us)" if alone else name)
    lines = []
    for case, row in cases.items():
        line = [case]
        for name in multiplies:
            found = row.get(name, {})
            if "error" in found:
                wrong[f"{case}, {name}"] = found
            short = " short" if not found.get("lasted", True) else ""
            line.append(f"{found['slowdown']:.3f}x{short}" if "slowdown" in found else "-")
        lines.append(line)
    text = table(header, lines)
    yield f"Multiplies beside {run.options['model']}'s collectives", "\n\n".join(filter(None, (text, failed(wrong))))


TABLES = {"step": step_tables, "collectives": collective_tables, "beside": beside_tables}


def report(runs: Sequence[Run]) -> str:
    """Raises `FiguresError` for a file in which something is missing."""
    parts = []
    for run in runs:
        parts.append(f"`{run.command}`, {run.source}:")
        try:
            parts += [f"### {heading}\n\n{text}" for heading, text in TABLES[run.kind](run)]
        except (KeyError, TypeError, AttributeError) as error:
            raise FiguresError(f"{run.file}: not as {run.kind}.py writes it: {type(error).__name__} {error}") from None
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE.json", help="of step.py, collectives.py, beside.py"
    )
    try:
        print(report(load(parser.parse_args().files)))
    except FiguresError as error:
        raise SystemExit(f"report.py: {error}") from None


if __name__ == "__main__":
    main()
