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


def in_threads(world: int, body: Callable[[int, Callable[[Any], list[Any]]], Any], limit_s: float = 60.0) -> list[Any]:
    """`body(rank, exchange)` on every rank at once, each a thread: its result, or its exception. Fails if a rank does not end."""
    exchange = exchange_for(world)
    found: list[Any] = [None] * world

    def main(rank: int) -> None:
        try:
            found[rank] = body(rank, exchange(rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=limit_s)
        assert not thread.is_alive(), "a rank waits for one that has given up"
    return found


def run_ranks(
    spec: ArenaSpec, body: Callable[[int, HostEngine], Any], timeout_s: float = 20.0, close: bool = True
) -> list[Any]:
    """Run `body(rank, engine)` on every rank at once; returns results, or the exception that a rank raised in its place."""
    world = spec.topology.world
    done = threading.Barrier(world)

    def main(rank: int, exchange: Callable[[Any], list[Any]]) -> Any:
        engine = HostEngine(spec, rank, exchange, timeout_s)
        try:
            return body(rank, engine)
        except Exception as error:
            return error
        finally:
            if close:
                done.wait(timeout=60)
                engine.close()

    return in_threads(world, main, 90.0)
