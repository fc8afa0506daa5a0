"""Whether NVLink multicast may be used. Finding out can do harm, so it is asked in steps, and the first "no" ends it.

On some hosts a program that makes a multicast object puts all GPUs out of service, for everybody. There it is switched off by environment
variables, which are looked at before anything else, here and again in the C code that would call the driver. Then come the configuration
and what the device says of itself. Only then does a process of its own, with a time limit, make such an object and free it again: drivers
have hung or crashed there where the fabric was not set up. Last, all ranks take the first "no" that any of them has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tide_comm.engine.base import Exchange
from tide_comm.engine.cuda import library
from tide_comm.engine.cuda.agreement import first_objection
from tide_comm.errors import TideError
from tide_comm.limited import run_child

if TYPE_CHECKING:
    import torch

LIMIT_S = 20.0
"""How long the child may take: a context and a few driver calls take two or three seconds."""
_DISABLING = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")


@dataclass(frozen=True)
class Multicast:
    """`reason` says why not, or what was seen to work."""

    allowed: bool
    reason: str


def off_by_environment(env: Mapping[str, str]) -> str:
    """The variable that switches multicast off, or "". What is set and does not clearly permit it is off."""
    nvls = env.get("NCCL_NVLS_ENABLE", "")
    if nvls and not (nvls.isascii() and nvls.isdecimal() and int(nvls)):
        return f"NCCL_NVLS_ENABLE={nvls}"
    for name in _DISABLING:
        value = env.get(name, "")
        if value and value.lower() not in ("0", "false", "off", "no"):
            return f"{name}={value}"
    return ""


def device_supports(device: int) -> bool:
    """What the driver says; makes nothing. Raises `TideError` without a driver."""
    code, supported = library.load().tide_multicast_supported(device)
    library.check(code, "asking whether there is multicast")
    return bool(supported)


def child_command(device: int) -> list[str]:
    """A Python without PyTorch, which would take longer to import than the limit allows on a busy file system."""
    return [sys.executable, str(Path(__file__).with_name("multicast_child.py")), str(library.path()), str(device)]


def ask_child(command: Sequence[str], limit_s: float) -> str:
    """Runs the probe; "" if it made its object, else why not. The child is killed at the limit."""
    _, failed = run_child(command, limit_s, "the probe")
    return failed


def decide(
    config: str,
    device: int,
    env: Mapping[str, str] | None = None,
    supports: Callable[[int], bool] = device_supports,
    command: Sequence[str] | None = None,
    limit_s: float = LIMIT_S,
) -> Multicast:
    """For this rank alone. `config` is `TideConfig.multicast`: "on" is probed like "auto", the caller makes an error of a "no"."""
    switched_off = off_by_environment(os.environ if env is None else env)
    if switched_off:
        return Multicast(False, f"switched off by {switched_off}")
    if config == "off":
        return Multicast(False, 'multicast = "off"')
    try:
        supported = supports(device)
    except TideError as error:
        return Multicast(False, str(error))
    if not supported:
        return Multicast(False, f"device {device} says that it has no multicast")
    failed = ask_child(command or child_command(device), limit_s)
    return Multicast(not failed, failed or "a multicast object was made, bound and freed")


def gpu_id(device: int | torch.device) -> str:
    """Which GPU that is, whatever processes call it."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def decide_together(
    config: str,
    device: int,
    exchange: Exchange,
    mine: Callable[[], Multicast] | None = None,
    identify: Callable[[int], str] = gpu_id,
) -> Multicast:
    """Collective: what `decide` says (or `mine`) if all ranks are allowed, else no, with the first objecting rank's reason. Ranks that
    share a GPU are not asked: an object takes each GPU once."""
    forbidden = off_by_environment(os.environ) or config == "off"
    gpus = exchange(None if forbidden else identify(device))
    for rank, gpu in enumerate(gpus):
        if gpu is not None and gpu in gpus[:rank]:
            return Multicast(False, f"ranks {gpus.index(gpu)} and {rank} share a GPU")
    found = mine() if mine else decide(config, device)
    objection = first_objection(exchange, "" if found.allowed else found.reason)
    return Multicast(False, objection) if objection else found
