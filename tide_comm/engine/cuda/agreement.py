"""Decisions that all ranks must make alike, though only one of them may see why not."""

from __future__ import annotations

from tide_comm.engine.base import Exchange


def first_objection(exchange: Exchange, objection: str) -> str:
    """Collective: hands in why this rank cannot, "" if it can. Returns the first rank's objection, named, or "" if none has any."""
    everybody = exchange(objection)
    return next((f"rank {rank}: {theirs}" for rank, theirs in enumerate(everybody) if theirs), "")
