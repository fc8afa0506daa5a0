"""A folder of measured trainings: what is finished is kept, what failed is written down with its reason and does not stop the others."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_tide.errors import ConfigError
from torchtitan_tide.measure.launch import Launcher, reason_of


@dataclass(frozen=True)
class Training:
    """One training. `name`: of its files, unique in a session; `recorder`: `entry.py`'s kind and what comes after the record's path."""

    name: str
    config: str
    overrides: tuple[str, ...]
    recorder: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What a training left: a record, or why there is none. Neither: it has not been run (with these settings)."""

    record: dict[str, Any] | None = None
    error: str = ""
    began: str = ""
    """Date and time, local."""
    commit: str = ""

    @classmethod
    def of(cls, kept: dict[str, Any]) -> Result:
        """From what `Session.run` wrote."""
        return cls(kept.get("record"), kept.get("error", ""), kept.get("began", ""), kept.get("commit", ""))

    @property
    def state(self) -> str:
        return "done" if self.record is not None else "failed" if self.error else "not run"


class Session:
    """Trainings in `folder`, started by `launcher`; each may take `limit_s` seconds."""

    def __init__(self, folder: Path, launcher: Launcher, where: str, limit_s: float) -> None:
        """`where`: ranks and launcher in words; a result counts as finished only for the same."""
        self.folder, self.launcher, self.where, self.limit_s = folder, launcher, where, limit_s
        try:
            (folder / "runs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {folder}: cannot be made: {error.strerror}") from None

    def _file(self, training: Training, kind: str) -> Path:
        return self.folder / "runs" / f"{training.name}.{kind}"

    def fingerprint(self, training: Training) -> str:
        """Of all that decides what a training does, but for the code."""
        try:
            text = Path(training.config).read_text()
        except OSError as error:
            text = f"unreadable: {error.strerror}"  # the training's own check tells it
        parts = [training.config, text, training.overrides, training.recorder, self.where]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def result(self, training: Training) -> Result:
        """What earlier starts left of a training with these settings."""
        try:
            kept = json.loads(self._file(training, "json").read_text())
        except (OSError, json.JSONDecodeError):
            return Result()
        if kept.get("fingerprint") != self.fingerprint(training):
            return Result()
        return Result.of(kept)

    def run(self, training: Training) -> Result:
        """Run a training, whatever there is of it. Its log is kept."""
        raw, log = self._file(training, "raw"), self._file(training, "log")
        raw.unlink(missing_ok=True)
        self._file(training, "json").unlink(missing_ok=True)
        kind, *settings = training.recorder
        words = [kind, str(raw.resolve()), *settings, "--", training.config, *training.overrides]
        began = time.time()
        code = self.launcher.run(words, log, self.limit_s)
        kept: dict[str, Any] = {
            "name": training.name,
            "config": training.config,
            "overrides": training.overrides,
            "fingerprint": self.fingerprint(training),
            "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)),
            "took_s": round(time.time() - began, 1),
            "commit": commit(),
        }
        if raw.exists() and code == 0:
            kept["record"] = json.loads(raw.read_text())
        elif code == 0:
            kept["error"] = (
                f"ended well but left no record in {raw}: rank 0 must be able to write there (a shared --out folder?)"
            )
        else:
            kept["error"] = reason_of(log.read_text(errors="replace"), code, self.limit_s)
        raw.unlink(missing_ok=True)
        self._file(training, "json").write_text(json.dumps(kept, indent=1) + "\n")
        return Result.of(kept)

    def finish(self, trainings: list[Training], tell: Callable[[str], None], again: bool = False) -> dict[str, Result]:
        """Run what is not finished, or with `again` everything; the results of all, by name. One that fails does not stop the others."""
        results: dict[str, Result] = {}
        for i, training in enumerate(trainings):
            head = f"[{i + 1}/{len(trainings)}] {training.name}"
            found = self.result(training)
            if found.record is not None and not again:
                tell(f"{head}: kept, finished before")
            else:
                tell(f"{head}: running")
                began = time.monotonic()
                found = self.run(training)
                took = f"{time.monotonic() - began:.0f} s"
                failed = f"FAILED ({found.error}); its log: {self._file(training, 'log')}"
                tell(f"{head}: {f'done in {took}' if found.record is not None else failed}")
            results[training.name] = found
        return results


@functools.cache
def commit() -> str:
    """The project's commit, with "+" where files differ from it; "" outside of a repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        try:
            return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    found = git("rev-parse", "--short", "HEAD")
    return found + ("+" if found and git("status", "--porcelain", "--untracked-files=no") else "")
