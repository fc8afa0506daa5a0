"""Whether NCCL's one-sided puts can reach the arena: can its memory, or at least NCCL's own, be registered as a symmetric window?

Prints one line a rank, NCCL_MULTI_RANK_GPU_ENABLE=1 where ranks share GPUs:

    torchrun --nproc-per-node 2 -m tide_comm.engine.cuda.rma_probe
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tide_comm.engine.base import Exchange
from tide_comm.engine.cuda.agreement import first_objection
from tide_comm.engine.cuda.allocations import VmmMemory
from tide_comm.engine.cuda.nccl import Nccl
from tide_comm.errors import TideError

PROBE_BYTES = 4 * 1024 * 1024
LIMIT_S = 120.0
"""For the command: NCCL waits for ever for a rank that is not there."""

ARENA = "arena"
NCCL_OWN = "ncclMemAlloc"


@dataclass(frozen=True)
class RmaWindow:
    """`ok`: puts can reach `memory`, the arena's kind or what ncclMemAlloc makes. The same on all ranks, except for `version`."""

    version: str
    """Of the NCCL in use on this rank; "" without one."""
    ok: bool
    memory: str
    reason: str

    def __str__(self) -> str:
        return f"NCCL {self.version or 'not there'}: window {'over ' + self.memory if self.ok else 'no'}: {self.reason}"


@contextlib.contextmanager
def arena_memory(device: int) -> Iterator[tuple[int, int]]:
    """(address, bytes) of memory made as an arena is."""
    memory = VmmMemory(device)
    try:
        yield memory.create(PROBE_BYTES), memory.nbytes
    finally:
        memory.free()


@contextlib.contextmanager
def nccl_memory(nccl: Nccl) -> Iterator[tuple[int, int]]:
    address = nccl.allocate(PROBE_BYTES)
    try:
        yield address, PROBE_BYTES
    finally:
        nccl.free(address)


def probe(
    exchange: Exchange,
    rank: int,
    world: int,
    device: int,
    load: Callable[[], Nccl] = Nccl,
    arena: Callable[[int], contextlib.AbstractContextManager[tuple[int, int]]] = arena_memory,
) -> RmaWindow:
    """Collective over the ranks of `exchange`, each with `device` current. Never raises for what it probes: the reason says what failed.

    Makes a communicator of its own and destroys it. After each step that can fail on one rank alone all agree, so that nobody waits
    inside NCCL for a rank that has given up.
    """
    nccl, failed = _attempt(load)
    version = nccl.version if nccl else ""
    objection = first_objection(exchange, failed)
    if objection:
        return RmaWindow(version, False, "", objection)
    assert nccl is not None
    unique, failed = _attempt(nccl.unique_id) if rank == 0 else (b"", "")
    objection = first_objection(exchange, failed)
    if objection:
        return RmaWindow(version, False, "", objection)
    unique = exchange(unique)[0]
    comm, failed = _attempt(lambda: nccl.init(world, unique, rank))
    objection = first_objection(exchange, failed)
    if not objection:
        assert comm is not None
        objection = _register(exchange, nccl, comm, arena(device))
        if not objection:
            found = RmaWindow(version, True, ARENA, "memory made as the arena's registers")
        else:
            other = _register(exchange, nccl, comm, nccl_memory(nccl))
            reason = f"the arena's kind does not register ({objection}), "
            reason += f"nor does ncclMemAlloc's ({other})" if other else "ncclMemAlloc's does"
            found = RmaWindow(version, not other, "" if other else NCCL_OWN, reason)
    else:
        found = RmaWindow(version, False, "", objection)
    if comm:
        _attempt(lambda: nccl.destroy(comm))
    return found


def _register(
    exchange: Exchange, nccl: Nccl, comm: int, making: contextlib.AbstractContextManager[tuple[int, int]]
) -> str:
    """Registers what `making` makes, and lets go of it again. Returns the first rank's objection, or ""."""
    with contextlib.ExitStack() as stack:
        made, failed = _attempt(lambda: stack.enter_context(making))
        objection = first_objection(exchange, failed)
        if objection:
            return objection
        assert made is not None
        address, nbytes = made
        window, failed = _attempt(lambda: nccl.register(comm, address, nbytes))
        objection = first_objection(exchange, failed)
        if window:
            # Collective where it worked on all ranks; where it did not, the window goes with the communicator.
            if not objection:
                _, failed = _attempt(lambda: nccl.deregister(comm, window))
                objection = first_objection(exchange, failed)
        return objection


def _attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """(what was made or None, why not or "")."""
    try:
        return make(), ""
    except TideError as error:
        return None, str(error)


def main() -> None:
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    def exchange(mine: Any) -> list[Any]:
        everybody: list[Any] = [None] * world
        dist.all_gather_object(everybody, mine)
        return everybody

    device = 0
    if torch.cuda.is_available():
        device = int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count()
        torch.cuda.set_device(device)
        torch.zeros(1, device="cuda")  # makes the context
    found = probe(exchange, rank, world, device)
    # In one write each, so that lines of several ranks do not mix.
    os.write(1, f"rank {rank}, GPU {device}: {found}\n".encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
