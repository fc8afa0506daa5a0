"""What `attach` would do, without doing it: verdicts, programs and memory of a model for machines that need not be there.

The model carries real FSDP2 groups (`fully_shard`), but may be on the meta device over a fake process group. What `attach` learns from
machines is given instead: where each rank runs and what the machines can do. Only one rank's programs are made, once for all groups that
are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from tide_comm.config import TideConfig
from tide_comm.fsdp import describe
from tide_comm.fsdp.attach import facts_of, stock_memory
from tide_comm.fsdp.describe import Unit
from tide_comm.fsdp.domain import arena_spec
from tide_comm.fsdp.rails import multicast_bytes
from tide_comm.fsdp.verdict import Capabilities, verdict
from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.shape import ProgramShape, RoundShape, round_shapes, shape_of
from tide_comm.plan.slices import InboxSpec, StageSpec
from tide_comm.plan.topology import Topology, TopologyError

Place = Callable[[int], tuple[Hashable, Hashable]]
"""Global rank -> (host, machine on that host): two ranks with the same answer share a machine."""


@dataclass(frozen=True)
class GroupPlan:
    """FSDP groups that are alike in all but name. Counts and bytes are those of one group."""

    names: tuple[str, ...]
    arena: int
    """Which of the plan's arenas."""
    tensors: int
    bytes_unsharded: int
    padding_bytes: int
    all_gathers_per_step: int
    """With one microbatch: two where the group is resharded after forward."""
    comm: str
    reason: str
    all_gather: ProgramShape | None = None
    rounds: tuple[RoundShape, ...] = ()
    reduce_scatter: ProgramShape | None = None


@dataclass(frozen=True)
class ArenaPlan:
    """One shard group: `machines` x `lanes` of its ranks (0 where they have no topology), and the memory for its groups on TIDE."""

    ranks: tuple[int, ...]
    machines: int
    lanes: int
    slots: int = 0
    stage_places: int = 0
    stage_place_bytes: int = 0
    """Of all sources' pieces together."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """By area, on each rank."""
    stock_memory_bytes: dict[str, int] = field(default_factory=dict)
    """What stock FSDP2 holds at its peak for the same groups."""


@dataclass(frozen=True)
class ModelPlan:
    """What `plan` returns. `print` it for the tables."""

    config: TideConfig
    rank: int
    groups: tuple[GroupPlan, ...]
    arenas: tuple[ArenaPlan, ...]

    def per_step(self, count: Callable[[ProgramShape], int]) -> tuple[int, int]:
        """Sums of a count over a step of one microbatch: (all-gathers, reduce-scatters)."""
        gathers = reduces = 0
        for group in self.groups:
            alike = len(group.names)
            gathers += alike * group.all_gathers_per_step * count(group.all_gather) if group.all_gather else 0
            reduces += alike * count(group.reduce_scatter) if group.reduce_scatter else 0
        return gathers, reduces

    def __str__(self) -> str:
        from tide_comm.fsdp.plan_report import render

        return render(self)


def plan(
    model: nn.Module | Sequence[nn.Module], config: TideConfig, place: Place, capabilities: Capabilities
) -> ModelPlan:
    """This rank's plan for `model` (a module or pipeline stages) on the machines that `place` says.

    Raises `TideError` if there is no FSDP2 module, `TideConfigError` if `stage_bytes` is too small. `strict` is not enforced: the rows say
    what would stay on stock.
    """
    units = describe.units_of([model] if isinstance(model, nn.Module) else list(model))
    by_ranks = describe.units_by_ranks(units)
    groups: list[GroupPlan] = []
    arenas: list[ArenaPlan] = []
    for ranks in sorted(by_ranks):
        alike, arena = _plan_arena(len(arenas), ranks, by_ranks[ranks], config, place, capabilities)
        groups += alike
        arenas.append(arena)
    return ModelPlan(config, dist.get_rank(), tuple(groups), tuple(arenas))


def _plan_arena(
    number: int,
    ranks: tuple[int, ...],
    units: list[Unit],
    config: TideConfig,
    place: Place,
    capabilities: Capabilities,
) -> tuple[list[GroupPlan], ArenaPlan]:
    places = [place(rank) for rank in ranks]
    hosts = len({host for host, _ in places})
    topology, problem = None, ""
    try:
        topology = Topology.from_hosts(places)
    except TopologyError as error:
        problem = str(error)
    world = len(ranks)
    layouts = [describe.layout_of(unit, world) for unit in units]
    reasons = [
        verdict(facts_of(unit, layout, topology, problem, world, hosts), config, capabilities)
        for unit, layout in zip(units, layouts, strict=True)
    ]
    arena = ArenaPlan(ranks, topology.machines if topology else 0, topology.lanes if topology else 0)
    chosen = [i for i, reason in enumerate(reasons) if not reason]
    programs: _Programs | None = None
    if topology is not None and chosen:
        pairs = [(units[i], layouts[i]) for i in chosen]
        # What "auto" would find on machines that are not here is not known: every push and load is counted.
        multicast = config.multicast == "on" and topology.lanes > 1
        spec = arena_spec(topology, config, [unit for unit, _ in pairs], [layout for _, layout in pairs], multicast)
        stock = stock_memory(pairs, config)
        arena = replace(
            arena,
            slots=spec.slots,
            stage_places=spec.stage.ring,
            stage_place_bytes=spec.stage.place_bytes,
            memory_bytes=spec.areas(),
            stock_memory_bytes=stock,
        )
        at_once = multicast_bytes(config) if multicast else 0
        programs = _Programs(topology, ranks.index(dist.get_rank()), config, spec.stage, spec.inbox, at_once)
    found: dict[Any, list[int]] = defaultdict(list)
    for i, (unit, layout, reason) in enumerate(zip(units, layouts, reasons, strict=True)):
        found[alike_key(unit, layout), reason].append(i)
    groups = []
    for (_, reason), members in found.items():
        unit, layout = units[members[0]], layouts[members[0]]
        groups.append(
            GroupPlan(
                tuple(units[i].name for i in members),
                number,
                len(layout.params),
                layout.bytes_unsharded,
                layout.padding_bytes,
                1 if unit.keeps_slot else 2,
                ("stock" if config.comm == "tide" else config.comm) if reason else "tide",
                reason,
                **(programs(unit, layout) if programs and not reason else {}),
            )
        )
    return groups, arena


def alike_key(unit: Unit, layout: GroupLayout) -> tuple[Any, ...]:
    """Equal for groups whose programs and counts are."""
    params = tuple(replace(param, name="") for param in layout.params)
    return params, trainable_of(unit), describe.reduce_dtype(unit), unit.keeps_slot


def trainable_of(unit: Unit) -> tuple[int, ...]:
    """Indices of the parameters that get gradients, in FSDP2's order."""
    return tuple(i for i, p in enumerate(unit.group.fsdp_params) if p.sharded_param.requires_grad)


@dataclass(frozen=True)
class _Programs:
    """Makes one rank's programs for a group and counts them; gradients come in the dtype that was gathered."""

    topology: Topology
    rank: int
    config: TideConfig
    stage: StageSpec
    inbox: InboxSpec | None
    multicast_bytes: int

    def __call__(self, unit: Unit, layout: GroupLayout) -> dict[str, Any]:
        made: dict[str, Any] = {}
        config = self.config
        if config.all_gather:
            program = all_gather(layout, self.topology, self.rank, 0, config.head_bytes, self.multicast_bytes)
            made["all_gather"] = shape_of(program)
            made["rounds"] = round_shapes(program, layout, self.topology)
        trainable, reduce_dtype = trainable_of(unit), describe.reduce_dtype(unit)
        grad_dtypes = {layout.params[p].comm_dtype for p in trainable}
        if config.reduce_scatter and reduce_dtype and len(grad_dtypes) == 1:
            made["reduce_scatter"] = shape_of(
                reduce_scatter(
                    layout,
                    self.topology,
                    self.rank,
                    self.stage,
                    trainable,
                    grad_dtypes.pop(),
                    reduce_dtype,
                    config.memory_mode == "slot_reuse",
                    config.partial_blocks,
                    self.inbox,
                    config.final_blocks,
                )
            )
        return made
