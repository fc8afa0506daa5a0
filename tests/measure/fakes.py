"""Launchers that start nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ABOUT = {"device": "a device", "gpu": False, "ranks": 2, "ranks_a_machine": 2, "torch": "2.13.0", "nccl": None}
TIDE_RAN = {"groups": 6, "groups_stock": 0, "stock_reasons": [], "collectives_stock": 0}


class FakeLauncher:
    """Writes what `record(arguments)` returns where the recorder would; a string is a log line of a training that fails."""

    def __init__(self, record: Callable[[Sequence[str]], dict[str, Any] | str]) -> None:
        self.record = record
        self.calls: list[list[str]] = []
        self.closed = False

    def run(self, arguments: Sequence[str], log: Path, limit_s: float) -> int:
        self.calls.append(list(arguments))
        made = self.record(arguments)
        if isinstance(made, str):
            log.write_text(made)
            return 1
        log.write_text("step 1\n")
        Path(arguments[1]).write_text(json.dumps(made))
        return 0

    def close(self) -> None:
        self.closed = True


def steps_record(step_ms: float, profile: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    """A record of `StepRecorder`'s."""
    record = {"step_ms": step_ms, "host_ms": 1.0, "peak_gib": 2.0, "arena_gib": 0.5, "device_gib": None, "loss": 3.0}
    return {"kind": "steps", **record, "profile": profile, **TIDE_RAN, "about": ABOUT, **more}


def losses_record(losses: list[float], **more: Any) -> dict[str, Any]:
    """A record of `LossRecorder`'s."""
    record = {"kind": "losses", "losses": losses, "norms": [1.0] * len(losses), "seconds": 1.0}
    return {**record, **TIDE_RAN, "about": ABOUT, **more}
