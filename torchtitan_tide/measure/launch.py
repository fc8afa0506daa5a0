"""Starting one measured training: on this machine, by the user's own launcher, or together with other machines (`nodes.py`)."""

from __future__ import annotations

import os
import re
import shlex
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchtitan_tide.errors import ConfigError

HERE = (
    "{python} -m torch.distributed.run --standalone --nproc-per-node {ranks} --role rank --redirects 0 --tee 3 {entry}"
)
"""The launcher for one machine."""
FIELDS = ("python", "ranks", "port", "entry")
FIRST_PORT = 29600
"""Of templates with {port}: each training gets the next one, so that it does not meet one that has not quite ended."""
PORTS = 200
_SECONDARY = ("ChildFailedError", "torch.distributed.elastic", "ConnectionResetError", "DistNetworkError")


class Launcher(Protocol):
    """Runs `-m torchtitan_tide.measure.entry` with given arguments on all ranks."""

    def run(self, arguments: Sequence[str], log: Path, limit_s: float) -> int:
        """Exit code; -9 when it took longer than `limit_s`. All output goes to `log`."""

    def close(self) -> None:
        """No more trainings."""


@dataclass
class TemplateLauncher:
    """`template` with {python}, {ranks} (a machine), {port} and {entry} filled in; split as a shell would, run without a shell.

    {entry} stands for `-m torchtitan_tide.measure.entry ...`: as a word of its own for its arguments, inside a quoted word
    (`bash -c '... {entry}'`) for the same in shell's quotes. Raises `ConfigError` for a template without {entry}.
    """

    ranks: int
    template: str = HERE

    def __post_init__(self) -> None:
        self._count = 0
        try:
            used = {name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None}
        except ValueError as error:
            raise ConfigError(f"--launcher {self.template!r}: {error}; write {{{{ and }}}} for braces") from None
        if "entry" not in used or not used <= set(FIELDS):
            fields = ", ".join(f"{{{name}}}" for name in FIELDS)
            raise ConfigError(f"--launcher {self.template!r}: takes {fields} in braces, and needs {{entry}}")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The words of the next training's command."""
        from torchtitan_tide.measure.entry import MODULE

        entry = ["-m", MODULE, *arguments]
        port = FIRST_PORT + self._count % PORTS
        words: list[str] = []
        for word in shlex.split(self.template):
            if word == "{entry}":
                words += entry
            else:
                filled = {"python": sys.executable, "ranks": self.ranks, "port": port, "entry": shlex.join(entry)}
                words.append(word.format(**filled))
        return words

    def run(self, arguments: Sequence[str], log: Path, limit_s: float) -> int:
        command = self.command(arguments)
        self._count += 1
        return run_logged(command, log, limit_s)

    def close(self) -> None:
        pass


def run_logged(command: Sequence[str], log: Path, limit_s: float) -> int:
    """Exit code of a command whose output goes to `log`; it and all it started are ended after `limit_s` seconds (-9), or on Ctrl-C."""
    env = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        env.pop(name, None)  # of a torchrun around this process
    # The tree that this process runs, also where another one is installed.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), env.get("PYTHONPATH"))))
    import torch

    if not torch.cuda.is_available():
        # Ranks share the cores: more threads would only get in each other's way.
        env.setdefault("OMP_NUM_THREADS", "1")
    with log.open("w") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        try:
            # A session of its own, so that nothing that hangs is left behind.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            file.write(f"error: {command[0]}: {error.strerror}\n")
            return 127
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            if process.poll() is None:
                end_session(process)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """SIGTERM raises `SystemExit` inside, so that `run_logged` ends what runs. Python's own way would leave the ranks behind."""
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def end_session(process: subprocess.Popen[bytes], patience_s: float = 10.0) -> None:
    """Ask a process's session to end (torchrun then ends its ranks), and kill what is left of it."""
    for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, patience_s)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + wait_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)


def reason_of(log: str, code: int, limit_s: float) -> str:
    """Why a training failed, in a line: what the first rank that complained said; ranks that fail because another did come later."""
    if code == -signal.SIGKILL:
        return f"took longer than {limit_s:.0f} s and was ended (--limit-s)"
    lines = [re.sub(r"^(\[[\w.]+\]:?\s?)+", "", line).strip() for line in log.splitlines()]
    for line in lines:
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    named = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Failure|Timeout)\w*: .+")
    for line in lines:
        if named.match(line) and not any(word in line for word in _SECONDARY):
            return line[:300]
    last = next((line for line in reversed(lines) if line), "no output")
    return f"exit code {code}: {last[:300]}"
