"""`attach`: look at every FSDP2 group, decide together with the other ranks, make the arenas, tag the groups."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tide_comm.config import TideConfig
from tide_comm.engine.base import Exchange
from tide_comm.errors import TideError, first_difference
from tide_comm.fsdp import describe, hooks
from tide_comm.fsdp.attachment import Attachment
from tide_comm.fsdp.describe import Unit
from tide_comm.fsdp.domain import Domain, exchange_over, shortened, stage_spec
from tide_comm.fsdp.group import TideGroup
from tide_comm.fsdp.rails import Multicast, Rail, ask_nccl, choose, decide_multicast, needs_nccl
from tide_comm.fsdp.report import GroupReport, Report
from tide_comm.fsdp.verdict import ONE_RANK, Capabilities, GroupFacts, capabilities_of, gpu_problem, verdict
from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.topology import Topology, TopologyError
from tide_comm.progress import progress

logger = logging.getLogger("tide")


@dataclass(frozen=True)
class Proposal:
    """What one rank makes of one group: compared with the other ranks' before anything is made."""

    name: str
    fingerprint: str
    reason: str


@dataclass(frozen=True)
class Surroundings:
    """Where a shard group's ranks run: alike on all of them, but for `capabilities`, which are this rank's."""

    topology: Topology | None
    problem: str
    """Why there is no topology, or ""."""
    hosts: int
    rail: Rail | None
    capabilities: Capabilities


def attach(model: nn.Module | Sequence[nn.Module], config: TideConfig | None = None) -> Report:
    """Let FSDP2 groups communicate through TIDE. Call it after `fully_shard`, on every rank, before the first forward or between steps.

    `model` is a module or a list of model parts (pipeline stages), which share one arena per shard group. Collective over each shard group.

    Raises `TideError` if there is no FSDP2 module, if ranks disagree on the plan (naming the rank and the first difference), if PyTorch is
    not a tested version, if `comm = "symm_mem"` is asked for without a GPU, and with `strict` if a group with something to
    communicate would stay on stock; `TideConfigError` if `stage_bytes` is too small for these machines.
    """
    config = config or TideConfig()
    parts = [model] if isinstance(model, nn.Module) else list(model)
    units = describe.units_of(parts)
    if config.comm != "tide":
        return _without_tide(units, config)
    hooks.install()
    attachment = Attachment()
    reports: dict[str, GroupReport] = {}
    by_ranks = describe.units_by_ranks(units)
    # One order for all ranks that share groups, or two subsets could wait for each other.
    plans = [(ranks, *_decide(ranks, by_ranks[ranks], config, reports)) for ranks in sorted(by_ranks)]
    if config.strict and (left := [r for r in reports.values() if r.comm != "tide" and r.reason != ONE_RANK]):
        names = "; ".join(f"{r.name}: {r.reason}" for r in left)
        raise TideError(
            f"strict = true, but {len(left)} of {len(units)} groups would stay on stock communication: {names}"
        )
    for _, topology, _, chosen in plans:
        if topology is not None and chosen:
            # Raises alike on all ranks of a group, and before any arena is made.
            stage_spec([layout for _, layout in chosen], topology, config)
    memory: Counter[str] = Counter()
    decisions: list[str] = []
    for _, topology, rail, chosen in plans:
        if rail is not None:
            decisions.append(str(rail))
        if topology is not None and chosen:
            multicast = _multicast(chosen, topology, config)
            memory.update(_take_over(attachment, topology, chosen, config, reports, rail, multicast.used))
            line = multicast.outcome(attachment.domains[-1].engine.apart)
            decisions += [line] if line else []
    for part in parts:
        attachment.watch(part)
    stock = stock_memory([pair for _, _, _, chosen in plans for pair in chosen], config)
    rows = [reports[u.name] for u in units]
    return Report(config, rows, attachment, dict(memory), stock, list(dict.fromkeys(decisions)))


def _without_tide(units: list[Unit], config: TideConfig) -> Report:
    if config.comm == "symm_mem":
        if any(u.group.device.type != "cuda" for u in units):
            raise TideError(
                'comm = "symm_mem" takes NVIDIA GPUs (PyTorch\'s symmetric memory); this model is on the CPU'
            )
        for unit in units:
            unit.group.set_symm_mem()
    reason = f'comm = "{config.comm}" was asked for'
    rows = [_row(u, describe.layout_of(u, _world(u)), config, config.comm, reason) for u in units]
    return Report(config, rows)


def _world(unit: Unit) -> int:
    group = describe.shard_group(unit.group)
    return group.size() if group is not None else 1


def _row(unit: Unit, layout: GroupLayout, config: TideConfig, comm: str, reason: str) -> GroupReport:
    asked = config.comm
    return GroupReport(unit.name, len(layout.params), layout.bytes_unsharded, layout.padding_bytes, asked, comm, reason)


def _decide(
    ranks: tuple[int, ...], units: list[Unit], config: TideConfig, reports: dict[str, GroupReport]
) -> tuple[Topology | None, Rail | None, list[tuple[Unit, GroupLayout]]]:
    """All ranks of one shard group agree: which topology, which rail, which groups on TIDE. Raises `TideError` on every rank if their
    plans differ."""
    group = describe.shard_group(units[0].group)
    world = len(ranks)
    exchange = exchange_over(group) if group is not None and world > 1 else (lambda mine: [mine])
    rank = group.rank() if group is not None else 0
    around = surroundings(config, units[0].group.device, exchange, rank, f"ranks {shortened(ranks)} to attach")
    topology, hosts = around.topology, around.hosts
    layouts = [describe.layout_of(unit, world) for unit in units]
    mine = [
        Proposal(
            unit.name,
            _fingerprint(unit, layout, config),
            verdict(facts_of(unit, layout, topology, around.problem, world, hosts), config, around.capabilities),
        )
        for unit, layout in zip(units, layouts, strict=True)
    ]
    with progress(logger, f"comparing plans with ranks {shortened(ranks)}"):
        everybody: list[list[Proposal]] = exchange(mine)
    _compare(everybody, ranks)
    chosen = []
    for i, (unit, layout) in enumerate(zip(units, layouts, strict=True)):
        reason = next((p[i].reason for p in everybody if p[i].reason), "")
        reports[unit.name] = _row(unit, layout, config, "stock" if reason else "tide", reason)
        if not reason:
            chosen.append((unit, layout))
    return topology, around.rail, chosen


def surroundings(config: TideConfig, device: torch.device, exchange: Exchange, rank: int, awaited: str) -> Surroundings:
    """Collective over a shard group whose ranks `exchange` joins, this one being its `rank`. `awaited`: who is waited for, for the log.

    Raises `TideError` where NCCL was to be asked and does not answer.
    """
    host = f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    with progress(logger, f"waiting for {awaited}"):
        places = exchange((host, emulated_machine(config.gpus_per_machine)))
    topology, problem = None, ""
    try:
        topology = Topology.from_hosts(places)
    except TopologyError as error:
        problem = str(error)
    hosts = len({host for host, _ in places})
    cuda_problem = _cuda_problem(device) if device.type == "cuda" else ""
    rail = None
    if topology is not None and topology.machines > 1:
        rail = _rail(config, device, topology, hosts, exchange, rank, cuda_problem)
    capabilities = capabilities_of(device.type, cuda_problem, rail.reason if rail and not rail.name else "")
    return Surroundings(topology, problem, hosts, rail, capabilities)


def _rail(
    config: TideConfig,
    device: torch.device,
    topology: Topology,
    hosts: int,
    exchange: Exchange,
    rank: int,
    cuda_problem: str,
) -> Rail | None:
    """Collective: the rail of a shard group over several machines. NCCL is asked only where an engine that is there would use it."""
    asked, machines, nccl = config.rail, topology.machines, None
    # All ranks have the same `config` only if their plans agree, which is compared later: what is asked together is agreed on here.
    wanted = exchange((needs_nccl(asked, device.type, machines, hosts), cuda_problem))
    if all(needs for needs, _ in wanted):
        problems = [f"rank {r}: {theirs}" for r, (_, theirs) in enumerate(wanted) if theirs]
        if problems:
            nccl = (f"NCCL was not asked, the CUDA engine does not run on {problems[0]}", "")
        else:
            nccl = ask_nccl(exchange, rank, topology.world, device, config.timeout_s)
    return choose(asked, device.type, machines, hosts, nccl)


def _multicast(chosen: list[tuple[Unit, GroupLayout]], topology: Topology, config: TideConfig) -> Multicast:
    """Collective over the shard group."""
    group, device = describe.shard_group(chosen[0][0].group), chosen[0][0].group.device
    assert group is not None
    return decide_multicast(config, topology, device, exchange_over(group))


def emulated_machine(gpus_per_machine: int) -> int:
    """Which of a host's emulated machines this rank is on: its number on the host, by `gpus_per_machine`; 0: hosts are not divided.

    The number on the host is LOCAL_RANK where the launcher sets it, else the global rank.
    """
    if not gpus_per_machine:
        return 0
    return int(os.environ.get("LOCAL_RANK", dist.get_rank())) // gpus_per_machine


def _fingerprint(unit: Unit, layout: GroupLayout, config: TideConfig) -> str:
    """Everything that must be alike on all ranks, readable, so that an error can show it."""
    params = ", ".join(
        f"{p.name} {list(p.shape)} {p.param_dtype}->{p.comm_dtype} dim {p.dim}"
        + ("" if f.sharded_param.requires_grad else " frozen")
        for p, f in zip(layout.params, unit.group.fsdp_params, strict=True)
    )
    return f"{unit.name}: reduce {describe.reduce_dtype(unit)}; keeps {unit.keeps_slot}; {config}; {params}"


def _compare(everybody: list[list[Proposal]], ranks: tuple[int, ...]) -> None:
    for other, theirs in enumerate(everybody):
        for i in range(max(len(theirs), len(everybody[0]))):
            a = everybody[0][i].fingerprint if i < len(everybody[0]) else "(no such group)"
            b = theirs[i].fingerprint if i < len(theirs) else "(no such group)"
            if a != b:
                raise TideError(
                    f"ranks disagree on the plan: group {i} differs between rank {ranks[0]} and rank {ranks[other]} at "
                    f"{first_difference(a, b)}. Build the same model with the same [tide] values on every rank"
                )


def facts_of(
    unit: Unit, layout: GroupLayout, topology: Topology | None, problem: str, world: int, hosts: int
) -> GroupFacts:
    """What decides about a group. `problem`: why its `world` ranks on `hosts` hosts have no topology, or ""."""
    return GroupFacts(
        unit.name,
        sum(p.sharded_param.requires_grad for p in unit.group.fsdp_params),
        world,
        topology.machines if topology else 0,
        hosts,
        topology.lanes if topology else 0,
        problem,
        describe.reduce_dtype(unit),
        tuple(sorted({p.comm_dtype for p in layout.params})),
        describe.is_cpu_offloaded(unit),
        describe.has_extensions(unit),
        describe.has_custom_comm(unit),
        describe.subclass_of(unit),
        describe.has_spmd_types(unit),
    )


def _cuda_problem(device: torch.device) -> str:
    """Why the CUDA engine cannot run on this rank's GPU, or "". Peers are sought among the GPUs that this process sees."""
    from tide_comm.engine.cuda import library

    try:
        library.load()
    except TideError as error:
        return str(error)
    index = torch.cuda.current_device() if device.index is None else device.index
    others = (other for other in range(torch.cuda.device_count()) if other != index)
    unreachable = [other for other in others if not torch.cuda.can_device_access_peer(index, other)]
    return gpu_problem(index, torch.cuda.get_device_capability(device), unreachable)


def _take_over(
    attachment: Attachment,
    topology: Topology,
    chosen: list[tuple[Unit, GroupLayout]],
    config: TideConfig,
    reports: dict[str, GroupReport],
    rail: Rail | None = None,
    multicast: bool = False,
) -> dict[str, int]:
    """Make the arena and tag the groups; returns its memory by area."""
    process_group = describe.shard_group(chosen[0][0].group)
    assert process_group is not None
    units, layouts = [u for u, _ in chosen], [g for _, g in chosen]
    carrier = rail.name if rail else "loopback"
    domain = Domain.make(process_group, topology, config, units, layouts, carrier, multicast)
    attachment.domains.append(domain)
    shard_base = 0
    for unit, layout in chosen:
        tide = TideGroup(attachment, domain, unit.group, layout, shard_base)
        attachment.groups.append(tide)
        reports[unit.name].tide = tide
        shard_base += layout.shard_bytes
    logger.info("TIDE: arena of %.1f MiB for ranks %s", domain.spec.total_bytes / 2**20, shortened(domain.ranks))
    return domain.spec.areas()


def stock_memory(groups: Sequence[tuple[Unit, GroupLayout]], config: TideConfig) -> dict[str, int]:
    """What stock FSDP2 holds for communication at its peak, for the same groups: bytes by purpose, at the worse of two moments.

    In forward a group's parameters stand beside the output that they were copied from, held until the next group's is waited for, and
    beside that next one. In backward they stand beside the next group's output and the fp32 input of a reduce-scatter. Groups that stay
    unsharded are held whole. PyTorch's `FSDPMemTracker` counts the same for equal blocks (tests/test_stock_memory.py).
    """
    if not groups:
        return {}
    sizes = [sum(p.slot_bytes for p in layout.params) for _, layout in groups]
    kept = [size for size, (unit, _) in zip(sizes, groups, strict=True) if unit.keeps_slot]
    passing = [size for size, (unit, _) in zip(sizes, groups, strict=True) if not unit.keeps_slot]
    elements = max(sum(p.world * p.chunk for p in layout.params) for _, layout in groups)
    reduced = {"reduce-scatter input": elements * ITEM_BYTES["float32"]} if config.reduce_scatter else {}
    if not config.all_gather:
        return reduced
    unsharded = {"unsharded": max(max(sizes), sum(kept))}
    forward = unsharded | {"all-gather outputs": 2 * max(sizes)}
    backward = unsharded | {"all-gather outputs": max(passing, default=0)} | reduced
    return max(forward, backward, key=lambda areas: sum(areas.values()))
