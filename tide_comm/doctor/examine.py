"""One machine: read it within time limits, check it, say what TIDE will do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tide_comm.doctor import check_gpus, check_network, check_system
from tide_comm.doctor.facts import Driver, Facts, Finding, Network, Software, System
from tide_comm.doctor.outcome import Outcome, outcome
from tide_comm.doctor.read_gpus import LIMIT_S, MULTICAST_LIMIT_S, read_driver, read_multicast
from tide_comm.doctor.read_network import read_network
from tide_comm.doctor.read_system import read_software, read_system
from tide_comm.limited import within

READ_LIMIT_S = 10.0
"""For files in /proc and /sys: a network card's firmware can be slow to answer for its counters."""
IMPORT_LIMIT_S = 60.0
"""For PyTorch, from a slow file system."""

NOT_PROBED: tuple[bool, str] | None = (False, "not probed")

Made = TypeVar("Made")


@dataclass(frozen=True)
class Examination:
    """What travels between machines and what `--json` prints of one. `problems`: readers that failed, with the reason."""

    host: str
    findings: tuple[Finding, ...]
    outcome: Outcome
    problems: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: TIDE's engine for the hardware that is there works; 1: not."""
        return int(not self.outcome.works or any(f.status == "missing" for f in self.findings))

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "exit_code": self.exit_code}


def gather(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> tuple[Facts, tuple[str, ...]]:
    """(facts, why some are missing). Takes seconds, at the very worst the sum of the limits."""
    environment = os.environ if environment is None else environment
    problems = []

    def read(what: str, limit_s: float, make: Callable[[], Made], otherwise: Made) -> Made:
        made, problem = within(limit_s, make, otherwise)
        if problem:
            problems.append(f"{what}: {problem}")
        return made

    system = read("operating system", READ_LIMIT_S, lambda: read_system(root, environment), System())
    software = read("PyTorch", IMPORT_LIMIT_S, read_software, Software(seam_problem="PyTorch did not load in time"))
    driver = read("driver", LIMIT_S + READ_LIMIT_S, lambda: read_driver(root), Driver(problem="not read"))
    network = read("network", READ_LIMIT_S, lambda: read_network(root), Network())
    facts = Facts(system, software, driver, network)
    asked = read(
        "multicast",
        MULTICAST_LIMIT_S + READ_LIMIT_S,
        lambda: read_multicast(driver, software, environment),
        NOT_PROBED,
    )
    return replace(facts, multicast=asked), tuple(problems)


def check(facts: Facts, problems: tuple[str, ...] = ()) -> Examination:
    """Pure."""
    findings = (
        *check_system.all_system(facts),
        *check_gpus.all_gpus(facts),
        *check_network.all_network(facts),
        *check_system.all_limits(facts),
    )
    return Examination(facts.system.host, findings, outcome(facts), problems)


def examine() -> Examination:
    return check(*gather())
