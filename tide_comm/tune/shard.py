"""Measures settings over one shard group: an arena as large as its largest group needs, and one group's memory at a time.

Each launch counts with the slowest of the shard group's ranks; of a turn's launches the median counts. Times are exchanged (over gloo,
between launches), so all ranks have the same and come to the same decisions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tide_comm.config import TideConfig
from tide_comm.engine.base import ArenaSpec, Engine, Exchange
from tide_comm.engine.cuda.agreement import first_objection
from tide_comm.errors import TideError
from tide_comm.fsdp.domain import inbox_for, make_engine, stage_spec
from tide_comm.fsdp.rails import Multicast, insist, multicast_bytes
from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.program import Program
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.topology import Topology
from tide_comm.tune.groups import GroupCase, Ranks
from tide_comm.tune.launches import SLOTS, CudaMarks, GroupMemory, HostMarks, Launcher, Marks, Multiplies, Taken
from tide_comm.tune.settings import Setting, numbered, one_for_all_alike

ALONE, BESIDE, MULTIPLIES = "alone", "beside multiplies", "the multiplies"
"""Kinds of time: from the launch of a collective to its end; the same with multiplies launched behind it, until both have ended; until the
multiplies have ended."""
MOST_MULTIPLIES = 64
ON_CPU = 'multicast: no (a CPU has no switch; multicast = "on" runs the same programs, each write a copy to every rank)'


class AgreedError(TideError):
    """An error that all ranks have found alike: told once."""


NO_MULTICAST = Multicast(False, "")
Times = dict[int, dict[str, tuple[float, ...]]]
"""Seconds by value, kind and turn."""


@dataclass(frozen=True)
class Row:
    """Times of one group."""

    case: GroupCase
    launches_per_step: int
    """Of all groups that are like it, with one microbatch."""
    counts: str
    """The kind of time that counts."""
    times_s: Times
    multiplies: int = 0
    """How many were launched beside each collective; 0: none."""


@dataclass(frozen=True)
class Measured:
    """One setting over one shard group. `alike`: by value, the one that stands for all that make the same programs; `rows`: none where
    all values do. `arena_bytes`: by value, where it depends on it. `reason`: why none depends on the setting, where that is known."""

    ranks: Ranks
    machines: int
    alike: dict[int, int]
    rows: tuple[Row, ...] = ()
    arena_bytes: dict[int, int] | None = None
    reason: str = ""


def programs_of(
    case: GroupCase, spec: ArenaSpec, rank: int, config: TideConfig, multicast: bool = False
) -> tuple[Program, Program | None]:
    """(all-gather, reduce-scatter or None where there is nothing to reduce) of a group whose shards start at 0 of SHARD."""
    at_once = multicast_bytes(config) if multicast else 0
    gather = all_gather(case.layout, spec.topology, rank, 0, config.head_bytes, at_once)
    if case.grad_dtype is None or case.reduce_dtype is None or not config.reduce_scatter:
        return gather, None
    reduce = reduce_scatter(
        case.layout,
        spec.topology,
        rank,
        spec.stage,
        case.trainable,
        case.grad_dtype,
        case.reduce_dtype,
        config.memory_mode == "slot_reuse",
        config.partial_blocks,
        spec.inbox,
        config.final_blocks,
    )
    return gather, reduce


@dataclass
class Shard:
    """One shard group, seen by one of its ranks. Its methods are collective over it, but for `abandon` and `spec`.

    `rank`: within it; `exchange` joins its ranks; `rail`: what carries bytes between its machines on GPUs.
    """

    ranks: Ranks
    rank: int
    process_group: dist.ProcessGroup
    exchange: Exchange
    topology: Topology
    rail: str
    cases: Sequence[GroupCase]
    device: torch.device
    say: Callable[[str], None]
    beside: bool = True
    """Whether reduce-scatters are also measured beside multiplies."""
    multicast: Multicast = NO_MULTICAST
    """Whether programs write to all lanes of a machine at once."""

    def __post_init__(self) -> None:
        self._engine: Engine | None = None
        self._multiplies: Multiplies | None = None
        self._multiply_s = 0.0
        self._apart = ""
        self.marks: Marks = HostMarks() if self.device.type == "cpu" else CudaMarks()

    def spec(self, config: TideConfig) -> ArenaSpec:
        """As `attach` makes it, but with room for one group's shards only."""
        layouts = [case.layout for case in self.cases]
        return ArenaSpec(
            self.topology,
            max(layout.shard_bytes for layout in layouts),
            max(layout.slot_bytes for layout in layouts),
            SLOTS,
            stage_spec(layouts, self.topology, config),
            inbox_for(layouts, self.topology, config.inbox_batch, self.multicast.used)
            if config.reduce_scatter
            else None,
        )

    @property
    def multicast_line(self) -> str:
        """Whether programs write to all lanes at once; of the engine that was made last, if there was one."""
        return self.multicast.outcome(self._apart)

    def measure(self, setting: Setting, config: TideConfig) -> Measured:
        """Times of a setting's values, all else as in `config`. Raises `TideError` if an engine fails or memory is short."""
        values = setting.candidates(config)
        cases = [c for c in self.cases if setting.collective == "all_gather" or c.grad_dtype is not None]
        configs = {value: setting.set_in(config, value) for value in values}
        specs = {value: self.spec(c) for value, c in configs.items()}
        together = self.multicast.used
        made = {v: [programs_of(case, specs[v], self.rank, configs[v], together) for case in cases] for v in values}
        if setting.collective == "all_gather":
            different = numbered([gather for gather, _ in made[v]] for v in values)
        else:
            different = numbered((specs[v], [reduce for _, reduce in made[v]]) for v in values)
        # A rank whose shard is all padding sums nothing, whatever the value: what any rank tells apart is different.
        apart = zip(*self.exchange(different), strict=True)
        alike = one_for_all_alike(dict(zip(values, apart, strict=True)), setting.of(config))
        shown = sorted(set(alike.values()), key=setting.meant)
        nothing = Measured(self.ranks, self.topology.machines, alike)
        if len(shown) == 1:
            return replace(nothing, reason="" if together or not setting.at_once else self.multicast_line or ON_CPU)
        rows: list[Row] = []
        counts = {id(case): 0 for case in cases}
        for turn in [[v] for v in shown] if setting.sizes_arena else [shown]:
            engine = self._open(specs[turn[0]], config)
            if setting.at_once and engine.apart:
                return replace(nothing, alike=dict.fromkeys(values, setting.of(config)), reason=self.multicast_line)
            for i, case in enumerate(cases):
                self.say(
                    f"{setting.name} = {', '.join(map(setting.text, turn))}: {case.title}, group {i + 1} of {len(cases)}"
                )
                launcher = self._load(engine, case)
                runs = {v: made[v][i] for v in turn}
                times, count = self._times(setting, launcher, runs, config, counts[id(case)])
                counts[id(case)] = count
                rows.append(self._row(setting, case, times, count))
                del launcher
        arenas = {v: specs[v].total_bytes for v in shown} if setting.sizes_arena else None
        return replace(nothing, rows=tuple(_joined(rows)), arena_bytes=arenas)

    def _row(self, setting: Setting, case: GroupCase, times: Times, count: int) -> Row:
        per_step = len(case.names) * (case.gathers_per_step if setting.collective == "all_gather" else 1)
        return Row(case, per_step, BESIDE if count else ALONE, times, count)

    def _times(
        self,
        setting: Setting,
        launcher: Launcher,
        programs: dict[int, tuple[Program, Program | None]],
        config: TideConfig,
        count: int,
    ) -> tuple[Times, int]:
        """By value and kind, and how many multiplies ran beside each launch. `count`: how many there are to be; 0: as many as take as
        long as the slowest value's collective."""
        if setting.collective == "all_gather":
            gathers = {v: partial(launcher.gather, gather) for v, (gather, _) in programs.items()}
            return {v: {ALONE: kinds[0]} for v, kinds in self._agreed(launcher.turns(gathers)).items()}, 0
        reuse = config.memory_mode == "slot_reuse"
        reduces = {
            v: partial(launcher.reduce, reduce, gather if reuse else None)
            for v, (gather, reduce) in programs.items()
            if reduce is not None
        }
        alone = self._agreed(launcher.turns(reduces))
        times = {v: {ALONE: kinds[0]} for v, kinds in alone.items()}
        if not self.beside:
            return times, 0
        multiplies = self._multiplies_here()
        if not count:
            longest_s = max(statistics.median(kinds[0]) for kinds in alone.values())
            count = min(MOST_MULTIPLIES, max(1, round(longest_s / self._multiply_s)))
        beside = {v: partial(run, multiplies=multiplies, count=count) for v, run in reduces.items()}
        for v, (multiplied_s, both_s) in self._agreed(launcher.turns(beside)).items():
            times[v] |= {BESIDE: both_s, MULTIPLIES: multiplied_s}
        return times, count

    def _agreed(self, mine: Taken) -> dict[int, list[tuple[float, ...]]]:
        return medians_of_slowest(self.exchange(mine))

    def _multiplies_here(self) -> Multiplies:
        if self._multiplies is None:
            self._multiplies = self._together(lambda: Multiplies(self.device), "the matrices of multiplies")
            # Agreed: the number of multiplies follows from it.
            self._multiply_s = max(self.exchange(self._multiplies.seconds(self.marks)))
        return self._multiplies

    def _load(self, engine: Engine, case: GroupCase) -> Launcher:
        memory = self._together(
            lambda: GroupMemory(engine, case, self.device),
            f"shards and gradients of {case.title} ({case.layout.bytes_unsharded / 2**20:.0f} MiB unsharded)",
        )
        self.marks.settle()
        return Launcher(engine, memory, self.marks)

    def _together(self, make: Callable[[], Any], what: str) -> Any:
        """Collective: makes something that takes memory, on all ranks or on none. Raises `AgreedError`."""
        made, failed = None, ""
        try:
            made = make()
        except RuntimeError as error:
            failed = f"no room for {what}: {str(error).splitlines()[0]}"
        if objection := first_objection(self.exchange, failed):
            raise AgreedError(f"{objection}; free memory, or tune with more ranks")
        return made

    def _open(self, spec: ArenaSpec, config: TideConfig) -> Engine:
        """The engine with this arena; the one that is open, if it has it. Raises `TideError`, on all ranks alike, if it cannot do what
        `multicast = "on"` asks for."""
        if self._engine is not None and self._engine.spec == spec:
            return self._engine
        self.close()
        self.say(f"making an arena of {spec.total_bytes / 2**20:.1f} MiB")
        used = self.multicast.used
        engine = make_engine(spec, self.rank, self.process_group, config.timeout_s, self.device, self.rail, used)
        insist(config, engine)
        self._engine, self._apart = engine, engine.apart
        return engine

    def close(self) -> None:
        """Give the arena back, when all ranks are done with it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self.marks.settle()
            self.exchange(None)
            engine.close()
            if self.device.type == "cuda":
                # The next arena does not come from PyTorch's allocator, which would keep what a group's gradients took.
                torch.cuda.empty_cache()

    def abandon(self) -> None:
        """The same after an error, without waiting for ranks that may be gone."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def medians_of_slowest(everybody: Sequence[Taken]) -> dict[int, list[tuple[float, ...]]]:
    """Seconds by value, kind and turn: of each launch the slowest rank's, of a turn's launches the median. `everybody`: by rank."""
    found = {}
    for value in everybody[0]:
        turns = []
        for ranks in zip(*(theirs[value] for theirs in everybody), strict=True):
            launches = [[max(kind) for kind in zip(*each, strict=True)] for each in zip(*ranks, strict=True)]
            turns.append([statistics.median(kind) for kind in zip(*launches, strict=True)])
        found[value] = list(zip(*turns, strict=True))
    return found


def _joined(rows: Sequence[Row]) -> list[Row]:
    """One row a group, where values were measured apart."""
    joined: dict[int, Row] = {}
    for row in rows:
        known = joined.get(id(row.case))
        joined[id(row.case)] = replace(row, times_s={**known.times_s, **row.times_s}) if known else row
    return list(joined.values())
