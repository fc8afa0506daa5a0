"""Training steps as sequences of programs, in the order in which FSDP2 issues them: what the checker is given.

Most hazards lie between programs: a slot taken too early, an optimizer that writes a shard still being pushed. So the caller's own
accesses are operations here too: compute reads slots and writes gradients, the optimizer reads OUT and writes PARAM and SHARD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tide_comm.plan import demands, names
from tide_comm.plan.alike import check_demands, check_programs
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.checker import Checker, Issued
from tide_comm.plan.dtypes import ITEM_BYTES
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.ledger import Ledger
from tide_comm.plan.memory import Content
from tide_comm.plan.moves import Launch
from tide_comm.plan.parts import parts_of
from tide_comm.plan.program import COMPUTE, After, Area, Counters, Op, Program, Region, Use, bind
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.slices import InboxSpec, StageSpec, seat_bytes_of
from tide_comm.plan.symmetry import Symmetry
from tide_comm.plan.topology import Topology

Programs = Callable[[str, int, int], Program]
"""(kind, group index, rank) -> program; kinds: all_gather, reduce_scatter (or reduce_scatter/K, part K), vacate, vacate_reduced."""


@dataclass
class Plans:
    """The generators' programs for groups of one arena; SHARD bases follow one another."""

    layouts: Sequence[GroupLayout]
    topology: Topology
    stage: StageSpec
    memory_mode: str = "in_place"
    grad_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"
    inbox_batch: int = 8
    head_bytes: int = 0
    multicast_bytes: int = 0
    """Pieces of all-gathers that reach all lanes by one write have at most so many bytes; 0: none do."""
    multimem: bool = False
    """The last step of a reduce-scatter over several machines is the switch's."""
    early_bytes: int = 0
    """Least bytes of a part where reduce-scatters start in parts (`early_reduce`); 0: whole groups."""

    def parts(self, group: int) -> tuple[tuple[int, ...], ...]:
        """The parts of a group's reduce-scatter; one if it goes as a whole."""
        everything = tuple(range(len(self.layouts[group].params)))
        return (parts_of(self.layouts[group], everything, self.early_bytes) if self.early_bytes else ()) or (
            everything,
        )

    @property
    def inbox(self) -> InboxSpec | None:
        """None on one machine."""
        if self.topology.machines == 1:
            return None
        return InboxSpec(
            seat_bytes_of(self.layouts, self.topology), self.inbox_batch, self.topology.lanes, self.multimem
        )

    def shard_base(self, group: int) -> int:
        return sum(layout.shard_bytes for layout in self.layouts[:group])

    def limits(self) -> dict[Area, int]:
        """Bytes of each area of the arena: of all shards, of a slot, of a place in STAGE."""
        limits = {
            Area.SHARD: self.shard_base(len(self.layouts)),
            Area.SLOT: max(layout.slot_bytes for layout in self.layouts),
            Area.STAGE: self.stage.place_bytes,
        }
        if self.inbox is not None:
            limits |= {Area.PARTIAL: self.inbox.seat_bytes, Area.SCRATCH: self.inbox.seat_bytes}
            limits |= {Area.INBOX: self.inbox.set_bytes}
        return limits

    def __call__(self, kind: str, group: int, rank: int) -> Program:
        layout = self.layouts[group]
        if kind == "all_gather":
            return all_gather(
                layout, self.topology, rank, self.shard_base(group), self.head_bytes, self.multicast_bytes
            )
        if kind.startswith("reduce_scatter"):
            reuse = self.memory_mode == "slot_reuse"
            return reduce_scatter(
                layout,
                self.topology,
                rank,
                self.stage,
                self.parts(group)[int(kind.partition("/")[2] or 0)],
                self.grad_dtype,
                self.reduce_dtype,
                from_slot=reuse,
                inbox=self.inbox,
                out_params=range(len(layout.params)),
            )
        return vacate(self.topology, rank, reduced_from=kind == "vacate_reduced")


@dataclass
class Training:
    """Builds one sequence for all ranks. `programs` replaces the generators, for hand-written programs and mutants.

    `keep`: groups that stay unsharded from forward to backward. `recompute`: backward computes each group's forward again (activation
    checkpointing). `symmetric`: build it for machine 0 alone, after proving that machines are alike (`alike`); for layouts
    without padding and ranks machine by machine only, `SymmetryError` otherwise. `workers`: processes that prove it.
    """

    plans: Plans
    slots: int = 2
    prefetch: int = 1
    programs: Programs | None = None
    keep: frozenset[int] = frozenset()
    recompute: bool = False
    symmetric: bool = False
    workers: int = 1
    issued: list[list[Issued]] = field(default_factory=list)

    def __post_init__(self) -> None:
        topology = self.plans.topology
        self.symmetry = Symmetry(self.plans.layouts, topology, self.plans.grad_dtype) if self.symmetric else None
        self.ranks = topology.lanes if self.symmetric else topology.world
        self.issued = [[] for _ in range(self.ranks)]
        self.counters = [Counters() for _ in range(self.ranks)]
        self.ledger = Ledger(self.slots)
        self._index = {layout.name: g for g, layout in enumerate(self.plans.layouts)}
        self.number = 0
        self.version = 0
        self.backwards = 0
        self.held: dict[int, int] = {}
        self.gathering: dict[int, list[Launch]] = {}
        self._made: dict[tuple[str, int], list[Program]] = {}
        self._start()

    def make(self, kind: str, group: int) -> list[Program]:
        """The programs of all ranks that are run, each made once: launches bind them."""
        if (kind, group) not in self._made:
            make = partial(self.programs or self.plans, kind, group)
            if self.symmetry is not None:
                check_programs(self.symmetry, self.plans.layouts[group].name, make, self.workers)
            self._made[kind, group] = [make(rank) for rank in range(self.ranks)]
        return self._made[kind, group]

    def _launch(self, kind: str, group: int, slot: int = -1) -> list[Launch]:
        launches = []
        for rank, program in enumerate(self.make(kind, group)):
            binding = bind(program, self.counters[rank], slot)
            launch = Launch(program, binding, self.plans.layouts[group].name, self.number)
            self.issued[rank] += [Issued(op, launch) for op in program.ops]
            launches.append(launch)
        self.number += 1
        return launches

    def _caller(self, launches: Sequence[Launch], ops: Callable[[int, Launch], list[Op]]) -> None:
        for rank, launch in enumerate(launches):
            empty = Program("caller", rank, ())
            here = replace(launch, program=empty, number=self.number)
            self.issued[rank] += [Issued(op, here) for op in ops(rank, launch)]
        self.number += 1

    def _start(self) -> None:
        """The model is there: every rank has written its shards."""
        nothing = [Program("start", rank, ()) for rank in range(self.ranks)]
        for layout in self.plans.layouts:
            self._caller(
                [
                    Launch(p, bind(p, counters), layout.name, 0)
                    for p, counters in zip(nothing, self.counters, strict=True)
                ],
                lambda rank, launch: [Use(COMPUTE, writes=self._param_writes(self._index[launch.group], rank))],
            )

    def _param_writes(self, group: int, rank: int) -> tuple[tuple[Region, object], ...]:
        layout = self.plans.layouts[group]
        writes: list[tuple[Region, object]] = []
        for p, param in enumerate(layout.params):
            tag = demands.param_tag(layout.name, rank, p, self.version)
            region = layout.shard(p, self.plans.shard_base(group)) if param.in_shard else layout.master(p)
            if region.nbytes:
                writes.append((region, Content(tag, 0, ITEM_BYTES[param.param_dtype])))
        return tuple(writes)

    # What FSDP2 does

    def unshard(self, group: int) -> bool:
        """Issue the all-gather unless it is issued already; False when no slot is free."""
        if group in self.held:
            return True
        slot = self.ledger.acquire(self.plans.layouts[group].name)
        if slot is None:
            return False
        self.held[group] = slot
        self.gathering[group] = self._launch("all_gather", group, slot)
        return True

    def use(self, group: int, grads: Sequence[int] = ()) -> None:
        """Compute waits for the group, reads every parameter and in backward writes gradients."""
        layout = self.plans.layouts[group]
        expects = tuple(demands.unsharded(layout, self.version))

        def ops(rank: int, _: Launch) -> list[Op]:
            writes: list[tuple[Region, object]] = []
            for p in grads:
                param, item = layout.params[p], ITEM_BYTES[self.plans.grad_dtype]
                tag = demands.grad_tag(layout.name, rank, p, self.backwards)
                if param.numel:
                    writes.append((Region(Area.GRAD, 0, param.numel * item, index=p), Content(tag, 0, item)))
            return [After(COMPUTE, names.ARRIVED), Use(COMPUTE, expects=expects, writes=tuple(writes))]

        self._caller(self.gathering[group], ops)

    def free(self, group: int) -> None:
        slot = self.held.pop(group)
        self._launch("vacate", group, slot)
        self.ledger.release(slot)

    def reduce(self, group: int, previous: list[Launch] | None, part: int = 0) -> list[Launch]:
        """Free (or keep, for Slot-Reuse) the slot, wait until the previous group's gradients are read, launch the reduce-scatter.

        `part`: or the last part of one. Its points stand for all parts, whose streams are the same.
        """
        slot = self.held.pop(group)
        reuse = self.plans.memory_mode == "slot_reuse"
        if not reuse:
            self._launch("vacate", group, slot)
            self.ledger.release(slot)
        if previous is not None:
            self._grads_freed(previous)
        launches = self._launch(f"reduce_scatter/{part}" if part else "reduce_scatter", group, slot if reuse else -1)
        if reuse:
            self._launch("vacate_reduced", group, slot)
            self.ledger.release(slot)
        return launches

    def _grads_freed(self, launches: list[Launch]) -> None:
        """Compute waits for `grads_read` and the gradients' memory goes to whoever asks next: other contents from here on."""
        layout = self.plans.layouts[self._index[launches[0].group]]
        item = ITEM_BYTES[self.plans.grad_dtype]
        freed = tuple(
            (Region(Area.GRAD, 0, param.numel * item, index=p), Content(("freed", self.number), 0, item))
            for p, param in enumerate(layout.params)
            if param.numel
        )
        self._caller(
            launches,
            lambda _, launch: [After(COMPUTE, launch.program.points["grads_read"]), Use(COMPUTE, writes=freed)],
        )

    def forward(self) -> None:
        """Groups are freed behind their use, or stay: then compute waits at the end for this rank's own pushes, as at a free."""
        groups = list(range(len(self.plans.layouts)))
        for position, group in enumerate(groups):
            self._unshard_ahead(groups[position:])
            self.use(group)
            if group not in self.keep:
                self.free(group)
        for group in sorted(self.held):
            self._caller(self.gathering[group], lambda *_: [After(COMPUTE, names.SENT)])

    def _unshard_ahead(self, order: Sequence[int]) -> None:
        for ahead in order[: 1 + self.prefetch]:
            if not self.unshard(ahead):
                break

    def backward(self) -> list[list[Launch]]:
        """Returns each group's reduce-scatter; all are awaited."""
        order = list(reversed(range(len(self.plans.layouts))))
        reduced: list[list[Launch]] = []
        for position, group in enumerate(order):
            self._unshard_ahead(order[position:])
            if self.recompute:
                self.use(group)
            *early, last = self.plans.parts(group)
            for k, part in enumerate(early):
                self.use(group, part)
                if k == 0 and reduced:
                    self._grads_freed(reduced[-1])
                self._launch(f"reduce_scatter/{k}", group)
            self.use(group, last)
            reduced.append(self.reduce(group, reduced[-1] if reduced and not early else None, len(early)))
        for launches in reduced:
            self._caller(launches, lambda _, launch: [After(COMPUTE, launch.program.points["done"])])
        self._grads_freed(reduced[-1])
        self.backwards += 1
        return reduced

    def step(self, micro_steps: int = 1) -> None:
        """One training step: forward and backward, once or several times with sums added up, then the optimizer."""
        for _ in range(micro_steps - 1):
            self.forward()
            self._sums_read(self.backward(), optimizer=False)
        self.forward()
        reduced = self.backward()
        self.version += 1
        self._sums_read(reduced, optimizer=True)

    def _sums_read(self, reduced: list[list[Launch]], optimizer: bool) -> None:
        """Compute adds OUT to what it has, or the optimizer reads it and writes parameters."""
        topology, dtype = self.plans.topology, self.plans.reduce_dtype

        def ops(rank: int, launch: Launch) -> list[Op]:
            group = self._index[launch.group]
            layout = self.plans.layouts[group]
            params = list(range(len(layout.params)))
            unordered = self.plans.inbox is not None and self.plans.multimem
            expects = tuple(demands.reduced(layout, topology, rank, params, dtype, self.backwards - 1, unordered))
            return [Use(COMPUTE, expects=expects, writes=self._param_writes(group, rank) if optimizer else ())]

        for launches in sorted(reduced, key=lambda launches: self._index[launches[0].group]):
            self._caller(launches, ops)

    def check(self) -> None:
        """Raises `CheckError` unless the checker accepts the sequence."""
        plans, machines = self.plans, self.plans.topology.machines
        if self.symmetry is not None:
            others = range(1, machines) if machines <= 64 else (1, machines - 1)
            for layout in plans.layouts:
                check_demands(self.symmetry, layout, plans.topology, plans.reduce_dtype, others, plans.multimem)
        Checker(self.issued, plans.stage.ring, plans.limits(), plans.topology, self.symmetry).check()


def check_training(
    plans: Plans,
    steps: int = 2,
    slots: int = 0,
    prefetch: int = 1,
    programs: Programs | None = None,
    *,
    micro_steps: int = 1,
    evaluate: bool = False,
    keep: Iterable[int] = (),
    recompute: bool = False,
    symmetric: bool = False,
    workers: int = 1,
) -> None:
    """Check `steps` training steps over all groups; raises `CheckError`. `slots` 0: as many as prefetch and `keep` need.

    `micro_steps`: backward passes an optimizer step. `evaluate`: a forward alone before each step. `keep`, `recompute`, `symmetric`,
    `workers` as in `Training`.
    """
    kept = frozenset(keep)
    sequence = Training(
        plans, slots or prefetch + 1 + len(kept), prefetch, programs, kept, recompute, symmetric, workers
    )
    for _ in range(steps):
        if evaluate:
            sequence.forward()
        sequence.step(micro_steps)
    sequence.check()
