"""Programs as text: one line an operation, in issue order, with its stream in front."""

from __future__ import annotations

from tide_comm.plan.program import (
    After,
    Agree,
    Cast,
    Clear,
    Copy,
    CopyAll,
    Event,
    LaneSum,
    Op,
    Post,
    Program,
    Put,
    Record,
    Reduce,
    Remote,
    Signal,
    Source,
    Use,
    Wait,
    Word,
)


def name_of(thing: Word | Event) -> str:
    inside = (["slot"] if thing.slotted else []) + ([str(thing.key)] if thing.key or isinstance(thing, Word) else [])
    return thing.name + (f"[{','.join(inside)}]" if inside else "")


def region_text(region: Source) -> str:
    if isinstance(region, Remote):
        return f"rank {region.rank}'s {region_text(region.region)}"
    if isinstance(region, LaneSum):
        return f"sum of ranks {list(region.ranks)}'s {region_text(region.region)}"
    index = f"({region.index})" if region.area.value in ("PARAM", "GRAD", "STAGE", "PARTIAL", "INBOX") else ""
    end = f"{region.offset}+{region.row_bytes}"
    rows = f" x {region.rows} rows at {region.pitch}" if region.rows > 1 else ""
    return f"{region.area.value}{index}[{end}{rows}]"


def op_text(op: Op) -> str:
    """One operation as a line of text, without its stream."""
    if isinstance(op, Copy):
        return f"{type(op).__name__:8s} {region_text(op.src)} -> rank {op.peer} {region_text(op.dst)}"
    if isinstance(op, CopyAll):
        return f"CopyAll  {region_text(op.src)} -> all of ranks {list(op.lanes)} {region_text(op.dst)}"
    if isinstance(op, Clear):
        return f"Clear    {region_text(op.dst)}"
    if isinstance(op, Put):
        return f"Put      {region_text(op.src)} -> rank {op.peer} {region_text(op.dst)}, signal {name_of(op.word)}"
    if isinstance(op, Signal):
        return f"Signal   rank {op.peer} {name_of(op.word)}"
    if isinstance(op, Wait):
        return f"Wait     {name_of(op.word)} >= {op.count:+d}"
    if isinstance(op, Record):
        return f"Record   {name_of(op.event)}"
    if isinstance(op, After):
        return f"After    {name_of(op.event)}"
    if isinstance(op, Cast):
        parts = "; ".join(f"{region_text(p.src)} {p.src_dtype} -> {region_text(p.dst)} {p.dst_dtype}" for p in op.parts)
        return f"Cast     {parts}"
    if isinstance(op, Reduce):
        how = f"{op.src_dtype} -> {op.dst_dtype}" + (", scaled" if op.scaled else "") + (", carry" if op.carry else "")
        parts = "; ".join(f"{' + '.join(map(region_text, s.sources))} -> {region_text(s.dst)}" for s in op.segments)
        return f"Reduce   {how}: {parts}"
    if isinstance(op, Post):
        return f"Post     tag {op.index} to rank {op.peer}"
    if isinstance(op, Agree):
        return f"Agree    tag {op.index} of ranks {list(op.peers)}"
    if isinstance(op, Use):
        return (
            f"Use      reads {[region_text(r) for r, _ in op.expects]} writes {[region_text(r) for r, _ in op.writes]}"
        )
    raise TypeError(f"unknown operation {op!r}")


def render(program: Program) -> str:
    """The whole program, one line an operation."""
    width = max((len(op.stream) for op in program.ops), default=0)
    lines = [f"{program.name}, rank {program.rank}"]
    lines += [f"  {op.stream:{width}s}  {op_text(op)}" for op in program.ops]
    lines += [f"  point {point}: {name_of(event)}" for point, event in program.points.items()]
    return "\n".join(lines)
