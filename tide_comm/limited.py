"""Work that may hang, within a time limit: a child process, or a read in this one."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

_KILL_WAIT_S = 2.0

Made = TypeVar("Made")


def run_child(command: Sequence[str], limit_s: float, what: str) -> tuple[str, str]:
    """(what it printed, why it failed or ""). The child and what it started are killed at the limit. `what`: its name in the reason."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        try:
            child.communicate(timeout=_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            # Stuck inside the driver: it ends when the driver lets go of it, and nothing here waits for that.
            return "", f"{what} did not end within {limit_s:g} s and cannot be killed"
        return "", f"{what} did not end within {limit_s:g} s"
    last = (said.strip().splitlines() or ["nothing was said"])[-1]
    if child.returncode < 0:
        return said, f"{what} was ended by {signal.Signals(-child.returncode).name} ({last})"
    return said, "" if child.returncode == 0 else f"{what} failed: {last}"


def within(limit_s: float, make: Callable[[], Made], otherwise: Made) -> tuple[Made, str]:
    """(what was made or `otherwise`, why not or ""). What takes longer is left behind in a thread that does not keep the process alive."""
    made: list[Made] = []
    failed: list[str] = []

    def work() -> None:
        try:
            made.append(make())
        except Exception as error:  # whatever it is, it is told and costs one line of the answer
            failed.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name="tide-limited", daemon=True)
    thread.start()
    thread.join(limit_s)
    if made:
        return made[0], ""
    return otherwise, failed[0] if failed else f"no answer within {limit_s:g} s"
