"""A `Tuning` as tables, as lines for a `[tide]` section and as plain data."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from tide_comm.fsdp.plan_report import MIB, WIDTH
from tide_comm.tune.launches import LAUNCHES
from tide_comm.tune.settings import NOT_TUNED, SLACK, slack
from tide_comm.tune.shard import BESIDE, MULTIPLIES, Row
from tide_comm.tune.together import Tuned, Tuning


def render(tuning: Tuning) -> str:
    """A table for each setting that was measured, its chosen value marked; then what was not measured, and what to keep in mind."""
    out = StringIO()
    console = Console(file=out, width=WIDTH, no_color=True, highlight=False)
    for tuned in tuning.settings:
        if not tuned.reason:
            console.print(_title(tuned))
            console.print(_table(tuned))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    lines += [f"{name}: not measured: {reason}" for name, reason in not_measured(tuning).items()]
    lines += [f"{name}: on stock communication: {reason}" for name, reason in tuning.stock]
    lines += [
        f"{tuned.setting.name}: the same value differed by {slack(tuned.turns_s):.0%} from turn to turn, "
        f"so {_before(tuned)} stays unless it is slower than the fastest by more; a quiet machine tells values apart better"
        for tuned in tuning.settings
        if tuned.turns_s and slack(tuned.turns_s) > SLACK
    ]
    return "\n".join([*lines, *tuning.notes])


def not_measured(tuning: Tuning) -> dict[str, str]:
    """Why, by setting."""
    return {tuned.setting.name: tuned.reason for tuned in tuning.settings if tuned.reason} | NOT_TUNED


def _before(tuned: Tuned) -> str:
    return tuned.setting.text(tuned.before)


def _title(tuned: Tuned) -> str:
    setting = tuned.setting
    rule = f"the present one unless another is more than {SLACK:.0%} faster"
    if setting.spends:
        rule = f"the smallest within {SLACK:.0%} of the fastest (more: {setting.spends})"
    return f"\n{setting.name}: {setting.what}\n{rule}"


def _table(tuned: Tuned) -> Table:
    setting, values, step_s = tuned.setting, sorted(tuned.turns_s, key=tuned.setting.meant), tuned.step_s
    table = Table()
    table.add_column("group")
    table.add_column("launches a step", justify="right")
    table.add_column("ms")
    for value in values:
        table.add_column(setting.text(value), justify="right")
    for row in tuned.rows:
        first = [row.case.title, str(row.launches_per_step)]
        for kind in row.times_s[values[0]]:
            table.add_row(*first, _kind(row, kind), *(_ms(statistics.median(row.times_s[v][kind])) for v in values))
            first = ["", ""]
    table.add_section()
    counts = tuned.rows[0].counts
    table.add_row("a step", "", f"{counts}, counts", *(_ms(step_s[v]) for v in values))
    fastest_s = min(step_s.values())
    table.add_row("", "", "to the fastest", *(f"{step_s[v] / fastest_s:.3f}" for v in values))
    spreads = [(max(tuned.turns_s[v]) - min(tuned.turns_s[v])) / step_s[v] for v in values]
    table.add_row("", "", "turn to turn", *(f"{spread:.1%}" for spread in spreads))
    if tuned.arena_bytes:
        sizes = tuned.arena_bytes
        table.add_row("", "", "arena here, MiB", *(f"{sizes[v] / MIB:,.0f}" for v in values))
    marks = ["chosen" if v == tuned.chosen else "before" if v == tuned.before else "" for v in values]
    table.add_row("", "", "", *marks)
    return table


def _kind(row: Row, kind: str) -> str:
    return f"{kind} ({row.multiplies})" if kind in (BESIDE, MULTIPLIES) else kind


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def fragment(tuning: Tuning) -> str:
    """Lines of TOML: what was measured and chosen."""
    lines = ["[tide]"]
    for tuned in tuning.settings:
        if not tuned.reason:
            was = "as it was" if tuned.chosen == tuned.before else f"was {tuned.before}"
            lines.append(f"{tuned.setting.name} = {tuned.chosen}".ljust(36) + f"# {was}")
    return "\n".join(lines if len(lines) > 1 else [*lines, "# nothing here could be measured"])


def as_data(tuning: Tuning) -> dict[str, Any]:
    """Plain data for JSON: times in seconds by value (and kind) and turn, medians of a turn's `launches_a_turn` launches, the slowest
    rank's."""
    settings = {}
    for tuned in tuning.settings:
        if tuned.reason:
            continue
        settings[tuned.setting.name] = {
            "before": tuned.before,
            "chosen": tuned.chosen,
            "step_s": tuned.turns_s,
            "arena_bytes": tuned.arena_bytes,
            "groups": [
                {
                    "names": row.case.names,
                    "bytes_unsharded": row.case.layout.bytes_unsharded,
                    "launches_per_step": row.launches_per_step,
                    "multiplies": row.multiplies,
                    "counts": row.counts,
                    "times_s": row.times_s,
                }
                for row in tuned.rows
            ],
        }
    return {
        "device": tuning.device,
        "ranks": tuning.ranks,
        "config": asdict(tuning.config),
        "values": tuning.values,
        "settings": settings,
        "launches_a_turn": LAUNCHES - 1,
        "not_measured": not_measured(tuning),
        "stock": dict(tuning.stock),
        "notes": tuning.notes,
    }
