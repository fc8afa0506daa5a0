"""All shard groups of a job together: who measures what, and one decision for everybody.

Shard groups that share no rank measure at the same time, as they communicate in training (replicas of HSDP, pipeline stages); those that
share ranks follow one another, in one order for all. After each setting all ranks exchange what they found, so each knows the slowest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tide_comm.config import TideConfig
from tide_comm.engine.base import Exchange
from tide_comm.engine.cuda.multicast import gpu_id
from tide_comm.errors import first_difference
from tide_comm.fsdp.attach import surroundings
from tide_comm.fsdp.domain import exchange_over, shortened
from tide_comm.fsdp.rails import decide_multicast
from tide_comm.fsdp.verdict import ONE_RANK, verdict
from tide_comm.tune.groups import GroupCase, Ranks
from tide_comm.tune.launches import ROUNDS
from tide_comm.tune.settings import SETTINGS, Setting, choose, one_for_all_alike
from tide_comm.tune.shard import AgreedError, Measured, Row, Shard, Times

EMULATED = "emulated machines"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Tuned:
    """One setting. `turns_s`: seconds of a step's launches by value and turn; empty where it was not measured, which `reason` explains."""

    setting: Setting
    before: int
    chosen: int
    turns_s: dict[int, tuple[float, ...]]
    rows: tuple[Row, ...] = ()
    arena_bytes: dict[int, int] | None = None
    reason: str = ""

    @property
    def step_s(self) -> dict[int, float]:
        """By value, the middle turn."""
        return {value: statistics.median(turns) for value, turns in self.turns_s.items()}


@dataclass(frozen=True)
class Tuning:
    """What `tune` returns, equal on all ranks. `stock`: groups that stay on stock communication, with the reason."""

    config: TideConfig
    """Before."""
    device: str
    ranks: int
    settings: tuple[Tuned, ...]
    stock: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    @property
    def values(self) -> dict[str, int]:
        """What was measured and chosen, by name."""
        return {tuned.setting.name: tuned.chosen for tuned in self.settings if not tuned.reason}


def tune(groups: Mapping[Ranks, Sequence[GroupCase]], config: TideConfig, device: torch.device, say: Say) -> Tuning:
    """Measures and chooses. Collective over the world, whose default process group moves objects of the host (gloo).

    `groups`: this rank's, by the ranks that share them (`groups.cases_of`). `say` is given a line now and then.
    Raises `AgreedError`, on all ranks alike, if ranks disagree on groups or configuration, if no group is on TIDE, or if memory is short;
    other `TideError`s if a rank or an engine fails.
    """
    world = exchange_over(_default_group())
    compare_ranks(world((config, {ranks: [c.fingerprint for c in cases] for ranks, cases in groups.items()})))
    process_groups = _process_groups(world(sorted(groups)))
    shards, stock, found = [], [], set()
    try:
        for ranks in sorted(process_groups):
            if ranks in groups:
                shard, left, about = _shard(ranks, process_groups[ranks], groups[ranks], config, device, say)
                shards += [shard] if shard is not None else []
                stock += left
                found.add(about)
        # Every rank has to know them all, to write the same.
        everybody = world((stock, found, bool(shards)))
        all_stock = list(dict.fromkeys(group for theirs, _, _ in everybody for group in theirs))
        abouts = sorted({about for _, theirs, _ in everybody for about in theirs if about})
        if not any(has for _, _, has in everybody):
            name, reason = all_stock[0] if all_stock else ("all groups", ONE_RANK)
            raise AgreedError(f"no group is on TIDE, so there is nothing to tune: {name}: {reason}")
        settings = _settings(shards, config, world)
        lines = {shard.multicast_line for shard in shards if shard.multicast.used}
        for shard in shards:
            shard.close()
    finally:
        for shard in shards:
            shard.abandon()
    told = {tuned.reason for tuned in settings}
    multicast = sorted({line for theirs in world(lines) for line in theirs} - told)
    notes = [*abouts, *multicast, *_notes(world, device, any(EMULATED in about for about in abouts))]
    return Tuning(config, device.type, dist.get_world_size(), settings, tuple(all_stock), tuple(notes))


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _settings(shards: Sequence[Shard], config: TideConfig, world: Exchange) -> tuple[Tuned, ...]:
    tuned = []
    for setting in SETTINGS:
        own = setting.of(config)
        if reason := setting.why_off(config):
            tuned.append(Tuned(setting, own, own, {}, reason=reason))
            continue
        tuned.append(combined(setting, own, world([shard.measure(setting, config) for shard in shards])))
        config = setting.set_in(config, tuned[-1].chosen)
    return tuple(tuned)


def combined(setting: Setting, own: int, everybody: Sequence[Sequence[Measured]]) -> Tuned:
    """The decision. `everybody`: by rank, what it has measured in each of its shard groups; `own`: the configuration's value.

    A value's time is that of the rank with most, over all its groups. Pure: ranks that are handed the same decide alike.
    """
    measured = [m for theirs in everybody for m in theirs]
    alike = one_for_all_alike({v: tuple(m.alike[v] for m in measured) for v in measured[0].alike}, own)
    shown = sorted(set(alike.values()))
    if len(shown) == 1:
        on_one = all(m.machines == 1 for m in measured) and not setting.at_once
        why = "; ".join(dict.fromkeys(m.reason for m in measured if m.reason))
        reason = why or ("one machine: " if on_one else "") + "no program of these groups depends on it"
        return Tuned(setting, own, own, {}, reason=reason)
    turns_s = {}
    for v in shown:
        ranks = [[sum(turn) for turn in zip(*(_turns_s(m, v) for m in theirs), strict=True)] for theirs in everybody]
        turns_s[v] = tuple(max(turn) for turn in zip(*filter(None, ranks), strict=True))
    rows: dict[str, Row] = {}
    for m in measured:
        for row in m.rows:
            times = {v: row.times_s[m.alike[v]] for v in shown}
            known = rows.get(row.case.fingerprint)
            rows[row.case.fingerprint] = replace(row, times_s=_slower(known.times_s, times) if known else times)
    arenas = [m for m in measured if m.arena_bytes]
    most = {v: max((m.arena_bytes or {})[m.alike[v]] for m in arenas) for v in shown} if arenas else None
    return Tuned(setting, own, choose(setting, turns_s, own), turns_s, tuple(rows.values()), most)


def _turns_s(measured: Measured, value: int) -> list[float]:
    """By turn, a step's launches in one shard group; 0 where nothing depends on the setting."""
    at = measured.alike[value]
    rows = [[row.launches_per_step * s for s in row.times_s[at][row.counts]] for row in measured.rows]
    return [sum(turn) for turn in zip(*rows, strict=True)] if rows else [0.0] * ROUNDS


def _slower(a: Times, b: Times) -> Times:
    return {v: {kind: tuple(map(max, a[v][kind], b[v][kind])) for kind in a[v]} for v in a}


def compare_ranks(everybody: Sequence[tuple[TideConfig, dict[Ranks, list[str]]]]) -> None:
    """Raises `AgreedError` with the first difference between ranks that should have the same configuration or the same groups."""

    def differ(other: int, a: str, b: str) -> None:
        raise AgreedError(
            f"ranks disagree: {first_difference(a, b)} on rank {other}; start every rank with the same CONFIG, overrides and versions"
        )

    known: dict[Ranks, list[str]] = {}
    for rank, (config, groups) in enumerate(everybody):
        if config != everybody[0][0]:
            differ(rank, str(everybody[0][0]), str(config))
        for ranks, cases in groups.items():
            if known.setdefault(ranks, cases) != cases:
                differ(rank, "; ".join(known[ranks]), "; ".join(cases))
    for ranks in known:
        for rank in ranks:
            if ranks not in everybody[rank][1]:
                raise AgreedError(
                    f"ranks disagree: rank {rank} has no parameter group over ranks {shortened(ranks)}, and others say that it has; "
                    "start every rank with the same CONFIG, overrides and versions"
                )


def _process_groups(everybody: Sequence[Sequence[Ranks]]) -> dict[Ranks, Any]:
    """Collective over the world: a process group for each shard group of more than one rank."""
    several = sorted({ranks for theirs in everybody for ranks in theirs if len(ranks) > 1})
    return {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in several}


def _shard(
    ranks: Ranks,
    process_group: dist.ProcessGroup,
    cases: Sequence[GroupCase],
    config: TideConfig,
    device: torch.device,
    say: Say,
) -> tuple[Shard | None, list[tuple[str, str]], str]:
    """(the groups on TIDE of one shard group, those that are not with the reason, where it runs). Collective over it."""
    exchange, rank = exchange_over(process_group), process_group.rank()
    around = surroundings(config, device, exchange, rank, f"ranks {shortened(ranks)}")
    machines, lanes = (around.topology.machines, around.topology.lanes) if around.topology else (0, 0)
    reasons = []
    for case in cases:
        facts = replace(case.facts, machines=machines, hosts=around.hosts, lanes=lanes, topology_error=around.problem)
        reasons.append(verdict(facts, config, around.capabilities))
    first = [next(filter(None, theirs), "") for theirs in zip(*exchange(reasons), strict=True)]
    left = [(case.title, reason) for case, reason in zip(cases, first, strict=True) if reason]
    chosen = [case for case, reason in zip(cases, first, strict=True) if not reason]
    if around.topology is None or not chosen:
        return None, left, ""
    rail = around.rail.name if around.rail else "loopback"
    # On a CPU multiplies take the cores that the engine's own threads run on, which no GPU's do.
    beside = device.type == "cuda"
    multicast = decide_multicast(config, around.topology, device, exchange)
    shard = Shard(ranks, rank, process_group, exchange, around.topology, rail, chosen, device, say, beside, multicast)
    kind = EMULATED if machines > 1 and around.hosts == 1 else "machines" if machines > 1 else "machine"
    about = f"{machines} {kind} of {lanes} rank{'s' if lanes > 1 else ''}" + (f"; {around.rail}" if around.rail else "")
    return shard, left, about


def _notes(world: Exchange, device: torch.device, emulated: bool) -> list[str]:
    """Collective: what makes the figures mean less than they look."""
    if device.type == "cpu":
        return [
            "Measured on a CPU with the host engine, which has neither thread blocks nor a network: these values mean nothing for GPUs. "
            "Tune on the cluster"
        ]
    notes = []
    if emulated:
        notes.append(
            "Machines are emulated within a host: final_blocks, inbox_batch and head_bytes say nothing of a network"
        )
    used = world(gpu_id(device))
    if len(set(used)) < len(used):
        notes.append("Several ranks share a GPU and take turns on it: these values mean nothing for a GPU a rank")
    return notes
