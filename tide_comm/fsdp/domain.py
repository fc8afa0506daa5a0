"""One shard group's arena: engine, ledger and the groups that share them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tide_comm.config import TideConfig, TideConfigError
from tide_comm.engine.base import AREA_ALIGN_BYTES, ArenaSpec, Engine
from tide_comm.engine.host.engine import HostEngine
from tide_comm.fsdp.describe import Unit
from tide_comm.fsdp.rails import insist, multicast_bytes
from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import ALIGN_BYTES, GroupLayout, align
from tide_comm.plan.ledger import Ledger
from tide_comm.plan.slices import InboxSpec, StageSpec, seat_bytes_of, slice_elements
from tide_comm.plan.topology import Topology
from tide_comm.progress import progress

if TYPE_CHECKING:
    from tide_comm.fsdp.group import TideGroup

logger = logging.getLogger("tide")

MIB = 1024 * 1024
VECTOR_BYTES = 16
"""What sums read at once: pieces in STAGE start at multiples of it."""
PIECE_BYTES = 128 * MIB
"""Largest piece from one source on one machine: fewer, larger sums are what long multiplies want beside them, and pieces of 64 MiB take a
fifth more SM time."""
PLACE_BYTES = 256 * MIB
"""Largest place of STAGE on one machine, all sources together."""
RING = 3
"""Places in STAGE on one machine: with fewer, credits cannot share the driver's calls (`engine.cuda.tighten`)."""
STAGES_A_SLOT = 4
"""So many times STAGE fits into the widest slot on one machine: stock has nothing like STAGE, and with pieces of the largest size it made
TIDE's peak memory higher than stock's where blocks are small."""
UNUSED_PIECE_BYTES = 512
"""Of STAGE where nothing is reduced."""
PIECE_OF_SLICES_BYTES = 64 * MIB
"""Largest piece from one source over several machines. The slot does not limit it there: a piece holds rows of all L blocks of a slice, so
each more is L times the copies of one on one machine, and the inboxes, whole slices, do not get smaller with it."""
RING_OF_SLICES = 2
"""Places in STAGE over several machines, where a piece is mostly a whole slice."""


def exchange_over(process_group: dist.ProcessGroup) -> Callable[[Any], list[Any]]:
    """An all-gather of objects over a process group."""

    def exchange(mine: Any) -> list[Any]:
        everybody: list[Any] = [None] * process_group.size()
        dist.all_gather_object(everybody, mine, group=process_group)
        return everybody

    return exchange


def make_engine(
    spec: ArenaSpec,
    rank: int,
    process_group: dist.ProcessGroup,
    timeout_s: float,
    device: torch.device,
    rail: str = "loopback",
    multicast: bool = False,
) -> Engine:
    """The engine for a kind of device; collective. `rail`: what carries bytes between machines on GPUs; `multicast`: whether arenas get an
    address at which all lanes are written."""
    if device.type == "cpu":
        return HostEngine(spec, rank, exchange_over(process_group), timeout_s)
    from tide_comm.engine.cuda.engine import CudaEngine

    return CudaEngine(spec, rank, exchange_over(process_group), timeout_s, device, rail, multicast)


def shortened(ranks: Sequence[int]) -> str:
    """Ranks for a log line: all of a few, first and last of many."""
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}] ({len(ranks)})"


def slots_needed(units: list[Unit], config: TideConfig) -> int:
    """Slots that the order of forward and backward needs.

    Groups that stay unsharded keep one each. Of the others, those on the deepest path of nested units are held together,
    those of one more unit are being gathered, and each step of explicit prefetching adds a unit's. A group shared by several modules adds
    one. Slot-Reuse takes no more: a slot goes to the next all-gather as soon as the reduce-scatter that reads gradients there is launched,
    and what fills it waits for that.
    """
    if config.slots:
        return config.slots
    keepers = sum(u.keeps_slot for u in units)
    passing = [u for u in units if not u.keeps_slot]
    if not passing:
        return max(2, keepers)
    keeping_depth = min(u.depth for u in units) if keepers else 0
    deepest = max(1, max(u.depth for u in passing) - (keeping_depth if keepers and keeping_depth == 1 else 0))
    prefetch = max(max(u.siblings for u in passing), max(u.prefetch for u in units))
    shared = sum(u.modules > 1 for u in passing)
    return keepers + deepest + prefetch + shared


def stage_for(layouts: list[GroupLayout], topology: Topology, stage_bytes: int = 0) -> StageSpec:
    """A ring whose pieces hold the largest slice in fp32 (accumulated gradients), as far as the limits above allow; with `stage_bytes`, as
    far as that many bytes allow instead. Raises `TideConfigError` if they are too few for any piece."""
    widest = align(max(max(slice_elements(layout, topology) for layout in layouts) * ITEM_BYTES["float32"], 1))
    ring = RING if topology.machines == 1 else RING_OF_SLICES
    if stage_bytes and topology.lanes > 1:
        most = _piece_within(stage_bytes, ring, topology)
    elif topology.machines > 1:
        most = PIECE_OF_SLICES_BYTES
    else:
        most = _piece_beside(max(layout.slot_bytes for layout in layouts), topology.lanes)
    return StageSpec(min(most, widest), ring, topology.lanes)


def stage_spec(layouts: list[GroupLayout], topology: Topology, config: TideConfig) -> StageSpec:
    """`stage_for` where something is reduced; else hardly anything."""
    if not config.reduce_scatter:
        return StageSpec(UNUSED_PIECE_BYTES, RING, topology.lanes)
    return stage_for(layouts, topology, config.stage_bytes)


def _piece_within(stage_bytes: int, ring: int, topology: Topology) -> int:
    """The largest piece with which `ring` places fit into `stage_bytes`."""
    copies = ring * (topology.lanes - 1)
    piece = _rounded(stage_bytes // copies, ALIGN_BYTES, VECTOR_BYTES)
    # Over several machines a piece has a row of each block of a slice (`Cutting.rows`).
    rows = topology.lanes if topology.machines > 1 else 1
    least = align(rows * ITEM_BYTES["float32"], VECTOR_BYTES)
    if piece < least:
        raise TideConfigError(
            f"tide.stage_bytes = {stage_bytes}: takes 0 (a rule) or at least {least * copies} with {topology.machines} x {topology.lanes} "
            f"GPUs: {ring} places for {topology.lanes - 1} sources' pieces of {least} bytes. Set it higher, or to 0"
        )
    return piece


def _piece_beside(slot_bytes: int, lanes: int) -> int:
    """The largest piece on one machine, of whole MiB if it has one. `slot_bytes`: the widest slot, or what it would be: without an
    all-gather none is made, but the gradients that pass through STAGE are as large, and so is what stock holds."""
    # As the arena has it.
    quarter = align(slot_bytes, AREA_ALIGN_BYTES) // STAGES_A_SLOT
    place = min(PLACE_BYTES, max(quarter // RING // MIB, 1) * MIB)
    return min(PIECE_BYTES, _rounded(place // max(lanes - 1, 1), MIB, ALIGN_BYTES))


def _rounded(nbytes: int, *units: int) -> int:
    """`nbytes` down to whole ones of the first unit that it reaches; 0 if it reaches none."""
    return next((nbytes // unit * unit for unit in units if nbytes >= unit), 0)


def inbox_for(layouts: list[GroupLayout], topology: Topology, batch: int, multicast: bool = False) -> InboxSpec | None:
    """Seats for the largest slice; None on one machine. With `multicast` a batch has at most as many sources as there are lanes."""
    if topology.machines == 1:
        return None
    most = min(batch, topology.machines, topology.lanes) if multicast else min(batch, topology.machines)
    return InboxSpec(align(seat_bytes_of(layouts, topology)), most, topology.lanes, multicast)


def arena_spec(
    topology: Topology, config: TideConfig, units: list[Unit], layouts: list[GroupLayout], multicast: bool = False
) -> ArenaSpec:
    """The arena of these groups, sized from them and their order alone; `units` and `layouts` belong together pairwise. `multicast`:
    programs write to all lanes, and read their sum, at once. Raises `TideConfigError` where `stage_bytes` is too small."""
    gathers = config.all_gather
    return ArenaSpec(
        topology,
        sum(layout.shard_bytes for layout in layouts) if gathers else 0,
        max(layout.slot_bytes for layout in layouts) if gathers else 0,
        slots_needed(units, config) if gathers else 0,
        stage_spec(layouts, topology, config),
        inbox_for(layouts, topology, config.inbox_batch, multicast) if config.reduce_scatter else None,
    )


@dataclass
class Domain:
    """All TIDE groups over the same ranks."""

    ranks: tuple[int, ...]
    process_group: dist.ProcessGroup
    rank: int
    topology: Topology
    config: TideConfig
    spec: ArenaSpec
    engine: Engine
    ledger: Ledger
    device: torch.device
    multicast_bytes: int = 0
    """Largest piece of an all-gather that goes to all lanes by one write; 0: none does."""

    @classmethod
    def make(
        cls,
        process_group: dist.ProcessGroup,
        topology: Topology,
        config: TideConfig,
        units: list[Unit],
        layouts: list[GroupLayout],
        rail: str = "loopback",
        multicast: bool = False,
    ) -> Domain:
        """Make the arena: collective over the shard group. `multicast`: programs write to all lanes at once. Raises `TideError` if
        ranks cannot reach each other, or `multicast = "on"` cannot be had."""
        rank = process_group.rank()
        spec = arena_spec(topology, config, units, layouts, multicast)
        device = units[0].group.device
        ranks = tuple(dist.get_process_group_ranks(process_group))
        what = f"making an arena of {spec.total_bytes / 2**20:.1f} MiB with ranks {shortened(ranks)}"
        with progress(logger, what):
            engine = make_engine(spec, rank, process_group, config.timeout_s, device, rail, multicast)
        insist(config, engine)
        at_once = multicast_bytes(config) if multicast else 0
        return cls(ranks, process_group, rank, topology, config, spec, engine, Ledger(spec.slots), device, at_once)

    def reconcile(self, groups: list[TideGroup]) -> None:
        """Give back slots whose all-gather FSDP2 has dropped, or that were kept for a reduce-scatter that did not come."""
        for group in groups:
            if group.domain is self:
                group.give_back_unused()
