"""Several ranks of a host engine in one process: a thread each stands in for a rank's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tide_comm.engine.base import ArenaSpec
from tide_comm.engine.host.engine import HostEngine


def exchange_for(world: int) -> Callable[[int], Callable[[Any], list[Any]]]:
    """An in-process all-gather of objects, one handle a rank."""
    barrier = threading.Barrier(world)
    box: list[Any] = [None] * world

    def of(rank: int) -> Callable[[Any], list[Any]]:
        def exchange(mine: Any) -> list[Any]:
            box[rank] = mine
            barrier.wait()
            everybody = list(box)
            barrier.wait()
            return everybody

        return exchange

    return of


def run_ranks(
    spec: ArenaSpec, body: Callable[[int, HostEngine], Any], timeout_s: float = 20.0, close: bool = True
) -> list[Any]:
    """Run `body(rank, engine)` on every rank at once; returns results, or the exception that a rank raised in its place."""
    world = spec.topology.world
    exchange = exchange_for(world)
    results: list[Any] = [None] * world
    done = threading.Barrier(world)

    def main(rank: int) -> None:
        engine = HostEngine(spec, rank, exchange(rank), timeout_s)
        try:
            results[rank] = body(rank, engine)
        except Exception as error:
            results[rank] = error
        finally:
            if close:
                done.wait(timeout=60)
                engine.close()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90)
    return results
