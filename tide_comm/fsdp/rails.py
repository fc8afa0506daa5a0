"""What carries bytes between machines, and whether one write may reach all GPUs of a machine: decided once, by all ranks together.

A question that could do harm or takes long is put only where its answer decides something.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tide_comm.config import TideConfig
from tide_comm.engine.base import Engine, Exchange
from tide_comm.errors import TideError
from tide_comm.limited import within
from tide_comm.plan.topology import Topology
from tide_comm.progress import progress

logger = logging.getLogger("tide")

MULTICAST_BYTES = 64 * 1024 * 1024
"""Largest piece that goes to all lanes by one write, unless `multicast_max_bytes` says otherwise. A guess, which takes all pieces of a
Llama-70B block on 8 GPUs: `tide tune` measures it."""


@dataclass(frozen=True)
class Multicast:
    """Whether programs write to all lanes at once, and the report's line ("": none); the same on all ranks."""

    used: bool
    line: str

    def outcome(self, apart: str) -> str:
        """The line once there is an engine; `apart`: why it runs these programs lane by lane, or ""."""
        return f"multicast: no, lane by lane ({apart})" if self.used and apart else self.line


@dataclass(frozen=True)
class Rail:
    """`name` is "nccl", "loopback", "shm", or "" where none reaches all machines; the same on all ranks, as is `reason`."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"rail: {self.name or 'none'} ({self.reason})"


def needs_nccl(asked: str, device: str, machines: int, hosts: int) -> bool:
    """Whether NCCL would have to carry what crosses machines. On one host they are emulated, and "auto" copies."""
    return device == "cuda" and machines > 1 and (asked == "nccl" or (asked == "auto" and hosts > 1))


def choose(asked: str, device: str, machines: int, hosts: int, nccl: tuple[str, str] | None) -> Rail | None:
    """The rail of a shard group; None on one machine. `nccl`: (why it cannot be used or "", what was found), None if not asked."""
    if machines == 1:
        return None
    where = f"{machines} emulated machines of one host" if hosts == 1 else f"{machines} machines"
    if device == "cpu":
        if hosts > 1:
            return Rail("", f"{hosts} hosts: the host engine works within one host")
        if asked not in ("auto", "shm"):
            return Rail("", f'rail = "{asked}": not to be had on a CPU; takes "auto" or "shm"')
        return Rail("shm", where)
    if asked == "shm":
        return Rail("", 'rail = "shm": not to be had on GPUs; takes "auto", "nccl" or "loopback"')
    if needs_nccl(asked, device, machines, hosts):
        problem, found = nccl or ("it was not asked", "")
        return Rail("", problem) if problem else Rail("nccl", f"{where}; {found}")
    if hosts > 1:
        return Rail("", f'rail = "{asked}" copies within one host; {hosts} hosts take "auto" or "nccl"')
    return Rail("loopback", where)


def ask_nccl(
    exchange: Exchange, rank: int, world: int, device: torch.device, timeout_s: float, probe: Callable | None = None
) -> tuple[str, str]:
    """Collective: (why NCCL cannot be the rail or "", what was found), the same on all ranks. See `engine/cuda/rma_probe.py`.

    Raises `TideError` past `timeout_s`: NCCL itself waits for ever for a rank that does not come.
    """
    from tide_comm.engine.cuda import rma_probe

    index = torch.cuda.current_device() if device.index is None else device.index

    def here() -> rma_probe.RmaWindow:
        # A thread begins with device 0.
        with torch.cuda.device(index):
            return (probe or rma_probe.probe)(exchange, rank, world, index)

    with progress(logger, f"asking NCCL for a window over {world} ranks"):
        found, failed = within(timeout_s, here, None)
    if found is None:
        raise TideError(f"whether NCCL can be the rail could not be found out: {failed}")
    problem = "" if found.ok and found.memory == rma_probe.ARENA else found.reason
    # Words of one rank: versions and paths may differ where all are new enough.
    told: tuple[str, str] = exchange((problem, f"NCCL {found.version}, {found.reason}"))[0]
    return told


def multicast_bytes(config: TideConfig) -> int:
    """Bytes of the largest piece that goes to all lanes by one write, where there is multicast."""
    return config.multicast_max_bytes or MULTICAST_BYTES


def decide_multicast(
    config: TideConfig, topology: Topology, device: torch.device, exchange: Exchange, decide: Callable | None = None
) -> Multicast:
    """Collective: whether programs write to all lanes of a machine at once, the same on all ranks. `decide`: the probe.

    Raises `TideError`, on all ranks alike, if `multicast = "on"` cannot be had on GPUs. On a CPU there is no switch: "on" runs the same
    programs, each write a copy to every lane, and "auto" leaves them alone.
    """
    if device.type == "cpu" and config.multicast != "on":
        return Multicast(False, "")
    if topology.lanes == 1:
        return Multicast(False, f"multicast: no (machines of one {'GPU' if device.type == 'cuda' else 'rank'})")
    if device.type == "cpu":
        return Multicast(True, f"multicast: yes (host engine: a copy to every lane; {_most(config)})")
    used, reason = _ask(config, device, exchange, decide)
    if used:
        return Multicast(True, f"multicast: yes ({reason}; {_most(config)})")
    if config.multicast == "on":
        raise _not_to_be_had(reason)
    return Multicast(False, f"multicast: no ({reason})")


def insist(config: TideConfig, engine: Engine) -> None:
    """Ends an engine that runs lane by lane what `multicast = "on"` asks for; raises `TideError` then, on all ranks alike."""
    if engine.apart and config.multicast == "on":
        engine.close()
        raise _not_to_be_had(engine.apart)


def _not_to_be_had(reason: str) -> TideError:
    return TideError(f'multicast = "on" cannot be had: {reason}; take "auto" or "off"')


def _most(config: TideConfig) -> str:
    return f"pieces of at most {multicast_bytes(config)} bytes"


def _ask(config: TideConfig, device: torch.device, exchange: Exchange, decide: Callable | None) -> tuple[bool, str]:
    """(whether GPUs have it, the reason)."""
    if config.multicast == "off":
        return False, 'multicast = "off"'
    from tide_comm.engine.cuda import multicast

    index = torch.cuda.current_device() if device.index is None else device.index
    with progress(logger, "asking whether there is NVLink multicast"):
        found = (decide or multicast.decide_together)(config.multicast, index, exchange)
    return found.allowed, exchange(found.reason)[0]
