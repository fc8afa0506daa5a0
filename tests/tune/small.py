"""A small group for tuning, and shard groups whose ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.ranks import exchange_for
from tide_comm.engine.host.engine import HostEngine
from tide_comm.fsdp.rails import Multicast
from tide_comm.fsdp.verdict import GroupFacts
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.topology import Topology
from tide_comm.tune import shard as shard_module
from tide_comm.tune.groups import GroupCase
from tide_comm.tune.shard import NO_MULTICAST, Shard

CPU = torch.device("cpu")


def case(world: int, name: str = "block", rows: int = 8, alike: int = 3, **changes: Any) -> GroupCase:
    """`rows` rows of bf16, and two parameters that are cast. `rows` below `world`: the last ranks have no part of them."""
    params = (
        ParamLayout("w", (rows, 16), "bfloat16", "bfloat16", world),
        ParamLayout("b", (rows,), "float32", "bfloat16", world),
        ParamLayout("frozen", (rows,), "float32", "bfloat16", world),
    )
    facts = GroupFacts(name, 2, world, 0, 0, 0, "", "float32", ("bfloat16",), False, False, False, "", False)
    names = tuple(f"{name}.{i}" for i in range(alike))
    values: dict[str, Any] = {"trainable": (0, 1), "reduce_dtype": "float32", "gathers_per_step": 2, **changes}
    return GroupCase(names, GroupLayout(name, params, world), facts=facts, **values)


def over_ranks(
    monkeypatch: pytest.MonkeyPatch,
    topology: Topology,
    cases: list[GroupCase],
    body: Callable[[int, Shard], Any],
    said: list[str] | None = None,
    beside: bool = False,
    multicast: Multicast = NO_MULTICAST,
    apart: str = "",
) -> list[Any]:
    """What `body` returns or raises on each rank of one shard group on host engines. `apart`: why they run what reaches all lanes at once
    lane by lane."""
    world = topology.world
    exchange = exchange_for(world)

    def make(spec: Any, rank: int, group: Any, timeout_s: float, device: Any, rail: str, at_once: bool) -> HostEngine:
        assert at_once is multicast.used
        engine = HostEngine(spec, rank, exchanges[rank], min(timeout_s, 20.0))
        engine.apart = apart
        return engine

    exchanges = [exchange(rank) for rank in range(world)]
    monkeypatch.setattr(shard_module, "make_engine", make)
    results: list[Any] = [None] * world

    def main(rank: int) -> None:
        say = said.append if said is not None and rank == 0 else lambda text: None
        group: Any = None
        ranks = tuple(range(world))
        shard = Shard(ranks, rank, group, exchanges[rank], topology, "shm", cases, CPU, say, beside, multicast)
        try:
            results[rank] = body(rank, shard)
        except Exception as error:
            results[rank] = error
        finally:
            shard.abandon()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results
