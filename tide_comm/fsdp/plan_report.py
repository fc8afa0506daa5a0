"""A `ModelPlan` as tables and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from tide_comm.fsdp.planned import ArenaPlan, GroupPlan, ModelPlan
from tide_comm.plan.shape import ProgramShape

MIB = 1024 * 1024
WIDTH = 150


def render(plan: ModelPlan) -> str:
    """All tables: groups that are alike, their collectives, memory."""
    tables = [_groups(plan), _collectives(plan), *(_memory(plan, arena) for arena in plan.arenas if arena.memory_bytes)]
    out = StringIO()
    console = Console(file=out, width=WIDTH, no_color=True, highlight=False)
    for table in tables:
        if table.row_count:
            console.print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([*lines, *_notes(plan)])


def as_data(plan: ModelPlan) -> dict[str, Any]:
    """Plain data for JSON: bytes are bytes, counts are those of one group and launch, `per_step` those of a step of one microbatch."""
    data = asdict(plan)
    data["per_step"] = {
        name: dict(zip(("all_gather", "reduce_scatter"), plan.per_step(count), strict=True))
        for name, count in _PER_STEP.items()
    }
    return data


_PER_STEP = {
    "operations": lambda shape: shape.operations,
    "kernels": lambda shape: shape.kernels,
    "copies": lambda shape: shape.copies,
    "copies_to_all": lambda shape: shape.copies_to_all,
    "puts": lambda shape: shape.puts,
    "link_bytes": lambda shape: shape.link_bytes,
    "link_read_bytes": lambda shape: shape.link_read_bytes,
    "bytes_on_rail": lambda shape: shape.bytes_on_rail,
}


def _table(title: str, *columns: str) -> Table:
    """A table whose columns are numbers, but for those marked with `<`, which are text."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        text = column.startswith("<")
        table.add_column(column.lstrip("<"), justify="left" if text else "right", overflow="fold")
    return table


def _name(group: GroupPlan) -> str:
    return group.names[0] if len(group.names) == 1 else f"{group.names[0]} .. {group.names[-1]}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f}" if nbytes else "-"


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / MIB:,.2f} MiB"


def _groups(plan: ModelPlan) -> Table:
    total = sum(len(g.names) for g in plan.groups)
    on = sum(len(g.names) for g in plan.groups if g.comm == "tide")
    title = f"{on} of {total} groups on TIDE; groups that are alike share a row, figures are those of one"
    table = _table(
        title, "", "<groups", "number", "ranks", "machines x lanes", "tensors", "MiB", "padding KiB", "<runs", "<reason"
    )
    for i, group in enumerate(plan.groups):
        arena = plan.arenas[group.arena]
        table.add_row(
            str(i),
            _name(group),
            str(len(group.names)),
            str(len(arena.ranks)),
            f"{arena.machines} x {arena.lanes}" if arena.machines else "-",
            str(group.tensors),
            _mib(group.bytes_unsharded),
            f"{group.padding_bytes / 1024:,.1f}",
            group.comm,
            group.reason,
        )
    return table


def _collectives(plan: ModelPlan) -> Table:
    table = _table(
        f"What rank {plan.rank} does in one collective (rounds: machines whose pieces are put; batches: source machines)",
        "",
        "<collective",
        "<rounds, batches",
        "puts",
        "rail MiB",
        "copies",
        "calls",
        "to a mate MiB",
        "from a mate MiB",
        "kernels",
        "segments",
        "operations",
    )
    for i, group in enumerate(plan.groups):
        if group.all_gather:
            rounds = "+".join(str(r.machines) for r in group.rounds) or "-"
            table.add_row(str(i), "all-gather", rounds, *_counts(group.all_gather))
        if group.reduce_scatter:
            machines, batches = plan.arenas[group.arena].machines, group.reduce_scatter.inbox_batches
            most = min(machines, plan.config.inbox_batch)
            if plan.config.multicast == "on" and plan.arenas[group.arena].lanes > 1:
                most = min(most, plan.arenas[group.arena].lanes)
            shown = f"{batches} x {most}" if batches else "-"
            table.add_row(str(i), "reduce-scatter", shown, *_counts(group.reduce_scatter))
    return table


def _counts(shape: ProgramShape) -> list[str]:
    return [
        str(shape.puts),
        _mib(shape.bytes_on_rail),
        str(shape.copies + shape.copies_to_all),
        str(shape.copy_batches),
        _mib(shape.link_bytes),
        _mib(shape.link_read_bytes),
        str(shape.kernels),
        str(shape.cast_segments + shape.sum_segments),
        str(shape.operations),
    ]


def _memory(plan: ModelPlan, arena: ArenaPlan) -> Table:
    of = f" of the {len(arena.ranks)} ranks {arena.ranks[0]}, {arena.ranks[1]}, .." if len(plan.arenas) > 1 else ""
    table = _table(f"Memory a rank{of}, {arena.slots} slots", "<arena", "MiB", "<stock FSDP2 at its peak", "MiB")
    places = f"{arena.stage_places} places of {_size(arena.stage_place_bytes)}"
    names = {"STAGE": f"STAGE, {places}{' by stage_bytes' if plan.config.stage_bytes else ''}"}
    ours = [(names.get(name, name), _mib(nbytes)) for name, nbytes in arena.memory_bytes.items() if nbytes]
    stock = [(name, _mib(nbytes)) for name, nbytes in arena.stock_memory_bytes.items()]
    for i in range(max(len(ours), len(stock))):
        table.add_row(*(ours[i] if i < len(ours) else ("", "")), *(stock[i] if i < len(stock) else ("", "")))
    table.add_section()
    totals = [_mib(sum(sizes.values())) for sizes in (arena.memory_bytes, arena.stock_memory_bytes)]
    table.add_row("together", totals[0], "together", totals[1])
    return table


def _notes(plan: ModelPlan) -> list[str]:
    left = [g for g in plan.groups if g.comm != "tide"]
    notes = []
    if any(g.comm == "tide" for g in plan.groups):
        gather, reduce = plan.per_step(_PER_STEP["bytes_on_rail"])
        link_gather, link_reduce = plan.per_step(_PER_STEP["link_bytes"])
        kernels, operations = (sum(plan.per_step(_PER_STEP[name])) for name in ("kernels", "operations"))
        notes.append(
            f"A step of one microbatch, sent by this rank: over the rail {_size(gather)} all-gather and {_size(reduce)} reduce-scatter; "
            f"to a mate {_size(link_gather)} and {_size(link_reduce)}. "
            f"{kernels} kernels, {operations} operations."
        )
    if plan.config.strict and plan.config.comm == "tide" and left:
        notes.append(f"strict = true: the job would not start, {sum(len(g.names) for g in left)} groups stay on stock.")
    return notes
