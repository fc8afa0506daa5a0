"""Reads what the NVIDIA driver says, through a child process with a time limit, and where its GPUs hang."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tide_comm.doctor import pci
from tide_comm.doctor.facts import Driver, Gpu, Software
from tide_comm.limited import run_child

LIMIT_S = 20.0
"""The driver's first call takes seconds where no daemon keeps the GPUs awake."""
MULTICAST_LIMIT_S = 10.0


def child_command() -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("driver_child.py"))]


def read_driver(root: Path = Path("/"), command: Sequence[str] | None = None, limit_s: float = LIMIT_S) -> Driver:
    """The driver and the GPUs that this process may use. Never raises: `problem` says what went wrong."""
    compute, display = pci.nvidia_devices(root)
    said, problem = run_child(command or child_command(), limit_s, "asking the driver")
    facts: dict[str, Any] = {}
    if not problem:
        try:
            facts = json.loads(said.strip().splitlines()[-1])
        except (ValueError, IndexError):
            problem = f"asking the driver gave {said.strip()[-80:]!r}"
    version = facts.get("version") or pci.text(root / "sys/module/nvidia/version")
    return Driver(
        version,
        facts.get("cuda", 0),
        problem or facts.get("problem", ""),
        tuple(_gpu(root, found) for found in facts.get("gpus", ())),
        tuple((a, b) for a, b in facts.get("unreachable", ())),
        compute,
        display,
    )


def _gpu(root: Path, found: dict[str, Any]) -> Gpu:
    path, numa = pci.place(root, root / "sys/bus/pci/devices" / found["pci"])
    return Gpu(**{**found, "capability": tuple(found["capability"])}, path=path, numa=numa)


def read_multicast(
    driver: Driver, software: Software, environment: Mapping[str, str], command: Sequence[str] | None = None
) -> tuple[bool, str] | None:
    """(whether NVLink multicast may be used, the reason). None, and nothing is touched, where it would serve nothing."""
    from tide_comm.engine.cuda import multicast

    if len(driver.gpus) < 2:
        return None
    switched_off = multicast.off_by_environment(environment)
    if switched_off:
        return False, f"switched off by {switched_off}"
    if not all(gpu.multicast for gpu in driver.gpus):
        return False, "the device says that it has no multicast"
    if not all(gpu.nvlinks for gpu in driver.gpus):
        return False, "not every GPU has NVLinks that are up"
    if not software.engine:
        return False, "not probed: the CUDA engine is not there"
    gpu = driver.gpus[0].index
    found = multicast.decide("auto", gpu, environment, lambda _: True, command, MULTICAST_LIMIT_S)
    return found.allowed, f"GPU {gpu}: {found.reason}"
