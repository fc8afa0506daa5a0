"""What was asked for and what runs, a row a group; memory by area; counts at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from torch.optim import Optimizer

from tide_comm.config import TideConfig
from tide_comm.engine.base import Engine
from tide_comm.engine.timing import Timings
from tide_comm.fsdp.overlap import Overlap

if TYPE_CHECKING:
    from tide_comm.fsdp.attachment import Attachment
    from tide_comm.fsdp.group import TideGroup

MIB = 1024 * 1024

_COUNTS = ("all_gathers", "all_gathers_stock", "reduce_scatters", "reduce_scatters_stock")


def _cells(group: GroupReport) -> tuple[str, ...]:
    """A group's counts as the summary shows them."""
    c: Counter[str] = Counter(group.stats)
    counts = [str(c[key]) for key in _COUNTS] if group.tide else ["", "all", "", "all"]
    return (*counts, *(f"{c[key] / MIB:.1f}" for key in ("bytes_gathered", "bytes_reduced")))


def _lines(table: Table) -> list[str]:
    out = StringIO()
    Console(file=out, width=140, no_color=True).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@dataclass
class GroupReport:
    """One FSDP parameter group."""

    name: str
    tensors: int
    bytes_unsharded: int
    padding_bytes: int
    asked: str
    comm: str
    reason: str
    tide: TideGroup | None = None

    @property
    def stats(self) -> dict[str, int]:
        """Counts of this group so far; empty for a group on stock communication."""
        return dict(self.tide.stats) if self.tide else {}


@dataclass
class Report:
    """What `attach` returns. `print` it for the table."""

    config: TideConfig
    groups: list[GroupReport]
    attachment: Attachment | None = None
    memory: dict[str, int] = field(default_factory=dict)
    stock_memory: dict[str, int] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)
    """What carries bytes and why, a line each; the same on all ranks of a shard group."""

    def detach(self) -> None:
        """Back to stock communication; collective over each shard group. Harmless when called twice."""
        if self.attachment is not None:
            self.attachment.detach()
            for group in self.groups:
                group.comm, group.reason, group.tide = "stock", "detached", None

    def overlap(self, optimizer: Optimizer) -> None:
        """Let the first units' all-gathers of the next step start inside `optimizer.step`, which takes their parameters first.

        Call it once for each optimizer. What is written into parameters between `optimizer.step` and the next forward by anything else
        (an average of weights swapped in, a checkpoint loaded) is then NOT seen by those units in that forward: do not use it with such
        a loop. Raises `TideError` for an optimizer that does not update each element by itself.
        """
        if self.attachment is not None and self.config.all_gather:
            self.attachment.overlaps.append(Overlap(self.attachment, optimizer))

    def stats(self) -> dict[str, int]:
        """Counts over all groups: collectives on TIDE and on stock, bytes gathered, reduced, read in place and copied."""
        total: Counter[str] = Counter()
        for group in self.groups:
            total.update(group.stats)
        return dict(total)

    def time_launches(self, on: bool) -> None:
        """Whether collectives and waits from here on are timed; off at first. Rank-local."""
        for engine in self._engines():
            engine.time_launches(on)

    @property
    def samples(self) -> bool:
        """Timing costs something here (CUDA engine): time single steps."""
        return any(engine.samples for engine in self._engines())

    def timings(self) -> Timings:
        """What was timed and has ended since the last call."""
        found = Timings()
        for engine in self._engines():
            found.add(engine.timings())
        return found

    def _engines(self) -> list[Engine]:
        return [domain.engine for domain in self.attachment.domains] if self.attachment is not None else []

    def summary_lines(self, measured: Sequence[str] = ()) -> list[str]:
        """For the end of a run: what really ran, groups that ran alike in one row; totals; memory; why groups are on stock.

        `measured`: lines of the caller's own, set behind the totals.
        """
        table = Table(title="TIDE, what ran", title_justify="left")
        for column in (
            "groups",
            "all-gathers",
            "on stock",
            "reduce-scatters",
            "on stock",
            "MiB gathered",
            "MiB reduced",
        ):
            table.add_column(column, justify="left" if column == "groups" else "right")
        for cells, alike in groupby(self.groups, key=_cells):
            names = [g.name for g in alike]
            span = f"{names[0]} .. {names[-1]} ({len(names)}, each)" if len(names) > 1 else names[0]
            table.add_row(span, *cells)
        s: Counter[str] = Counter(self.stats())
        total = (
            f"TIDE: {s['all_gathers']} all-gathers ({s['all_gathers_stock']} on stock), "
            f"{s['reduce_scatters']} reduce-scatters ({s['reduce_scatters_stock']} on stock), "
            f"{s['bytes_gathered'] / MIB:.1f} MiB gathered, {s['bytes_reduced'] / MIB:.1f} MiB reduced, "
            f"{s['grads_read_in_place_bytes'] / MIB:.1f} MiB of gradients read in place, "
            f"{s['grads_copied_bytes'] / MIB:.1f} MiB copied"
        )
        return [*_lines(table), total, *measured, *self._memory_lines(), *self._stock_lines()]

    def _stock_lines(self) -> list[str]:
        reasons: dict[str, list[str]] = {}
        for g in self.groups:
            if g.comm != "tide":
                reasons.setdefault(g.reason, []).append(g.name)
        return [f"on stock: {', '.join(names)} ({reason})" for reason, names in reasons.items()]

    def __str__(self) -> str:
        table = Table(title=self._title(), title_justify="left")
        for column in ("group", "tensors", "MiB", "padding KiB", "asked", "runs", "reason"):
            table.add_column(column, justify="left" if column in ("group", "reason", "asked", "runs") else "right")
        for g in self.groups:
            table.add_row(
                g.name,
                str(g.tensors),
                f"{g.bytes_unsharded / MIB:.2f}",
                f"{g.padding_bytes / 1024:.1f}",
                g.asked,
                g.comm,
                g.reason,
            )
        return "\n".join([*_lines(table), *self.decisions, *self._memory_lines(), *self._early_lines()])

    def _title(self) -> str:
        on = sum(g.comm == "tide" for g in self.groups)
        parts = [
            name
            for name, asked in (("all-gather", self.config.all_gather), ("reduce-scatter", self.config.reduce_scatter))
            if asked
        ]
        what = f"{' and '.join(parts)}, {self.config.memory_mode}" if self.config.comm == "tide" else self.config.comm
        return f"TIDE: {on} of {len(self.groups)} groups ({what})"

    def _early_lines(self) -> list[str]:
        """Which reduce-scatters start in parts, and why others do not, where that was asked for."""
        if not self.config.early_reduce:
            return []
        whole: dict[str, list[str]] = {}
        for g in self.groups:
            if g.tide is not None:
                whole.setdefault(g.tide.early.why_whole, []).append(g.name)
        lines = [f"reduce-scatters that start in parts: {len(whole.pop('', []))} groups"]
        return lines + [f"  as a whole: {', '.join(names)} ({reason})" for reason, names in whole.items()]

    def _memory_lines(self) -> list[str]:
        lines = []
        if self.memory:
            areas = ", ".join(f"{name} {nbytes / MIB:.1f}" for name, nbytes in self.memory.items())
            lines.append(f"arena, MiB a rank: {areas}; together {sum(self.memory.values()) / MIB:.1f}")
        if self.stock_memory:
            areas = ", ".join(f"{name} {nbytes / MIB:.1f}" for name, nbytes in self.stock_memory.items())
            lines.append(
                f"stock would hold at its peak, MiB a rank: {areas}; together {sum(self.stock_memory.values()) / MIB:.1f}"
            )
        return lines
