"""What step.py, collectives.py and beside.py have written, as report.py and plot.py read it. Needs no PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {"step": "tokens", "collectives": "models", "beside": "cases"}
"""Scripts, and the key that only their files have."""
NEEDED = ("date", "options", "machine", "gpus", "ranks", "torch", "nccl")
NOT_ARGUMENTS = ("out", "traces", "commit")


class FiguresError(Exception):
    """A file that is no benchmark's; the message fits on a line."""


@dataclass(frozen=True)
class Run:
    """One file. `kind`: the script that wrote it."""

    kind: str
    file: str
    found: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        return self.found["options"]

    @property
    def command(self) -> str:
        """As it was started; of a file that does not say, its settings and options in full."""
        if self.found.get("command"):
            return self.found["command"]
        env = {
            k: v
            for k, v in self.found.get("env", {}).items()
            if k not in ("NCCL_VERSION", "CUDA_DEVICE_MAX_CONNECTIONS")
        }
        words = [f"{k}={v}" for k, v in env.items()]
        words += ["torchrun", "--nproc-per-node", str(self.found["ranks"]), f"scripts/bench/{self.kind}.py"]
        for name, value in self.options.items():
            if name in NOT_ARGUMENTS or value in (None, False):
                continue
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words.append(",".join(map(str, value)) if isinstance(value, list) else str(value))
        return " ".join(["PYTHONPATH=.", *words])

    @property
    def machine(self) -> str:
        gpus, ranks = self.found["gpus"], self.found["ranks"]
        if not gpus:
            return f"{ranks} ranks on the {self.found['machine']}"
        shared = f" shared by {ranks} ranks" if gpus < ranks else ""
        return f"{gpus} x {self.found['machine']}{shared}"

    @property
    def source(self) -> str:
        """Date, machine, versions and commit."""
        nccl = self.found["nccl"]
        words = [self.found["date"][:10], self.machine, f"PyTorch {self.found['torch']}"]
        words += [f"NCCL {nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}"] if nccl else []
        return ", ".join([*words, f"commit {self.found.get('commit') or 'not kept'}"])

    def steps(self) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
        """Of step.py: (what was trained, rows) by number of tokens."""
        o = self.options
        for tokens, rows in self.found["tokens"].items():
            words = [o["model"], f"{tokens} tokens", f"{o['param_dtype']} parameters"]
            words += ["Slot-Reuse"] if o["mode"] == "slot_reuse" else []
            words += ["checkpointed"] if o["checkpoint"] == "full" else []
            words += [f"STAGE {o['stage_mib']} MiB"] if o.get("stage_mib") else []
            yield ", ".join(words), rows


def load(files: Sequence[Path]) -> list[Run]:
    """Raises `FiguresError` for a file that cannot be read or is no benchmark's."""
    runs = []
    for file in files:
        try:
            found = json.loads(file.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise FiguresError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
        except json.JSONDecodeError as error:
            raise FiguresError(f"{file}: not JSON: {error}") from None
        kind = next((kind for kind, key in KINDS.items() if isinstance(found, dict) and key in found), None)
        if kind is None:
            raise FiguresError(f"{file}: none of {', '.join(f'{k}.py' for k in KINDS)} wrote this")
        if missing := [key for key in NEEDED if key not in found]:
            raise FiguresError(f"{file}: {kind}.py's, but without {', '.join(missing)}")
        runs.append(Run(kind, str(file), found))
    return runs


def measured(rows: dict[str, dict[str, Any]], key: str) -> dict[str, float]:
    """One figure of those rows that have it."""
    return {name: row[key] for name, row in rows.items() if row.get(key) is not None}
